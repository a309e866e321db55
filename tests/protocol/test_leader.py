"""LeaderMachine against stages played by hand: rounds, hints, claims, verdicts, limits, endings."""

from __future__ import annotations

import pytest
from desk import COLD, FULL, Desk, names

from wavepp.cache.types import ReuseVote
from wavepp.errors import LocalProtocolError, RemoteProtocolError
from wavepp.protocol.facts import (
    AttemptFailed,
    RequestFailed,
    RequestServed,
    SpanPlanned,
)
from wavepp.protocol.messages import NO_WAVE, Abort, Admit, Announce, Free, Undo
from wavepp.protocol.states import Phase
from wavepp.protocol.votes import Claim, Junction, Retry, RoundAnswer, RoundAsk
from wavepp.units import RequestId, StageIndex, WaveNumber

A = RequestId("a")


def attention(endpoint: int) -> ReuseVote:
    return ReuseVote(attention=endpoint)


# -- the usual life ------------------------------------------------------------------------------


def test_admission_takes_two_rounds_and_no_commit_round() -> None:
    desk = Desk()
    desk.arrive("a")
    first = desk.compose()
    assert first is not None
    assert first.announce == (Announce(request_id=A, attempt=1, num_tokens=32),)
    assert first.ask == RoundAsk(hints=(A,))
    desk.hint(first.ask, attention(16), attention(8))
    second = desk.compose()
    assert second is not None
    assert second.announce == ()
    assert second.ask == RoundAsk(claims=(Claim(request_id=A, attempt=1, limit=8),))
    assert desk.vote("a", ReuseVote()) == [Admit(request_id=A, attempt=1, endpoint=8)]
    assert [record.request_id for record in desk.leader.admitted] == ["a"]
    assert desk.compose() is None
    desk.leader.check()


def test_nothing_to_say_is_no_round_unless_the_log_must_travel() -> None:
    desk = Desk()
    assert desk.compose() is None
    plan = desk.compose(flush=True)
    assert plan is not None
    assert plan.ask == RoundAsk()


def test_rounds_batch_many_requests_and_hint_those_far_back() -> None:
    desk = Desk(lanes=2)
    desk.arrive(*(f"r{i}" for i in range(20)))
    plan = desk.compose()
    assert plan is not None
    assert [announce.request_id for announce in plan.announce] == [f"r{i}" for i in range(8)]
    assert plan.ask.hints == tuple(f"r{i}" for i in range(8))  # four a lane, no more
    desk.hint(plan.ask, COLD)
    plan = desk.compose()
    assert plan is not None
    assert names(plan.ask.claims) == ["r0", "r1"]
    assert [announce.request_id for announce in plan.announce] == []


def test_candidate_is_the_greatest_endpoint_all_stages_can_use() -> None:
    desk = Desk(stages=3)
    desk.arrive("a", tokens=120)
    plan = desk.compose()
    assert plan is not None
    desk.hint(
        plan.ask, ReuseVote(snapshots=(64, 72)), ReuseVote(snapshots=(64, 80)), attention(100)
    )
    (claim,) = desk.claims()
    assert claim.limit == 64


def test_candidate_leaves_a_token_to_compute() -> None:
    desk = Desk()
    desk.ready("a", tokens=8, reuse=ReuseVote())  # no stage has a limit
    (claim,) = desk.claims()
    assert claim.limit == 4


def test_late_hints_of_one_stage_do_not_make_a_request_ready() -> None:
    desk = Desk()
    desk.arrive("a")
    plan = desk.compose()
    assert plan is not None
    first, second = desk.stages
    desk.stages = [second]
    desk.hint(plan.ask, COLD)
    assert desk.phases("a") == [Phase.ANNOUNCED]
    desk.stages = [first]
    desk.hint(plan.ask, COLD)
    assert desk.phases("a") == [Phase.READY]


# -- hints go stale ------------------------------------------------------------------------------


def test_a_hint_of_an_older_index_is_refreshed_before_the_claim() -> None:
    """A burst that was hinted 0 still sees what was computed meanwhile."""
    desk = Desk(lanes=1)
    desk.ready("a", "b")
    desk.admit("a")
    desk.serve("a")
    desk.changed(0, 1)
    plan = desk.compose()
    assert plan is not None
    assert plan.ask == RoundAsk(hints=(RequestId("b"),))
    desk.hint(plan.ask, attention(28))
    plan = desk.compose()
    assert plan is not None
    assert plan.ask.claims == (Claim(request_id=RequestId("b"), attempt=1, limit=28),)


def test_hints_of_the_latest_round_are_fresh_enough() -> None:
    """While work runs, indices change between any two rounds: no endless refreshing."""
    desk = Desk()
    desk.ready("a")
    desk.changed(0, 1)
    plan = desk.compose()
    assert plan is not None
    assert names(plan.ask.claims) == ["a"]


