"""Deferral: a request waits for the prefix that another one is computing, within limits."""

from __future__ import annotations

import pytest
from desk import COLD, Desk, names
from hypothesis import given
from hypothesis import strategies as st

from wavepp.cache.keys import chain_keys
from wavepp.cache.types import ReuseVote
from wavepp.protocol.deferral import shared_tokens
from wavepp.protocol.facts import AttemptFailed
from wavepp.protocol.messages import Admit
from wavepp.protocol.states import Phase
from wavepp.protocol.votes import Junction
from wavepp.units import RequestId

A, B = RequestId("a"), RequestId("b")
SHARED = b"\1\0\0\0" * 24  # six blocks of four tokens


def keys(private: int) -> list[bytes]:
    """Six shared blocks, two private ones."""
    return chain_keys(SHARED + private.to_bytes(4, "little") * 8, 4)


def donor_runs(desk: Desk, *, reuse: ReuseVote = COLD) -> None:
    """a computes 24 shared tokens and 8 private ones; b, with the same 24, is hinted 0."""
    desk.arrive("a", keys=keys(1))
    desk.arrive("b", keys=keys(2))
    plan = desk.compose(wanted=0)
    assert plan is not None
    desk.hint(plan.ask, reuse)
    assert names(desk.claims(wanted=0)) == ["a"]  # b would compute the same
    assert desk.phases("b") == [Phase.DEFERRED]


def test_an_admitted_requests_prefix_is_waited_for_and_becomes_a_hit() -> None:
    desk = Desk()
    donor_runs(desk)
    desk.vote("a", ReuseVote())
    assert desk.compose(wanted=0) is None
    desk.plan_span("a", 20, last=False)
    desk.return_wave(a=20)
    assert desk.compose(wanted=0) is None  # 20 of 24
    desk.plan_span("a", 24, last=False)
    desk.return_wave(a=24)
    desk.changed(0, 1)
    (claim,) = desk.claims(wanted=0, reuse=ReuseVote(attention=24))
    assert (claim.request_id, claim.limit) == ("b", 24)


def test_deferral_is_passed_by_those_who_are_ready() -> None:
    desk = Desk(lanes=3)
    donor_runs(desk)
    desk.vote("a", ReuseVote())
    desk.ready("c")
    assert names(desk.claims(wanted=0)) == ["c"]


def test_nobody_is_deferred_while_the_ring_lacks_work() -> None:
    desk = Desk()
    donor_runs(desk)
    desk.vote("a", ReuseVote())
    assert names(desk.claims(wanted=1)) == ["b"]


def test_claims_under_way_count_as_work_to_come() -> None:
    desk = Desk(lanes=3)
    for index, name in enumerate("abc"):
        desk.arrive(name, keys=keys(index))
    plan = desk.compose(wanted=40)
    assert plan is not None
    desk.hint(plan.ask, ReuseVote(attention=0))
    assert names(desk.claims(wanted=40)) == ["a", "b"]  # 64 tokens are enough
    assert desk.phases("c") == [Phase.DEFERRED]
    assert desk.compose(wanted=40) is None


def test_deferral_ends_at_its_deadline_once_for_all() -> None:
    desk = Desk(defer_max_s=2.0)
    donor_runs(desk)
    desk.vote("a", ReuseVote())
    assert desk.leader.next_timer() == 2.0
    desk.now = 1.9
    assert desk.compose(wanted=0) is None
    desk.now = 2.0
    assert names(desk.claims(wanted=0)) == ["b"]  # and is not deferred again
    assert desk.leader.next_timer() is None


@pytest.mark.parametrize("ending", ["abort", "undo", "restart"])
def test_a_donors_ending_releases_those_who_wait(ending: str) -> None:
    desk = Desk()
    donor_runs(desk)
    if ending == "undo":
        desk.vote("a", None)
    else:
        desk.vote("a", ReuseVote())
        desk.plan_span("a", 8, last=False)
    if ending == "abort":
        desk.cancel("a")
    if ending == "restart":
        desk.leader.handle(AttemptFailed(request_id=A), now=0.0)
        assert names(desk.claims(wanted=0)) == ["b"]  # a's old wave is still under way
        return
    claims = names(desk.claims(wanted=0))
    assert claims == (["b"] if ending == "abort" else ["a"])
    assert desk.phases("b") == [Phase.CLAIMING if ending == "abort" else Phase.DEFERRED]


