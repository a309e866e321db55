"""The pipeline over in-process queues: starting, ending, failing, and what only it can show."""

from __future__ import annotations

import asyncio
import json
import threading
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from checksum_executor import (
    ChecksumExecutor,
    assert_served,
    checksum,
    checksum_20ms,
    checksum_short_stage,
    crashes_on_build,
    refuses_to_build,
)
from pipelines import STANDARD, assert_nothing_left, config_of, random_prompts, request, running

from wavepp.actors.local import Handover, LocalPipeline
from wavepp.actors.ports import Carry, Parcel, StageExecutor, StageOutput
from wavepp.config import EngineConfig
from wavepp.control.work import StageWork
from wavepp.errors import ConfigError, EngineDeadError, QueueFullError, RequestError
from wavepp.units import WaveNumber


def stage_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("wavepp-stage")]


@pytest.mark.parametrize("partition", [(4,), (1, 3), (3, 1), (2, 1, 1), (1, 1, 1, 1)])
async def test_answers_do_not_depend_on_the_partition(partition: tuple[int, ...]) -> None:
    options = {**STANDARD, "pipeline_parallel_size": len(partition), "layer_partition": partition}
    prompts = random_prompts(5, 12)
    async with running("local", checksum, **options) as pipeline:
        results = await asyncio.gather(*(pipeline.submit(request(p)) for p in prompts))
    for result, prompt in zip(results, prompts, strict=True):
        assert_served(result, prompt, 4)


async def test_request_larger_than_one_stage_is_refused_and_the_next_runs() -> None:
    """Only stage 1 is too small."""
    options = {**STANDARD, "num_gpu_blocks_override": 16}
    async with running("local", checksum_short_stage, **options) as pipeline:
        with pytest.raises(RequestError, match="needs 9 cache blocks of 4 tokens; stage 1 has 8"):
            await pipeline.submit(request([5] * 33))
        assert_served(await pipeline.submit(request([5] * 4)), [5] * 4, 4)
        prompts = random_prompts(2, 12, longest=32)
        results = await asyncio.gather(*(pipeline.submit(request(p)) for p in prompts))
        for result, prompt in zip(results, prompts, strict=True):
            assert_served(result, prompt, 4)


async def test_queue_limits_refuse_for_now() -> None:
    options = {**STANDARD, "max_num_seqs": 1, "max_num_queued_reqs": 2}
    async with running("local", checksum_20ms, **options) as pipeline:
        tasks = [asyncio.create_task(pipeline.submit(request([5] * 60))) for _ in range(8)]
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [outcome for outcome in outcomes if isinstance(outcome, QueueFullError)]
        assert 4 <= len(refused) <= 6
        assert all(error.code == "queue_full" for error in refused)
        assert_served(await pipeline.submit(request([5])), [5], 4)


async def test_chunks_of_a_prompt_follow_each_other_through_the_stages(tmp_path: Path) -> None:
    """Nobody waits for one chunk to come back before the next one starts."""
    trace = tmp_path / "trace.jsonl"
    options = {**STANDARD, "min_wave_tokens": 16, "trace": str(trace)}
    async with running("local", checksum_20ms, **options) as pipeline:
        assert_served(await pipeline.submit(request([5] * 128)), [5] * 128, 4)
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    reports: dict[tuple[int, int], dict[str, Any]] = {
        (record["value"]["wave"], record["value"]["report"]["ack"]["stage"]): (
            record["value"]["report"]
        )
        for record in records
        if record["kind"] == "wave"
    }
    assert len(reports) == 8 * 4
    for wave, following in pairwise(range(1, 9)):
        assert reports[following, 0]["forward_from_s"] < reports[wave, 1]["done_s"]
    assert reports[4, 0]["forward_from_s"] < reports[1, 3]["done_s"]
    for stage in range(4):  # later stages prepare before the activations are there
        assert reports[1, stage]["prepared_s"] <= reports[1, 0]["done_s"]