def test_each_round_refreshes_those_near_the_head() -> None:
    desk = Desk(lanes=2)
    desk.ready("a", "b", "c", "d", "e")
    desk.admit("a", "b")
    desk.changed(1)
    desk.arrive("f")
    plan = desk.compose()
    assert plan is not None
    assert plan.ask.hints == ("f", "c", "d")  # one a lane; e is far back
    desk.hint(plan.ask, COLD)
    assert desk.compose() is None  # and stale hints alone are no reason for a round


def test_an_older_hint_does_not_replace_a_newer_one() -> None:
    desk = Desk()
    desk.ready("a", reuse=attention(8))
    desk.changed(0, 1)
    desk.hint(RoundAsk(hints=(A,)), attention(16))
    desk.versions = [0, 0]
    desk.hint(RoundAsk(hints=(A,)), attention(4))
    assert desk.record("a").best_hint() == 16
    assert desk.leader.books.tally.answers_ignored == 2


# -- verdicts ------------------------------------------------------------------------------------


def test_differing_endpoints_cost_one_retry_with_set() -> None:
    desk = Desk(agreement="set")
    desk.ready("a", tokens=120, reuse=ReuseVote(snapshots=(64, 72, 80)))
    assert names(desk.claims()) == ["a"]
    effects = desk.vote("a", ReuseVote(snapshots=(64, 72)), ReuseVote(snapshots=(64, 80)))
    assert effects == [Retry(request_id=A, attempt=2, limit=64)]
    assert desk.phases("a") == [Phase.RETRYING]
    plan = desk.compose()
    assert plan is not None  # a round that only fetches the votes
    assert plan.ask == RoundAsk()
    assert desk.vote("a", ReuseVote(snapshots=(64,))) == [
        Admit(request_id=A, attempt=2, endpoint=64)
    ]
    assert desk.record("a").claim.adjustments == 1


def test_differing_endpoints_step_down_with_stepwise() -> None:
    desk = Desk(agreement="stepwise")
    desk.ready("a", tokens=120, reuse=ReuseVote(snapshots=(64, 72, 80)))
    assert names(desk.claims()) == ["a"]
    first, second = ReuseVote(snapshots=(64, 72, 90)), ReuseVote(snapshots=(64, 80))
    assert desk.vote("a", first, second) == [Retry(request_id=A, attempt=2, limit=72)]
    assert desk.vote("a", first, second) == [Retry(request_id=A, attempt=3, limit=64)]
    assert desk.vote("a", first, second) == [Admit(request_id=A, attempt=3, endpoint=64)]


def test_a_retry_without_room_undoes_everywhere() -> None:
    desk = Desk()
    desk.ready("a", reuse=attention(16))
    desk.claims()
    desk.vote("a", attention(16), attention(8))
    effects = desk.vote("a", FULL, attention(8))
    assert effects == [Undo(request_id=A, attempt=2, fence_wave=NO_WAVE)]
    assert desk.phases("a") == [Phase.WAITING]
    assert desk.record("a").attempt == 3


def test_row_a9_votes_of_an_older_attempt_are_ignored() -> None:
    desk = Desk()
    desk.ready("a", reuse=attention(16))
    desk.claims()
    desk.vote("a", attention(16), attention(8))  # attempt 2 starts
    assert desk.vote("a", ReuseVote(), attempt=1, limit=16) == []
    assert desk.phases("a") == [Phase.RETRYING]
    assert desk.record("a").claim.votes == {}
    assert desk.leader.books.tally.answers_ignored == 2


def test_a_second_vote_of_the_same_stage_is_ignored() -> None:
    desk = Desk()
    desk.ready("a")
    desk.claims()
    ballot = desk.ballot("a", 1, 0, ReuseVote())
    for _ in range(3):
        assert desk.answer(StageIndex(0), RoundAnswer(votes=(ballot,))) == []
    assert desk.phases("a") == [Phase.CLAIMING]


def test_a_vote_of_an_attempt_to_come_is_a_broken_contract() -> None:
    desk = Desk()
    desk.ready("a")
    desk.claims()
    with pytest.raises(RemoteProtocolError, match="the attempt is 1"):
        desk.vote("a", ReuseVote(), attempt=2)


def test_votes_on_unknown_requests_are_ignored() -> None:
    desk = Desk()
    ballot = desk.ballot("gone", 1, 0, ReuseVote())
    assert desk.answer(StageIndex(0), RoundAnswer(votes=(ballot,))) == []


# -- endings -------------------------------------------------------------------------------------


def test_cancel_before_anybody_knows_needs_no_decision() -> None:
    desk = Desk()
    desk.arrive("a")
    assert desk.cancel("a") == []
    assert desk.compose() is None
    assert desk.cancel("a") == []  # nor twice


