"""StageMachine over a real StageCache: decisions once and in order, claims, votes, tombstones."""

from __future__ import annotations

import pytest
from cluster import attention, config, distinct, recurrent

from wavepp.cache.keys import make_prompt
from wavepp.cache.store import StageCache
from wavepp.cache.types import GroupSpec
from wavepp.errors import RemoteProtocolError
from wavepp.protocol.messages import NO_WAVE, Abort, Admit, Announce, Free, Undo
from wavepp.protocol.stage import StageMachine
from wavepp.protocol.votes import Claim, Junction, Retry, RoundAsk
from wavepp.units import RequestId, StageIndex, WaveNumber

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


def machine(*groups: GroupSpec, headroom: int = 0) -> StageMachine:
    cache = StageCache(config(*(groups or (attention(8),)), headroom=headroom))
    return StageMachine(StageIndex(1), cache)


def announce(stage: StageMachine, name: RequestId, tokens: list[int]) -> None:
    stage.apply(Announce(request_id=name, attempt=1, num_tokens=len(tokens)))
    assert stage.store(name, make_prompt(tokens, 4))


def claim(name: RequestId, limit: int = 0, attempt: int = 1, oversized: bool = False) -> Claim:
    return Claim(request_id=name, attempt=attempt, limit=limit, oversized=oversized)


def undo(name: RequestId, attempt: int = 1, fence: int = 0) -> Undo:
    return Undo(request_id=name, attempt=attempt, fence_wave=WaveNumber(fence))


def admit(name: RequestId, endpoint: int = 0, attempt: int = 1) -> Admit:
    return Admit(request_id=name, attempt=attempt, endpoint=endpoint)


def abort(name: RequestId, attempt: int = 1, fence: int = 0) -> Abort:
    return Abort(request_id=name, attempt=attempt, fence_wave=WaveNumber(fence))


def serve(stage: StageMachine, name: RequestId, tokens: list[int]) -> None:
    """A whole life on this stage, so that its prefix is cached afterwards."""
    announce(stage, name, tokens)
    vote = stage.claim(claim(name))
    assert vote is not None
    assert vote.is_committed
    stage.apply(admit(name))
    stage.cache.materialize(name)
    stage.cache.publish(name, len(tokens))
    stage.apply(Free(request_id=name, attempt=1, fence_wave=NO_WAVE))
    stage.release(name)
    stage.end_round()


def test_claim_leases_reserves_and_commits_in_one_vote() -> None:
    stage = machine()
    serve(stage, B, distinct(12, 0))
    announce(stage, A, distinct(14, 0))
    answer = stage.answer(RoundAsk(hints=(A,)))
    assert answer.hints[0].hint.reuse.attention == 12
    (vote,) = stage.answer(RoundAsk(claims=(claim(A, 12),))).votes
    assert (vote.is_committed, vote.endpoint, vote.refusal) == (True, 12, None)
    assert stage.cache.held() == (A,)
    stage.check()


def test_hints_own_nothing() -> None:
    stage = machine()
    serve(stage, B, distinct(12, 0))
    announce(stage, A, distinct(14, 0))
    before = stage.cache.stats()
    stage.answer(RoundAsk(hints=(A,)))
    assert stage.cache.stats() == before
    assert stage.cache.held() == ()


def test_later_claims_of_a_round_are_not_tried_after_a_refusal() -> None:
    stage = machine()
    for index, name in enumerate((A, B, C)):
        announce(stage, name, distinct(24 if name != C else 4, 100 * index))
    votes = stage.answer(RoundAsk(claims=(claim(A), claim(B), claim(C)))).votes
    assert [vote.request_id for vote in votes] == [A, B, C]
    assert votes[0].is_committed
    assert votes[1].refusal is not None
    assert votes[1].refusal.reason == "capacity"
    assert votes[2].lease is None  # it would have fitted
    assert stage.cache.held() == (A, B)
    (again,) = stage.answer(RoundAsk(claims=(claim(C),))).votes
    assert again is votes[2]  # its attempt was answered already; a new one needs an Undo
    stage.apply(undo(C))
    (vote,) = stage.answer(RoundAsk(claims=(claim(C, attempt=2),))).votes
    assert vote.is_committed  # the rule holds for one round


def test_never_fitting_claim_does_not_stop_the_round() -> None:
    stage = machine()
    announce(stage, A, distinct(40, 0))
    announce(stage, B, distinct(4, 100))
    votes = stage.answer(RoundAsk(claims=(claim(A), claim(B)))).votes
    assert votes[0].refusal is not None
    assert votes[0].refusal.reason == "never_fits"
    assert votes[1].is_committed


