"""One stage: decisions, positions, fences, numbers, conservation."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from wavepp.cache.keys import chain_keys, join_keys
from wavepp.cache.types import RestoreSnapshot, ZeroSlot
from wavepp.control.options import CacheOptions
from wavepp.control.stage import StageControl
from wavepp.control.work import ErrorRecord, GroupFacts, StageFacts
from wavepp.errors import RemoteProtocolError
from wavepp.protocol.messages import (
    NO_WAVE,
    Abort,
    Admit,
    Announce,
    Decision,
    Free,
    LogEntry,
    PromptRecord,
    RoundMessage,
    RoundReply,
    SpanPlan,
    Undo,
    WaveSchedule,
)
from wavepp.protocol.votes import NOTHING_ASKED, Claim, RoundAsk
from wavepp.units import LogNumber, RequestId, StageIndex, WaveNumber

A, B = RequestId("a"), RequestId("b")


class Driver:
    """Writes the log and the messages of a driver by hand."""

    def __init__(self, stage: StageControl) -> None:
        self.stage = stage
        self.entries: list[LogEntry] = []
        self.sent = 0
        self.rounds = 0

    def decide(self, *decisions: Decision) -> None:
        for decision in decisions:
            number = LogNumber(len(self.entries) + 1)
            self.entries.append(LogEntry(number=number, decision=decision))

    def round(self, *prompts: PromptRecord, ask: RoundAsk = NOTHING_ASKED) -> RoundReply:
        self.rounds += 1
        return self.stage.handle(
            RoundMessage(
                epoch=1,
                round_number=self.rounds,
                apply_to=LogNumber(len(self.entries)),
                entries=tuple(self.entries),
                prompts=prompts,
                ask=ask,
            ),
            now=0.0,
        )

    def wave(self, number: int, *spans: SpanPlan) -> WaveSchedule:
        return WaveSchedule(
            epoch=1,
            wave=WaveNumber(number),
            spans=spans,
            apply_to=LogNumber(len(self.entries)),
            entries=tuple(self.entries),
        )

    def admit(self, name: RequestId, tokens: int, *, limit: int = 0) -> None:
        self.decide(Announce(request_id=name, attempt=1, num_tokens=tokens))
        self.round(prompt(name, tokens, announced=len(self.entries)))
        self.readmit(name, 1, limit=limit)

    def readmit(self, name: RequestId, attempt: int, *, limit: int = 0) -> None:
        claim = Claim(request_id=name, attempt=attempt, limit=limit)
        (vote,) = self.round(ask=RoundAsk(claims=(claim,))).answer.votes
        assert vote.is_committed, vote
        self.decide(Admit(request_id=name, attempt=attempt, endpoint=vote.endpoint))

    def used(self) -> dict[str, int]:
        """Units that requests hold, by group."""
        groups = self.stage.cache.stats().groups
        return {group.name: group.units - group.free - group.reclaimable for group in groups}


def prompt(name: RequestId, tokens: int, *, announced: int) -> PromptRecord:
    token_ids = np.arange(tokens, dtype=np.int32)
    return PromptRecord(
        request_id=name,
        announced=LogNumber(announced),
        token_ids=token_ids,
        keys=join_keys(chain_keys(token_ids.tobytes(), 4)),
        max_tokens=1,
    )


def span(name: RequestId, start: int, length: int, *, final: bool = False) -> SpanPlan:
    return SpanPlan(request_id=name, attempt=1, start=start, length=length, final=final)


@pytest.fixture
def driver() -> Iterator[Driver]:
    groups = (
        GroupFacts(name="full", kind="attention", units=6, bytes_per_unit=8),
        GroupFacts(name="state", kind="recurrent", units=2, bytes_per_unit=8),
    )
    facts = StageFacts(
        stage=StageIndex(1),
        layers=(1, 2),
        block_size=4,
        vocab_size=100,
        max_model_len=100,
        groups=groups,
    )
    driver = Driver(StageControl(facts, CacheOptions(slots=2)))
    yield driver
    driver.stage.check()


def run(driver: Driver, number: int, *spans: SpanPlan) -> None:
    driver.stage.finished(driver.stage.prepare(driver.wave(number, *spans)), ())


def test_prepare_of_the_first_wave_materializes(driver: Driver) -> None:
    driver.admit(A, 10)
    driver.round()
    assert driver.used() == {"full": 0, "state": 0}  # promised, not taken
    first = driver.stage.prepare(driver.wave(1, span(A, 0, 6)))
    assert driver.used() == {"full": 3, "state": 1}
    assert first.work.effects == (ZeroSlot(group="state", slot=0),)
    assert first.work.spans[0].slot == 0
    driver.stage.finished(first, ())
    second = driver.stage.prepare(driver.wave(2, span(A, 6, 4, final=True)))
    (work,) = second.work.spans
    assert work.token_ids.tolist() == [6, 7, 8, 9]
    assert sorted(work.block_tables["full"].tolist()) == [0, 1, 2]
    assert work.block_tables["full"][:2].tolist() == (
        first.work.spans[0].block_tables["full"].tolist()
    )
    assert list(work.block_tables) == ["full"]
    assert second.work.effects == ()
    assert (work.sample, work.next_token_id) == (True, None)
    assert first.work.spans[0].next_token_id == 6
    assert not first.work.spans[0].sample


def test_a_free_waits_for_the_wave_it_is_fenced_by(driver: Driver) -> None:
    driver.admit(A, 8)
    run(driver, 1, span(A, 0, 4))
    prepared = driver.stage.prepare(driver.wave(2, span(A, 4, 4)))
    driver.decide(Free(request_id=A, attempt=1, fence_wave=WaveNumber(2)))
    driver.round()
    assert driver.used() == {"full": 2, "state": 0}  # its tail's snapshot is cached
    driver.stage.finished(prepared, ())
    assert driver.used() == {"full": 0, "state": 0}
    assert driver.stage.is_idle


def test_a_wave_may_name_a_request_that_is_aborted_already(driver: Driver) -> None:
    driver.admit(A, 8)
    driver.decide(Abort(request_id=A, attempt=1, fence_wave=WaveNumber(2)))
    driver.round()
    run(driver, 1, span(A, 0, 4))
    assert not driver.stage.is_idle
    run(driver, 2, span(A, 4, 4))
    assert driver.stage.is_idle


def test_an_undone_attempt_goes_and_the_next_one_starts_anew(driver: Driver) -> None:
    driver.admit(A, 4)
    run(driver, 1, span(A, 0, 3))
    driver.decide(Undo(request_id=A, attempt=1, fence_wave=WaveNumber(1)))
    driver.readmit(A, 2)
    again = SpanPlan(request_id=A, attempt=2, start=0, length=4, final=True)
    prepared = driver.stage.prepare(driver.wave(2, again))
    assert prepared.errors == ()
    assert prepared.work.spans[0].token_ids.tolist() == [0, 1, 2, 3]


def test_a_prompt_that_outlived_its_request_is_dropped(driver: Driver) -> None:
    """The abort came with a wave, before the round that carries the tokens."""
    driver.decide(
        Announce(request_id=A, attempt=1, num_tokens=3),
        Abort(request_id=A, attempt=1, fence_wave=NO_WAVE),
    )
    run(driver, 1)
    driver.round(prompt(A, 3, announced=1))
    assert driver.stage.is_idle


def test_a_misplaced_span_fails_alone_with_both_numbers(driver: Driver) -> None:
    driver.admit(A, 8)
    driver.admit(B, 8)
    prepared = driver.stage.prepare(driver.wave(1, span(A, 4, 4), span(B, 0, 4)))
    assert prepared.errors == (
        ErrorRecord(
            request_id=A,
            stage=StageIndex(1),
            message="the span starts at token 4, the sequence is at 0",
            guilty=True,
        ),
    )
    assert [work.request_id for work in prepared.work.spans] == [B]


def test_a_failed_request_keeps_its_place_and_its_record(driver: Driver) -> None:
    driver.admit(A, 8)
    first = driver.stage.prepare(driver.wave(1, span(A, 0, 4)))
    failure = ErrorRecord(request_id=A, stage=StageIndex(1), message="boom", guilty=True)
    driver.stage.finished(first, (failure,))
    second = driver.stage.prepare(driver.wave(2, span(A, 4, 4)))
    assert [record.message for record in second.errors] == ["boom"]
    assert [work.start for work in second.work.spans] == [4]


def test_wave_numbers_must_be_consecutive(driver: Driver) -> None:
    with pytest.raises(RemoteProtocolError, match="stage 1 got wave 2 after wave 0"):
        driver.stage.prepare(driver.wave(2))
    prepared = driver.stage.prepare(driver.wave(1))
    driver.stage.finished(prepared, ())
    with pytest.raises(RemoteProtocolError, match="finished wave 1 after 1"):
        driver.stage.finished(prepared, ())


def test_a_wave_can_not_overtake_the_admission_it_relies_on(driver: Driver) -> None:
    driver.admit(A, 4)
    late = WaveSchedule(epoch=1, wave=WaveNumber(1), spans=(span(A, 0, 4),), apply_to=LogNumber(2))
    with pytest.raises(RemoteProtocolError, match="has decisions up to 1, the message needs 2"):
        driver.stage.prepare(late)


def test_an_admission_needs_the_tokens(driver: Driver) -> None:
    driver.decide(
        Announce(request_id=A, attempt=1, num_tokens=3),
        Admit(request_id=A, attempt=1, endpoint=0),
    )
    with pytest.raises(RemoteProtocolError, match="voted None, the driver says Admit"):
        driver.round()


def test_another_epoch_is_refused(driver: Driver) -> None:
    message = RoundMessage(epoch=2, round_number=1, apply_to=LogNumber(0))
    with pytest.raises(RemoteProtocolError, match="in epoch 1, the message is of epoch 2"):
        driver.stage.handle(message, now=0.0)


def test_an_unknown_message_is_refused(driver: Driver) -> None:
    with pytest.raises(TypeError):
        driver.stage.handle("news", now=0.0)  # type: ignore[arg-type]


def cached(driver: Driver) -> list[int]:
    """Units in the tree, by group."""
    return [group.cached for group in driver.stage.cache.stats().groups]


def test_a_span_is_published_after_it_was_executed(driver: Driver) -> None:
    driver.admit(A, 10)
    prepared = driver.stage.prepare(driver.wave(1, span(A, 0, 6)))
    assert cached(driver) == [0, 0]
    driver.stage.finished(prepared, ())
    assert cached(driver) == [1, 0]  # one full block
    run(driver, 2, span(A, 6, 4, final=True))
    assert cached(driver) == [2, 0]


def test_a_span_that_was_not_computed_publishes_nothing_nor_does_what_follows(
    driver: Driver,
) -> None:
    driver.admit(A, 12)
    run(driver, 1, span(A, 0, 4))
    failure = ErrorRecord(request_id=A, stage=StageIndex(0), message="boom", guilty=True)
    driver.stage.finished(driver.stage.prepare(driver.wave(2, span(A, 4, 4))), (failure,))
    run(driver, 3, span(A, 8, 4, final=True))
    assert cached(driver) == [1, 0]


def test_next_attempt_starts_at_what_the_first_one_published(driver: Driver) -> None:
    driver.admit(A, 10)
    run(driver, 1, span(A, 0, 8))
    driver.decide(Undo(request_id=A, attempt=1, fence_wave=WaveNumber(1)))
    driver.readmit(A, 2, limit=8)
    again = SpanPlan(request_id=A, attempt=2, start=8, length=2, final=True)
    prepared = driver.stage.prepare(driver.wave(2, again))
    assert prepared.errors == ()
    (effect,) = prepared.work.effects
    assert isinstance(effect, RestoreSnapshot)
    driver.stage.finished(prepared, ())


def test_snapshots_are_ordered_at_places_of_the_span(driver: Driver) -> None:
    """At its end if that ends a block, else at a multiple of 64 from its start."""
    driver.admit(A, 10)
    first = driver.stage.prepare(driver.wave(1, span(A, 0, 8)))
    (order,) = first.work.spans[0].snapshots
    assert (order.position, order.slot) == (8, 0)
    assert list(order.units) == ["state"]
    driver.stage.finished(first, ())
    second = driver.stage.prepare(driver.wave(2, span(A, 8, 2, final=True)))
    assert second.work.spans[0].snapshots == ()
    assert cached(driver) == [2, 1]


class CountingLock:
    """Counts holds; sees that they do not nest."""

    holds = 0
    is_held = False

    def __enter__(self) -> None:
        assert not self.is_held
        self.is_held = True
        self.holds += 1

    def __exit__(self, *exc_info: object) -> None:
        self.is_held = False


def test_the_tree_lock_is_held_per_operation_and_not_while_hints_are_looked_up() -> None:
    lock = CountingLock()

    class Shard(CountingLock):
        def __enter__(self) -> None:
            looked_up.append(lock.is_held)

    looked_up: list[bool] = []
    group = GroupFacts(name="full", kind="attention", units=60, bytes_per_unit=8)
    facts = StageFacts(
        stage=StageIndex(0),
        layers=(0, 1),
        block_size=4,
        vocab_size=100,
        max_model_len=100,
        groups=(group,),
    )
    shards = [Shard() for _ in range(16)]
    stage = StageControl(facts, CacheOptions(slots=9), tree_lock=lock, shard_locks=shards)
    driver = Driver(stage)
    names = [RequestId(f"r{index}") for index in range(5)]
    for name in names:
        driver.decide(Announce(request_id=name, attempt=1, num_tokens=9))
    driver.round(*(prompt(name, 9, announced=5) for name in names))
    before = lock.holds
    claims = tuple(Claim(request_id=name, attempt=1, limit=0) for name in names)
    driver.round(ask=RoundAsk(claims=claims, hints=tuple(names)))
    assert lock.holds - before >= len(names) + 5
    assert looked_up == [False] * 5
