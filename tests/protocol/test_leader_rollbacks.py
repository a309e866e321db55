"""LeaderMachine when admitted requests, who hold less than an escrow, find no room."""

from __future__ import annotations

from desk import FULL, Desk, names

from wavepp.cache.types import Refusal, ReuseVote
from wavepp.protocol.facts import LeaderEffect, RolledBack
from wavepp.protocol.messages import Undo
from wavepp.protocol.states import Phase
from wavepp.units import RequestId, StageIndex, WaveNumber

GONE = Refusal(reason="gone", group="prefix", needed=4, available=1)


def roll_back(desk: Desk, name: str, *, refusal: Refusal = FULL) -> list[LeaderEffect]:
    """Its first wave came back: stage 1 had no room for it."""
    desk.plan_span(name, 32, last=True)
    desk.return_wave()
    fact = RolledBack(
        request_id=RequestId(name),
        stage=StageIndex(1),
        refusal=refusal,
        releases=desk.releases[1],
    )
    return desk.leader.handle(fact, now=desk.now)


def test_a_rolled_back_request_is_undone_behind_its_wave_and_waits_for_another_s_release() -> None:
    desk = Desk()
    desk.ready("a", "b")
    desk.admit("a", "b")
    undo = Undo(request_id=RequestId("b"), attempt=1, fence_wave=WaveNumber(1))
    assert roll_back(desk, "b") == [undo]
    assert desk.phases("a", "b") == [Phase.ADMITTED, Phase.WAITING]
    desk.release(1)  # what it gave back itself
    desk.release(0, count=3)
    assert desk.claims() == ()
    desk.release(1)
    claims = desk.claims()
    assert [(claim.request_id, claim.attempt) for claim in claims] == [("b", 2)]


def test_nobody_passes_a_rolled_back_request_even_before_its_fence_has_fallen() -> None:
    desk = Desk(lanes=3)
    desk.ready("a", "b", "c")
    desk.leader.books.gate.lanes_max = 2
    desk.admit("a", "b")
    desk.leader.books.gate.lanes_max = 4
    roll_back(desk, "b")
    desk.leader.books.gate._draining[RequestId("b")] = WaveNumber(9)
    desk.release(1, count=2)
    assert desk.claims() == ()
    desk.leader.books.gate._draining.clear()
    assert names(desk.claims()) == ["b", "c"]


def test_a_prefix_that_is_gone_is_no_reason_to_wait() -> None:
    desk = Desk()
    desk.ready("a", "b")
    desk.admit("a", "b")
    roll_back(desk, "b", refusal=GONE)
    assert names(desk.claims()) == ["b"]


def test_rolled_back_twice_a_request_goes_alone_until_it_is_materialised() -> None:
    desk = Desk(lanes=4)
    desk.ready("a", "b")
    desk.admit("a", "b")
    roll_back(desk, "b")
    desk.release(1, count=2)
    desk.admit("b")
    roll_back(desk, "b")
    desk.release(1, count=2)
    desk.arrive("c")
    assert desk.claims() == ()  # a may still take the room
    desk.plan_span("a", 8, last=False)
    desk.return_wave(a=8)
    assert names(desk.claims()) == ["b"]
    desk.vote("b", ReuseVote())
    assert desk.claims() == ()  # c could take it
    desk.plan_span("b", 8, last=False)
    desk.return_wave(b=8)
    assert names(desk.claims()) == ["c"]