def test_refused_retry_stops_the_claims_of_the_next_round() -> None:
    """What a Retry needs and can't have is a refusal like any other."""
    stage = machine(attention(12), recurrent(4))
    shared = distinct(16, 0)
    serve_with_snapshots(stage, C, shared, [8, 16])
    announce(stage, B, [*shared, *distinct(8, 100)])
    announce(stage, A, [*shared, *distinct(12, 200)])
    votes = stage.answer(RoundAsk(claims=(claim(B, 16), claim(A, 16)))).votes
    assert [vote.is_committed for vote in votes] == [True, True]
    stage.apply(Retry(request_id=A, attempt=2, limit=0))
    announce(stage, C, distinct(1, 300))
    votes = stage.answer(RoundAsk(claims=(claim(C),))).votes
    assert votes[0].request_id == A
    assert votes[0].attempt == 2
    assert votes[0].refusal is not None
    assert votes[1].lease is None


def serve_with_snapshots(
    stage: StageMachine, name: RequestId, tokens: list[int], points: list[int]
) -> None:
    for point in points:
        part = [*tokens[:point], 9999]
        announce(stage, name, part)
        stage.claim(claim(name))
        stage.apply(admit(name))
        stage.cache.materialize(name)
        orders = stage.cache.snapshot_orders(name, [point])
        assert [order.position for order in orders.orders] == [point]
        stage.cache.publish(name, point)
        stage.cache.snapshot_taken(name, point)
        stage.apply(Free(request_id=name, attempt=1, fence_wave=NO_WAVE))
        stage.release(name)
        stage.end_round()
        stage.end_round()


def test_row_b8_retry_pins_the_earlier_snapshot_before_it_releases_the_later() -> None:
    """Two snapshots, at 4 and 8, both of others: lowering 8 -> 4 steals nobody's and ends."""
    stage = machine(attention(8), recurrent(2))
    tokens = distinct(8, 0)
    serve_with_snapshots(stage, C, tokens, [4, 8])
    announce(stage, A, [*tokens, 77])
    (vote,) = stage.answer(RoundAsk(claims=(claim(A, 8),))).votes
    assert (vote.endpoint, vote.is_committed) == (8, True)
    assert vote.reuse.snapshots == (4, 8)
    stage.apply(Retry(request_id=A, attempt=2, limit=4))
    (moved,) = stage.end_round()
    assert (moved.attempt, moved.endpoint, moved.is_committed) == (2, 4, True)
    stage.cache.check()
    stage.apply(admit(A, 4, attempt=2))
    sequence = stage.cache.materialize(A)
    assert sequence.endpoint == 4
    stage.apply(abort(A, 2))
    stage.release(A)
    stage.cache.check()
    assert stage.cache.held() == ()


def test_row_a4_rich_stage_unpins_what_lies_above_the_endpoint() -> None:
    stage = machine(attention(12))
    tokens = distinct(20, 0)
    serve(stage, B, [*tokens, 1])
    announce(stage, A, [*tokens, 2])
    stage.answer(RoundAsk(claims=(claim(A, 20),)))
    free_before = stage.cache.stats().groups[0].reclaimable
    stage.apply(Retry(request_id=A, attempt=2, limit=8))
    (vote,) = stage.end_round()
    assert (vote.endpoint, vote.is_committed) == (8, True)
    group = stage.cache.stats().groups[0]
    assert group.cached == 5
    assert group.reclaimable > free_before  # blocks 3.. have no owner left
    stage.cache.reset()  # drops what nobody pins
    assert stage.cache.stats().groups[0].cached == 2
    stage.cache.check()


def test_undo_gives_back_everything_and_counts_as_one_release_when_refused_here() -> None:
    stage = machine()
    announce(stage, A, distinct(24, 0))
    announce(stage, B, distinct(24, 100))
    stage.answer(RoundAsk(claims=(claim(A),)))
    (vote,) = stage.answer(RoundAsk(claims=(claim(B),))).votes
    assert vote.refusal is not None
    assert not vote.alone
    assert stage.counters.releases == vote.releases
    stage.apply(undo(B))
    assert stage.counters.releases == vote.releases + 1  # its own undo, exactly one
    stage.apply(undo(A))
    assert stage.counters.releases > vote.releases + 1  # somebody else's
    assert stage.cache.held() == ()
    stage.check()