def test_deferral_can_be_switched_off() -> None:
    desk = Desk(defer_shared_prefix=False)
    desk.arrive("a", keys=keys(1))
    desk.arrive("b", keys=keys(2))
    plan = desk.compose(wanted=0)
    assert plan is not None
    desk.hint(plan.ask, ReuseVote(attention=0))
    assert names(desk.claims(wanted=0)) == ["a", "b"]


def test_what_is_cached_already_is_not_waited_for() -> None:
    desk = Desk()
    desk.arrive("a", keys=keys(1))
    desk.arrive("b", keys=keys(2))
    plan = desk.compose(wanted=0)
    assert plan is not None
    desk.hint(plan.ask, ReuseVote(attention=24))
    assert names(desk.claims(wanted=0)) == ["a", "b"]


def test_the_donor_gets_a_junction_when_it_is_admitted() -> None:
    desk = Desk()
    donor_runs(desk, reuse=ReuseVote(attention=0, snapshots=()))
    assert desk.vote("a", ReuseVote()) == [
        Admit(request_id=A, attempt=1, endpoint=0),
        Junction(request_id=A, attempt=1, position=24),
    ]


def test_a_running_donor_gets_a_junction_ahead_of_its_planned_spans() -> None:
    desk = Desk()
    desk.ready("a", keys=keys(1), reuse=ReuseVote(snapshots=()))
    desk.claims()
    desk.vote("a", ReuseVote())
    desk.plan_span("a", 20, last=False)
    desk.ready("b", keys=keys(2), reuse=ReuseVote(snapshots=()))
    plan = desk.compose(wanted=0)
    assert plan is not None
    assert plan.decisions == (Junction(request_id=A, attempt=1, position=24),)
    assert plan.ask.claims == ()
    assert desk.phases("b") == [Phase.DEFERRED]


def test_a_burst_that_cannot_wait_leaves_one_junction_for_those_who_come_later() -> None:
    desk = Desk(lanes=3)
    for index, name in enumerate("abc"):
        desk.arrive(name, keys=keys(index))
    plan = desk.compose(wanted=1000)
    assert plan is not None
    desk.hint(plan.ask, ReuseVote(attention=0, snapshots=()))
    assert names(desk.claims(wanted=1000)) == ["a", "b", "c"]
    told = [effect for name in "abc" for effect in desk.vote(name, ReuseVote())]
    assert [effect for effect in told if isinstance(effect, Junction)] == [
        Junction(request_id=A, attempt=1, position=24)
    ]


def test_a_running_donor_is_told_once_of_those_who_do_not_wait_for_it() -> None:
    desk = Desk(lanes=3)
    desk.ready("a", keys=keys(1), reuse=ReuseVote(snapshots=()))
    desk.claims()
    desk.vote("a", ReuseVote())
    told = []
    for private, name in ((2, "b"), (3, "c")):
        desk.ready(name, keys=keys(private), reuse=ReuseVote(snapshots=()))
        plan = desk.compose(wanted=1000)
        assert plan is not None
        assert [claim.request_id for claim in plan.ask.claims] == [name]
        told += plan.decisions
    assert told == [Junction(request_id=A, attempt=1, position=24)]


def test_a_donor_that_planned_past_the_point_is_none_for_recurrent_windows() -> None:
    desk = Desk()
    desk.ready("a", keys=keys(1), reuse=ReuseVote(snapshots=()))
    desk.claims()
    desk.vote("a", ReuseVote())
    desk.plan_span("a", 32, last=True)
    desk.ready("b", keys=keys(2), reuse=ReuseVote(snapshots=()))
    assert names(desk.claims(wanted=0)) == ["b"]


def test_other_namespaces_share_nothing() -> None:
    theirs = chain_keys(SHARED, 4, b"salt")
    assert shared_tokens(keys(1), theirs, 4) == 0


@given(st.integers(0, 30), st.integers(0, 5), st.integers(0, 5))
def test_shared_tokens_is_the_common_prefix(shared: int, ours: int, theirs: int) -> None:
    def prompt(private: int, count: int) -> list[bytes]:
        return chain_keys(b"".join([b"same"] * shared + [bytes([private] * 4)] * count), 1)

    assert shared_tokens(prompt(1, ours), prompt(2, theirs), 4) == 4 * shared
