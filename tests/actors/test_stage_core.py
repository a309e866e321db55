"""StageCore: failures become records beside the activations, and nothing is ever raised."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from checksum_executor import ChecksumExecutor
from pipelines import config_of

from wavepp.actors.ports import Carry, DeviceTimes, Parcel, StageOutput
from wavepp.actors.stage import LoopTimes, StageCore
from wavepp.cache.keys import chain_keys, join_keys
from wavepp.control.options import CacheOptions
from wavepp.control.work import ErrorRecord, StageWork
from wavepp.protocol.messages import (
    Admit,
    Announce,
    LogEntry,
    PromptRecord,
    RoundMessage,
    SpanPlan,
    WaveSchedule,
)
from wavepp.protocol.votes import Claim, RoundAsk
from wavepp.units import LogNumber, RequestId, StageIndex, WaveNumber

A, B = RequestId("a"), RequestId("b")
TOKENS = np.arange(10, 18, dtype=np.int32)


class Executor(ChecksumExecutor):
    """Notes what it was asked to compute; breaks down when told to."""

    def __init__(self, stage: int) -> None:
        super().__init__(config_of(pipeline_parallel_size=3, block_size=4), stage)
        self.asked: list[list[RequestId]] = []
        self.breaks = False

    def forward(self, work: StageWork, carry: Carry | None) -> StageOutput:
        self.asked.append([span.request_id for span in work.spans])
        if self.breaks:
            raise RuntimeError("boom")
        return super().forward(work, carry)


class Clock:
    """A second passes between any two looks."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


async def admitted_core(stage: int) -> tuple[StageCore, Executor]:
    """A stage that has A and B admitted, eight tokens each."""
    executor = Executor(stage)
    core = StageCore(executor, CacheOptions(slots=4), clock=Clock())
    entries = []
    for name in (A, B):
        entries.append(Announce(request_id=name, attempt=1, num_tokens=8))
    prompts = tuple(
        PromptRecord(
            request_id=name,
            announced=LogNumber(2),
            token_ids=TOKENS,
            keys=join_keys(chain_keys(TOKENS.tobytes(), 4)),
            max_tokens=1,
        )
        for name in (A, B)
    )
    claims = tuple(Claim(request_id=name, attempt=1, limit=0) for name in (A, B))
    log = tuple(
        LogEntry(number=LogNumber(i + 1), decision=decision) for i, decision in enumerate(entries)
    )
    await core.round(
        RoundMessage(
            epoch=1,
            round_number=1,
            apply_to=LogNumber(2),
            entries=log,
            prompts=prompts,
            ask=RoundAsk(claims=claims),
        )
    )
    return core, executor


ADMISSIONS = tuple(
    LogEntry(number=LogNumber(3 + i), decision=Admit(request_id=name, attempt=1, endpoint=0))
    for i, name in enumerate((A, B))
)


def wave(number: int, *spans: tuple[RequestId, int]) -> WaveSchedule:
    plans = tuple(
        SpanPlan(request_id=name, attempt=1, start=start, length=4, final=start == 4)
        for name, start in spans
    )
    return WaveSchedule(
        epoch=1,
        wave=WaveNumber(number),
        spans=plans,
        apply_to=LogNumber(4),
        entries=ADMISSIONS,
    )


def carried(number: int, *names: RequestId, errors: tuple[ErrorRecord, ...] = ()) -> Parcel:
    hidden = np.arange(4 * len(names), dtype=np.uint64)
    return Parcel(
        wave=WaveNumber(number),
        carry={"hidden": hidden} if names else None,
        carried=names,
        errors=errors,
    )


def record(name: RequestId, stage: int, message: str, *, guilty: bool = False) -> ErrorRecord:
    return ErrorRecord(request_id=name, stage=StageIndex(stage), message=message, guilty=guilty)


async def test_executor_failure_blames_nobody_when_it_can_not_tell() -> None:
    core, executor = await admitted_core(0)
    executor.breaks = True
    parcel = core.forward(core.prepare(wave(1, (A, 0), (B, 0))), None)
    assert parcel.errors == (
        record(A, 0, "RuntimeError: boom"),
        record(B, 0, "RuntimeError: boom"),
    )
    assert (parcel.carry, parcel.carried, parcel.fatal) == (None, (), None)
    assert [report.stage for report in parcel.reports] == [0]


async def test_executor_failure_blames_the_only_one() -> None:
    core, executor = await admitted_core(0)
    executor.breaks = True
    parcel = core.forward(core.prepare(wave(1, (B, 0))), None)
    assert parcel.errors == (record(B, 0, "RuntimeError: boom", guilty=True),)


async def test_first_stage_skips_later_spans_of_a_failed_request() -> None:
    core, executor = await admitted_core(0)
    executor.breaks = True
    core.forward(core.prepare(wave(1, (A, 0))), None)
    executor.breaks = False
    parcel = core.forward(core.prepare(wave(2, (A, 4), (B, 0))), None)
    assert executor.asked == [[A], [B]]
    assert parcel.errors == (record(A, 0, "RuntimeError: boom"),)
    assert parcel.carried == (B,)