def test_a_refusal_says_whether_anything_else_was_held() -> None:
    stage = machine(attention(8), headroom=8)  # two blocks must stay free
    announce(stage, A, distinct(28, 0))
    (vote,) = stage.answer(RoundAsk(claims=(claim(A),))).votes
    assert vote.refusal is not None
    assert vote.alone
    stage.apply(undo(A))
    (vote,) = stage.answer(RoundAsk(claims=(claim(A, attempt=2, oversized=True),))).votes
    assert vote.is_committed
    assert not vote.alone


def test_row_a9_claims_of_old_attempts_get_no_vote() -> None:
    stage = machine()
    announce(stage, A, distinct(8, 0))
    (first,) = stage.answer(RoundAsk(claims=(claim(A),))).votes
    stage.apply(undo(A))
    assert stage.answer(RoundAsk(claims=(claim(A, attempt=1),))).votes == ()
    (second,) = stage.answer(RoundAsk(claims=(claim(A, attempt=2),))).votes
    assert (first.attempt, second.attempt) == (1, 2)
    assert stage.cache.held() == (A,)


def test_a_claim_that_comes_twice_is_acted_on_once() -> None:
    stage = machine()
    announce(stage, A, distinct(8, 0))
    ask = RoundAsk(claims=(claim(A),))
    first, again = stage.answer(ask).votes, stage.answer(ask).votes
    assert first == again
    stage.check()
    stage.cache.check()


def test_a_claim_without_the_tokens_or_over_a_held_attempt_is_a_broken_contract() -> None:
    stage = machine()
    stage.apply(Announce(request_id=A, attempt=1, num_tokens=8))
    with pytest.raises(RemoteProtocolError, match="tokens have not come"):
        stage.claim(claim(A))
    announce(stage, B, distinct(8, 0))
    stage.claim(claim(B))
    with pytest.raises(RemoteProtocolError, match="attempt 1 was not undone"):
        stage.claim(claim(B, attempt=2))


def test_row_a6_abort_before_the_tokens_leaves_no_zombie() -> None:
    stage = machine()
    stage.apply(Announce(request_id=A, attempt=1, num_tokens=8))
    stage.apply(abort(A))
    assert not stage.store(A, make_prompt(distinct(8, 0), 4))
    assert stage.answer(RoundAsk(hints=(A,), claims=(claim(A),))) == stage.answer(RoundAsk())
    assert stage.is_idle
    assert stage.cache.held() == ()


def test_row_a6_abort_before_the_announcement_leaves_a_tombstone() -> None:
    stage = machine()
    stage.apply(abort(A))
    stage.apply(Announce(request_id=A, attempt=1, num_tokens=8))
    assert not stage.store(A, make_prompt(distinct(8, 0), 4))
    assert not stage.knows(A)
    answer = stage.answer(RoundAsk(hints=(A,), claims=(claim(A),)))
    assert (answer.hints, answer.votes) == ((), ())
    assert stage.is_idle


def test_a_round_composed_before_an_abort_finds_a_tombstone_after_it() -> None:
    """The wave that carries the abort overtakes the round; the round after knows of it."""
    stage = machine()
    announce(stage, A, distinct(8, 0))
    stage.end_round()
    stage.apply(abort(A))  # by a wave
    assert stage.answer(RoundAsk(hints=(A,), claims=(claim(A),))).votes == ()
    stage.end_round()
    with pytest.raises(RemoteProtocolError, match="does not know"):
        stage.claim(claim(A))  # tombstones do not pile up: no later round may name it


@pytest.mark.parametrize("when", ["announced", "claimed", "refused", "retried"])
def test_row_a7_abort_in_every_state_leaves_nothing(when: str) -> None:
    stage = machine(attention(8))
    tokens = distinct(16, 0)
    serve(stage, C, [*tokens, 1])
    if when == "refused":
        announce(stage, B, distinct(28, 500))
        stage.answer(RoundAsk(claims=(claim(B),)))
    announce(stage, A, [*tokens, 2])
    if when != "announced":
        (vote,) = stage.answer(RoundAsk(claims=(claim(A, 16),))).votes
        assert (vote.refusal is not None) == (when == "refused")
    if when == "retried":
        stage.apply(Retry(request_id=A, attempt=2, limit=8))
    stage.apply(abort(A, 2 if when == "retried" else 1))
    if when == "refused":
        stage.apply(abort(B))
    stage.end_round()
    stage.check()
    stage.cache.check()
    assert stage.cache.held() == ()
    assert stage.is_idle


def test_an_abort_applied_twice_changes_nothing_more() -> None:
    stage = machine()
    announce(stage, A, distinct(8, 0))
    announce(stage, B, distinct(8, 100))
    stage.answer(RoundAsk(claims=(claim(A), claim(B))))
    stage.apply(abort(A))
    stats = stage.cache.stats()
    stage.apply(abort(A))
    assert stage.cache.stats() == stats
    stage.cache.check()