async def test_trace_holds_facts_and_effects_without_prompts(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    async with running("local", checksum, **STANDARD, trace=str(trace)) as pipeline:
        await pipeline.submit(request([123, 45, 123], request_id="traced"))
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    facts = [line["value"]["type"] for line in lines if line["kind"] == "fact"]
    assert facts[0] == "Arrived"
    assert set(facts) == {"Arrived", "RoundAnswered", "WaveCompleted"}
    decisions = [
        entry["decision"]["type"]
        for line in lines
        if line["kind"] == "effects"
        for effect in line["value"]
        for message in effect.get("messages", [effect.get("schedule")])[:1]
        if message
        for entry in message["entries"]
    ]
    assert [name for name in ("Announce", "Admit", "Free") if name in decisions] == [
        "Announce",
        "Admit",
        "Free",
    ]
    assert "[123" not in trace.read_text()


async def test_trace_that_can_not_be_written_is_a_config_error(tmp_path: Path) -> None:
    pipeline = LocalPipeline(
        config_of(transport="local", trace=str(tmp_path / "no" / "trace"), **STANDARD), checksum
    )
    with pytest.raises(ConfigError, match=r"trace .*No such file"):
        await pipeline.start()
    assert stage_threads() == []


@pytest.mark.parametrize(
    ("factory", "error", "words"),
    [
        (refuses_to_build, ConfigError, "not to the liking of stage 1"),
        (crashes_on_build, ZeroDivisionError, "stage 1 broke down"),
    ],
)
async def test_failed_start_leaves_no_thread(
    factory: Any, error: type[Exception], words: str
) -> None:
    pipeline = LocalPipeline(config_of(transport="local", **STANDARD), factory)
    with pytest.raises(error, match=words):
        await pipeline.start()
    assert stage_threads() == []
    await pipeline.close()


async def test_close_gives_everything_back_and_may_be_called_twice() -> None:
    built: list[ChecksumExecutor] = []

    def factory(config: EngineConfig, stage: int) -> StageExecutor:
        built.append(ChecksumExecutor(config, stage))
        return built[-1]

    pipeline = LocalPipeline(config_of(transport="local", **STANDARD), factory)
    await pipeline.start()
    await pipeline.submit(request([5]))
    await pipeline.close()
    await pipeline.close()
    assert [executor.closed for executor in built] == [True] * 4
    assert stage_threads() == []
    with pytest.raises(EngineDeadError, match="the engine is closed"):
        await pipeline.submit(request([5]))


async def test_close_aborts_what_is_left() -> None:
    pipeline = LocalPipeline(config_of(transport="local", **STANDARD), checksum_20ms)
    await pipeline.start()
    tasks = [asyncio.create_task(pipeline.submit(request([5] * 100))) for _ in range(4)]
    await asyncio.sleep(0.05)
    await pipeline.close()
    assert {result.finish_reason for result in await asyncio.gather(*tasks)} == {"abort"}


async def test_two_pipelines_one_after_another_and_at_once() -> None:
    async with running("local", checksum, **STANDARD) as first:
        assert_served(await first.submit(request([5])), [5], 4)
        async with running("local", checksum, **STANDARD) as second:
            assert_served(await second.submit(request([6])), [6], 4)
        assert_served(await first.submit(request([7])), [7], 4)


class StuckExecutor(ChecksumExecutor):
    """Stage 1 stops in the middle of a wave until it is told to go on."""

    release = threading.Event()

    def forward(self, work: StageWork, carry: Carry | None) -> StageOutput:
        if self.facts.stage == 1:
            self.release.wait()
        return super().forward(work, carry)


async def test_watchdog_ends_a_pipeline_without_progress(
    caplog: pytest.LogCaptureFixture,
) -> None:
    StuckExecutor.release.clear()
    pipeline = LocalPipeline(
        config_of(transport="local", watchdog_s=0.4, **STANDARD), StuckExecutor
    )
    await pipeline.start()
    try:
        await pipeline.check_health()
        with pytest.raises(EngineDeadError, match=r"no progress for .*waves \[1\] in the ring"):
            await pipeline.submit(request([5]))
        with pytest.raises(EngineDeadError, match="no progress"):
            await pipeline.check_health()
        with pytest.raises(EngineDeadError, match="no progress"):
            await pipeline.submit(request([6]))
        assert "self.release.wait()" in caplog.text
    finally:
        StuckExecutor.release.set()
        await pipeline.close()


async def test_lease_that_grows_old_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    StuckExecutor.release.clear()
    options = {**STANDARD, "max_num_batched_tokens": 4}
    async with running("local", StuckExecutor, lease_alarm_s=0.1, **options) as pipeline:
        tasks = [asyncio.create_task(pipeline.submit(request([5 + i] * 9))) for i in range(3)]
        try:
            await asyncio.sleep(1.0)
            stats = await pipeline.stats()
        finally:
            StuckExecutor.release.set()
        await asyncio.gather(*tasks)
    assert stats.leases == 3
    assert stats.lease_age_s_max > 0.1
    assert caplog.text.count("leases are older than lease_alarm_s 0.1") in (1, 2)


async def test_watchdog_leaves_slow_and_idle_pipelines_alone() -> None:
    executor = partial(ChecksumExecutor, wave_s=0.2)
    async with running("local", executor, watchdog_s=1.5, **STANDARD) as pipeline:
        assert_served(await pipeline.submit(request([5] * 150)), [5] * 150, 4)  # 13 waves' time
        await asyncio.sleep(2.0)
        assert_served(await pipeline.submit(request([5])), [5], 4)


class BrokenStage(ChecksumExecutor):
    """The last stage answers for a request that nobody asked about."""

    def forward(self, work: StageWork, carry: Carry | None) -> StageOutput:
        return StageOutput(carry=None, outputs=())


async def test_broken_contract_ends_the_pipeline_with_a_reason() -> None:
    async with running("local", BrokenStage, **{**STANDARD, "pipeline_parallel_size": 1}) as p:
        with pytest.raises(EngineDeadError, match="AssertionError"):
            await p.submit(request([5]))


async def test_stage_holds_its_lock_while_no_wave_is_computed() -> None:
    """Waves take a second: a hold with one inside would show, however busy the machine is."""
    executor = partial(ChecksumExecutor, wave_s=1.0)
    pipeline = LocalPipeline(config_of(transport="local", **STANDARD), executor)
    await pipeline.start()
    try:
        await pipeline.submit(request(list(range(10, 15))))
        await assert_nothing_left(pipeline)
        holds = [stage.core.tree_lock.hold_max_s for stage in pipeline._stages if stage.core]
        assert all(0 < hold < 1.0 for hold in holds)
    finally:
        await pipeline.close()


def test_a_blocking_send_returns_when_the_parcel_was_taken() -> None:
    handover = Handover(blocking=True)
    events: list[str] = []

    def send() -> None:
        for number in (1, 2):
            handover.put(Parcel(wave=WaveNumber(number)))
            events.append(f"sent {number}")

    sender = threading.Thread(target=send)
    sender.start()
    assert handover.get().wave == 1
    while not events:  # the sender goes on by itself, as far as the second parcel
        sender.join(0.001)
    assert sender.is_alive()
    assert events == ["sent 1"]
    assert handover.get().wave == 2
    sender.join()
    assert events == ["sent 1", "sent 2"]


@pytest.mark.parametrize("admission", ["serial", "wave"])
@pytest.mark.parametrize("reservation", ["none", "lease", "escrow"])
async def test_every_baseline_gives_the_same_answers(admission: str, reservation: str) -> None:
    """Shared prefixes in a pool that holds three of the prompts."""
    options = {**STANDARD, "admission": admission, "reservation": reservation}
    shared = list(range(10, 42))
    prompts = [[*shared[: 8 * (index % 5)], *([500 + index] * 40)] for index in range(16)]
    async with running("local", checksum, **options) as pipeline:
        results = await asyncio.gather(*(pipeline.submit(request(p)) for p in prompts))
        await assert_nothing_left(pipeline)
    for result, prompt in zip(results, prompts, strict=True):
        assert_served(result, prompt, 4)