async def test_later_stage_skips_what_failed_upstream_and_keeps_count() -> None:
    core, executor = await admitted_core(1)
    upstream = record(A, 0, "gone", guilty=True)
    parcel = core.forward(core.prepare(wave(1, (A, 0), (B, 0))), carried(1, B, errors=(upstream,)))
    assert executor.asked == [[B]]
    assert parcel.errors == (upstream,)
    assert parcel.carried == (B,)
    nothing = core.forward(core.prepare(wave(2, (A, 4))), carried(2, errors=(upstream,)))
    assert executor.asked == [[B]]
    assert (nothing.errors, nothing.carried, nothing.carry) == ((upstream,), (), None)
    assert core.control.finished_wave == 2


async def test_span_that_is_carried_though_its_request_failed_here_is_computed_and_ignored() -> (
    None
):
    core, executor = await admitted_core(2)
    executor.breaks = True
    core.forward(core.prepare(wave(1, (A, 0), (B, 0))), carried(1, A, B))
    executor.breaks = False
    parcel = core.forward(core.prepare(wave(2, (A, 4))), carried(2, A))
    assert executor.asked == [[A, B], [A]]
    assert parcel.errors == (record(A, 2, "RuntimeError: boom"),)
    assert parcel.outputs == ()


@pytest.mark.parametrize("spans", [((A, 4), (B, 0)), ((B, 0), (A, 4))])
async def test_rows_of_a_carried_span_without_its_place_are_dropped(
    spans: tuple[tuple[RequestId, int], ...],
) -> None:
    """B is computed from its own rows, as if A had not been there."""
    core, executor = await admitted_core(1)
    before = carried(1, *(name for name, _ in spans))
    assert before.carry is not None
    parcel = core.forward(core.prepare(wave(1, *spans)), before)
    assert executor.asked == [[B]]
    misplaced = "the span starts at token 4, the sequence is at 0"
    assert parcel.errors == (record(A, 1, misplaced, guilty=True),)
    assert parcel.carried == (B,)
    alone, _ = await admitted_core(1)
    first = [name for name, _ in spans].index(B) * 4
    rows = {"hidden": before.carry["hidden"][first : first + 4]}
    expected = alone.forward(alone.prepare(wave(1, (B, 0))), replace(carried(1, B), carry=rows))
    assert parcel.carry is not None
    assert expected.carry is not None
    assert parcel.carry["hidden"].tolist() == expected.carry["hidden"].tolist()


async def test_broken_protocol_is_fatal_and_travels_down() -> None:
    core, executor = await admitted_core(0)
    parcel = core.forward(core.prepare(wave(2, (A, 0))), None)
    assert parcel.fatal == "RemoteProtocolError: stage 0 got wave 2 after wave 0"
    later, _ = await admitted_core(1)
    passed_on = later.forward(later.prepare(wave(1, (A, 0))), parcel)
    assert passed_on.fatal == parcel.fatal
    assert executor.asked == []
    again = core.forward(core.prepare(wave(1, (A, 0))), None)
    assert again.fatal == parcel.fatal


async def test_times_add_up_to_the_wall() -> None:
    core, _ = await admitted_core(0)
    parcel = core.forward(core.prepare(wave(1, (A, 0))), None)
    stats = await core.stats()
    (report,) = parcel.reports
    assert report.prepare_from_s < report.prepared_s <= report.forward_from_s < report.done_s
    started_s = 1.0
    assert stats.busy_s + sum(stats.wait_s.values()) == report.done_s - started_s
    assert stats.waves == 1


def test_every_moment_of_a_stage_counts_once() -> None:
    times = LoopTimes(until_s=10.0)
    times.add(11.0, 12.0, DeviceTimes(from_s=14.0, computing_s=14.5, done_s=16.0, sent_s=17.0))
    times.sent_s = 18.0
    times.add(20.0, 21.0, DeviceTimes(from_s=23.0, computing_s=23.0, done_s=24.0, sent_s=24.0))
    times.sent_s = 26.0  # a device that was busy while its host sent and prepared did not wait
    times.add(26.5, 27.0, DeviceTimes(from_s=24.0, computing_s=24.0, done_s=28.0, sent_s=28.0))
    assert times.no_wave_s == 1.0 + 2.0
    assert times.materialize_s == 1.0 + 0.5 + 1.0
    assert times.activation_s == 2.0 + 2.0
    assert times.busy_s == 1.5 + 1.0 + 4.0
    assert times.sending_s == 1.0 + 1.0
    assert (times.until_s, times.waves) == (28.0, 3)


async def test_what_is_of_an_epoch_that_is_over_is_ignored() -> None:
    core, executor = await admitted_core(0)
    core.forward(core.prepare(wave(1, (A, 0))), None)
    after = core.successor(2)
    executor.asked.clear()
    late = RoundMessage(epoch=1, round_number=2, apply_to=LogNumber(4))
    assert await after.round(late) is None
    parcel = after.forward(after.prepare(wave(2, (A, 4))), None)
    assert (parcel.epoch, parcel.reports, parcel.fatal, executor.asked) == (1, (), None, [])
    now = RoundMessage(epoch=2, round_number=1, apply_to=LogNumber(0))
    reply = await after.round(now)
    assert reply is not None
    assert (reply.epoch, reply.ack.applied) == (2, 0)


async def test_a_stage_keeps_its_times_but_nothing_cached_over_epochs() -> None:
    core, _ = await admitted_core(0)
    core.forward(core.prepare(wave(1, (A, 0))), None)
    before, after = await core.stats(), await core.successor(2).stats()
    assert (after.waves, after.busy_s) == (1, before.busy_s)
    assert (before.blocks_used, after.blocks_used, after.blocks_cached) == (2, 0, 0)