def test_an_admitted_attempt_is_given_back_by_release_only() -> None:
    stage = machine()
    announce(stage, A, distinct(8, 0))
    stage.answer(RoundAsk(claims=(claim(A),)))
    stage.apply(admit(A))
    stage.cache.materialize(A)
    stage.apply(abort(A, fence=3))
    assert stage.cache.held() == (A,)  # a wave under way may still write to it
    assert not stage.is_idle
    stage.check()
    stage.release(A)
    assert stage.cache.held() == ()
    assert stage.is_idle
    stage.release(A)  # no harm


def test_admit_must_be_what_was_committed() -> None:
    stage = machine()
    announce(stage, A, distinct(8, 0))
    with pytest.raises(RemoteProtocolError, match="the driver says"):
        stage.apply(admit(A))
    stage.answer(RoundAsk(claims=(claim(A),)))
    for wrong in (admit(A, 4), admit(A, attempt=2)):
        with pytest.raises(RemoteProtocolError, match="the driver says"):
            stage.apply(wrong)
    stage.apply(admit(A))
    with pytest.raises(RemoteProtocolError, match="the driver says"):
        stage.apply(admit(A))


def test_decisions_on_unknown_requests_are_broken_contracts() -> None:
    stage = machine()
    for decision in (admit(A), undo(A), Retry(request_id=A, attempt=2, limit=0)):
        with pytest.raises(RemoteProtocolError, match="does not know"):
            stage.apply(decision)
    with pytest.raises(RemoteProtocolError, match="asked a hint for a"):
        stage.hint(A)
    announce(stage, A, distinct(8, 0))
    with pytest.raises(RemoteProtocolError, match="announced twice"):
        stage.apply(Announce(request_id=A, attempt=1, num_tokens=8))
    with pytest.raises(RemoteProtocolError, match="twice"):
        stage.store(A, make_prompt(distinct(8, 0), 4))
    with pytest.raises(RemoteProtocolError, match="no lease to move"):
        stage.apply(Retry(request_id=A, attempt=2, limit=0))
    with pytest.raises(TypeError):
        stage.apply(claim(A))  # type: ignore[arg-type]


def test_a_retry_must_raise_the_attempt() -> None:
    stage = machine()
    announce(stage, A, distinct(8, 0))
    stage.answer(RoundAsk(claims=(claim(A),)))
    with pytest.raises(RemoteProtocolError, match="after attempt 1"):
        stage.apply(Retry(request_id=A, attempt=1, limit=0))


def test_junctions_belong_to_one_attempt() -> None:
    stage = machine()
    announce(stage, A, distinct(30, 0))
    stage.answer(RoundAsk(claims=(claim(A),)))
    stage.apply(admit(A))
    stage.apply(Junction(request_id=A, attempt=1, position=16))
    stage.apply(Junction(request_id=A, attempt=1, position=8))
    stage.apply(Junction(request_id=A, attempt=2, position=12))
    assert stage.junctions(A) == (8, 16)
    stage.apply(undo(A, fence=1))
    assert stage.junctions(A) == ()
    assert stage.prompt(A) is not None
    stage.release(A)
    stage.apply(abort(A, 2))
    assert stage.junctions(A) == ()
    assert stage.prompt(A) is None


def test_row_b10_capacity_is_counted_after_pinning() -> None:
    """A prefix of 6 of 8 blocks, all evictable: 2 are left for the suffix, not 8."""
    stage = machine(attention(8))
    tokens = distinct(24, 0)
    serve(stage, C, [*tokens, 1])
    announce(stage, A, [*tokens, *distinct(8, 100)])
    (vote,) = stage.answer(RoundAsk(claims=(claim(A, 24),))).votes
    assert (vote.endpoint, vote.is_committed) == (24, True)
    announce(stage, B, distinct(1, 300))
    (other,) = stage.answer(RoundAsk(claims=(claim(B),))).votes
    assert other.refusal is not None
    assert other.refusal.available == 0
    stage.cache.check()


def test_row_d6_stages_without_a_window_vote_no_limit() -> None:
    for groups in ((attention(8),), (recurrent(4),)):
        stage = machine(*groups)
        announce(stage, A, distinct(9, 0))
        reuse = stage.answer(RoundAsk(hints=(A,))).hints[0].hint.reuse
        assert (reuse.attention is None) == (groups[0].kind != "attention")
        assert (reuse.snapshots is None) == (groups[0].kind != "recurrent")
