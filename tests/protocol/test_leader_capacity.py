"""LeaderMachine against stages played by hand: who may claim, who waits, who is refused."""

from __future__ import annotations

from desk import FULL, NEVER, Desk, names

from wavepp.cache.types import ReuseVote
from wavepp.protocol.facts import Refused, RequestServed
from wavepp.protocol.messages import NO_WAVE, Abort, Free, Undo
from wavepp.protocol.states import Phase
from wavepp.units import RequestId, WaveNumber

A = RequestId("a")


def attention(endpoint: int) -> ReuseVote:
    return ReuseVote(attention=endpoint)


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
