"""LeaderMachine against stages played by hand: rounds, hints, claims, verdicts, limits, endings."""

from __future__ import annotations

import pytest
from desk import COLD, FULL, NEVER, Desk, names

from wavepp.cache.types import ReuseVote
from wavepp.errors import LocalProtocolError, RemoteProtocolError
from wavepp.protocol.facts import (
    AttemptFailed,
    Refused,
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


# -- capacity ------------------------------------------------------------------------------------


def refuse_head(desk: Desk) -> None:
    """a runs and holds the room; b is refused on stage 1, c not tried there."""
    desk.ready("a", "b", "c")
    desk.leader.books.gate.lanes_max = 1
    desk.admit("a")
    desk.leader.books.gate.lanes_max = 3
    assert names(desk.claims()) == ["b", "c"]
    effects = desk.vote("b", ReuseVote(), FULL)
    effects += desk.vote("c", ReuseVote(), None)
    assert effects == [
        Undo(request_id=RequestId("b"), attempt=1, fence_wave=NO_WAVE),
        Undo(request_id=RequestId("c"), attempt=1, fence_wave=NO_WAVE),
    ]
    desk.release(1)  # the refusing stage counts b's undo as one
    desk.release(0, count=5)  # the others count b's and c's, as they come
    assert desk.phases("b", "c") == [Phase.WAITING, Phase.READY]


def test_nobody_passes_a_head_that_waits_for_capacity() -> None:
    desk = Desk()
    refuse_head(desk)
    assert desk.compose() is None


def test_a_refused_head_is_retried_only_when_the_refusing_stage_released_something() -> None:
    desk = Desk()
    refuse_head(desk)
    desk.release(0)
    assert desk.compose() is None
    desk.release(1)
    claims = desk.claims()
    assert names(claims) == ["b", "c"]
    assert [claim.attempt for claim in claims] == [2, 2]


def test_a_head_that_several_stages_refused_waits_for_all_of_them() -> None:
    desk = Desk()
    desk.ready("a", "b")
    desk.leader.books.gate.lanes_max = 1
    desk.admit("a")
    desk.leader.books.gate.lanes_max = 2
    desk.claims()
    desk.vote("b", FULL, FULL)
    desk.release(0, 1)  # its own undo
    desk.release(0)
    assert desk.compose() is None
    desk.release(1)
    assert names(desk.claims()) == ["b"]


def test_a_refused_head_is_retried_when_nothing_is_held_at_all() -> None:
    """Whatever the counters said: nobody is left who could release something."""
    desk = Desk()
    refuse_head(desk)
    desk.serve("a")
    assert names(desk.claims()) == ["b", "c"]


def test_a_cancelled_head_no_longer_holds_up_the_others() -> None:
    desk = Desk()
    refuse_head(desk)
    assert desk.cancel("b") == [Abort(request_id=RequestId("b"), attempt=2, fence_wave=NO_WAVE)]
    assert names(desk.claims()) == ["c"]


def test_refused_alone_a_request_gives_up_headroom_then_reuse_then_hope() -> None:
    desk = Desk()
    desk.ready("a", reuse=attention(16))
    (claim,) = desk.claims(reuse=attention(16))
    assert (claim.limit, claim.oversized) == (16, False)
    desk.vote("a", FULL, alone=True)
    (claim,) = desk.claims(reuse=attention(16))
    assert (claim.limit, claim.oversized) == (16, True)
    desk.vote("a", FULL, alone=True)
    (claim,) = desk.claims(reuse=attention(16))
    assert (claim.limit, claim.oversized) == (0, True)
    effects = desk.vote("a", FULL, alone=True)
    assert effects == [
        Free(request_id=A, attempt=3, fence_wave=NO_WAVE),
        Refused(request_id=A, stage=0, refusal=FULL),
    ]
    assert desk.leader.record(A) is None
    desk.leader.check()


def test_a_request_that_never_fits_is_refused_for_good_at_once() -> None:
    desk = Desk()
    desk.ready("a", "b")
    desk.claims()
    effects = desk.vote("a", ReuseVote(), NEVER)
    assert effects[-1] == Refused(request_id=A, stage=1, refusal=NEVER)
    desk.vote("b", ReuseVote())
    assert desk.phases("b") == [Phase.ADMITTED]


def test_never_fitting_at_a_retry_is_tried_without_reuse_before_it_is_refused() -> None:
    desk = Desk()
    desk.ready("a", reuse=attention(16))
    desk.claims()
    desk.vote("a", attention(16), attention(8))
    desk.vote("a", NEVER)
    (claim,) = desk.claims(reuse=attention(16))
    assert claim.limit == 0
    assert desk.vote("a", NEVER)[-1] == Refused(request_id=A, stage=0, refusal=NEVER)


def test_a_head_refused_for_no_known_reason_does_not_spin() -> None:
    """Nothing is held by anyone, yet a stage says it is not alone: one try, then wait."""
    desk = Desk()
    desk.ready("a")
    desk.claims()
    desk.vote("a", FULL)
    assert names(desk.claims()) == ["a"]
    desk.vote("a", FULL)
    assert desk.compose() is None
    desk.release(0, 1, count=2)
    assert names(desk.claims()) == ["a"]


# -- limits --------------------------------------------------------------------------------------


def test_no_more_leases_and_lanes_than_max_num_seqs() -> None:
    desk = Desk(lanes=2)
    desk.ready("a", "b", "c")
    desk.admit("a", "b")
    assert desk.compose() is None
    desk.serve("a")
    assert names(desk.claims()) == ["c"]


def test_an_ended_request_keeps_its_lane_until_its_last_wave_came_back() -> None:
    desk = Desk(lanes=1)
    desk.ready("a", "b")
    desk.admit("a")
    desk.plan_span("a", 16, last=False)
    assert desk.cancel("a") == [Abort(request_id=A, attempt=1, fence_wave=WaveNumber(1))]
    assert desk.compose() is None
    desk.return_wave()
    assert names(desk.claims()) == ["b"]


def test_claims_are_first_come_first_served() -> None:
    desk = Desk(lanes=3)
    desk.ready("a", "b", "c", "d")
    assert names(desk.claims()) == ["a", "b", "c"]


def test_row_b11_one_oversized_request_at_a_time_and_only_when_no_other_holds_a_lease() -> None:
    desk = Desk(lanes=4, oversized_over=24)
    desk.arrive("small", tokens=8)
    desk.arrive("big1", "big2", tokens=32)
    desk.ready("late", tokens=8)
    assert names(desk.claims()) == ["small"]  # a big one may not claim beside it
    desk.vote("small", ReuseVote())
    assert desk.compose() is None  # it still holds a lease
    desk.plan_span("small", 8, last=True)
    assert desk.compose() is None
    desk.return_wave(small=8)  # materialised on every stage: no lease left
    claims = desk.claims()
    assert [(claim.request_id, claim.oversized) for claim in claims] == [("big1", True)]
    assert desk.compose() is None  # nobody claims while the exception is being used
    desk.vote("big1", ReuseVote())
    desk.plan_span("big1", 32, last=True)
    desk.return_wave(big1=32)
    assert desk.compose() is None  # big2 waits for big1 to end, and late does not pass it
    desk.leader.handle(RequestServed(request_id=RequestId("big1")), now=0.0)
    assert names(desk.claims()) == ["big2"]


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