@pytest.mark.parametrize("phase", [Phase.ANNOUNCED, Phase.READY, Phase.CLAIMING, Phase.RETRYING])
def test_row_c8_cancel_before_admission_is_an_abort_without_a_fence(phase: Phase) -> None:
    desk = Desk()
    desk.arrive("a")
    plan = desk.compose()
    assert plan is not None
    if phase is not Phase.ANNOUNCED:
        desk.hint(plan.ask, attention(16))
    if phase in (Phase.CLAIMING, Phase.RETRYING):
        desk.claims()
    if phase is Phase.RETRYING:
        desk.vote("a", attention(16), attention(8))
    record = desk.record("a")
    assert record.phase is phase
    attempt = record.attempt
    assert desk.cancel("a") == [Abort(request_id=A, attempt=attempt, fence_wave=NO_WAVE)]
    late = [desk.ballot("a", attempt, 16, ReuseVote()) for _ in desk.stages]
    for stage in desk.stages:
        assert desk.answer(stage, RoundAnswer(votes=(late[stage],))) == []
    desk.hint(RoundAsk(hints=(A,)), COLD)
    assert record.phase is Phase.ABORTED
    desk.leader.check()
    assert desk.leader.books.gate.is_idle


def test_row_c1_an_abort_during_the_last_wave_is_an_abort() -> None:
    desk = Desk()
    desk.ready("a")
    desk.admit("a")
    desk.plan_span("a", 32, last=True)
    record = desk.record("a")
    assert desk.cancel("a") == [Abort(request_id=A, attempt=1, fence_wave=WaveNumber(1))]
    desk.return_wave(a=32)
    assert record.phase is Phase.ABORTED
    with pytest.raises(LocalProtocolError, match="not live"):
        desk.leader.handle(RequestServed(request_id=A), now=0.0)
    assert desk.leader.books.gate.is_idle


def test_a_failed_request_is_freed_behind_its_last_wave() -> None:
    desk = Desk()
    desk.ready("a")
    desk.admit("a")
    desk.plan_span("a", 16, last=False)
    desk.plan_span("a", 20, last=False)
    assert desk.leader.handle(RequestFailed(request_id=A), now=0.0) == [
        Free(request_id=A, attempt=1, fence_wave=WaveNumber(2))
    ]


def test_an_innocent_of_a_failed_wave_claims_again_when_its_old_waves_are_over() -> None:
    desk = Desk()
    desk.ready("a", "b")
    desk.admit("a", "b")
    desk.plan_span("a", 16, last=False)
    desk.plan_span("a", 32, last=True)
    desk.return_wave()
    desk.plan_span("b", 32, last=True)
    record = desk.record("b")
    assert desk.leader.handle(AttemptFailed(request_id=RequestId("b")), now=0.0) == [
        Undo(request_id=RequestId("b"), attempt=1, fence_wave=WaveNumber(3))
    ]
    assert (record.phase, record.attempt, record.run.planned) == (Phase.READY, 2, 0)
    assert desk.compose() is None  # its old attempt is still being written to
    desk.return_wave(b=32)  # too late to count
    assert record.run.computed == 0
    (claim,) = desk.claims()
    assert (claim.request_id, claim.attempt) == ("b", 2)


def test_facts_that_cannot_be_are_broken_contracts() -> None:
    desk = Desk()
    desk.ready("a")
    with pytest.raises(LocalProtocolError, match="arrived twice"):
        desk.arrive("a")
    with pytest.raises(LocalProtocolError, match="a is ready: 'plan'"):
        desk.plan_span("a", 8, last=False)
    with pytest.raises(LocalProtocolError, match="not live"):
        desk.plan_span("b", 8, last=False)
    with pytest.raises(TypeError):
        desk.leader.handle("a", now=0.0)  # type: ignore[arg-type]
    desk.admit("a")
    desk.plan_span("a", 8, last=False)
    with pytest.raises(LocalProtocolError, match="after RunState"):
        desk.leader.handle(
            SpanPlanned(request_id=A, wave=WaveNumber(2), end=8, last=False), now=0.0
        )


# -- junctions -----------------------------------------------------------------------------------


def test_row_d2_a_junction_is_ordered_where_the_attention_windows_share_more() -> None:
    desk = Desk(stages=3)
    desk.arrive("a", tokens=40)
    plan = desk.compose()
    assert plan is not None
    desk.hint(plan.ask, ReuseVote(attention=24, snapshots=(8,)), attention(20), ReuseVote())
    (claim,) = desk.claims()
    assert claim.limit == 8
    assert desk.vote("a", ReuseVote()) == [
        Admit(request_id=A, attempt=1, endpoint=8),
        Junction(request_id=A, attempt=1, position=20),
    ]


def test_no_junction_without_recurrent_windows() -> None:
    desk = Desk()
    desk.ready("a", reuse=attention(16))
    desk.claims()
    desk.vote("a", attention(16), attention(8))
    assert desk.vote("a", attention(8)) == [Admit(request_id=A, attempt=2, endpoint=8)]
