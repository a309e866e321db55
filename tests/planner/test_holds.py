"""Waiting for company: exactly one turn, never with an empty ring, never past the deadline."""

from __future__ import annotations

import pytest
from planner_world import World, piece

from wavepp.planner.demand import Demand
from wavepp.planner.factory import PlannerOptions, make_planner
from wavepp.planner.holds import Holds
from wavepp.planner.packing import Cut

M = 64


def world(name: str = "mpu", deadline_s: float = 10.0) -> World:
    options = PlannerOptions(
        wave_tokens_max=M,
        wave_tokens_min=M // 2,
        block_size=4,
        num_stages=4,
        ring_depth=8,
        progress_deadline_s=deadline_s,
    )
    return World(make_planner(name, options), ring_depth=8, block_size=4)


def lone_tail(name: str = "mpu", deadline_s: float = 10.0, tokens: int = 5) -> World:
    """A wave is in the ring, another request is in admission, and 5 tokens are all there is."""
    made = world(name, deadline_s)
    made.admit("busy", 400)
    made.step()
    made.requests["busy"].end = made.requests["busy"].planned
    made.admit("tail", tokens)
    made.in_admission = 1
    return made


@pytest.mark.parametrize("name", ["static", "mpu", "balanced"])
def test_a_lone_small_wave_waits_exactly_one_turn(name: str) -> None:
    made = lone_tail(name)
    assert made.step().cuts == ()
    assert made.step().cuts == ()  # asked again in the same turn
    made.next_turn()
    assert [cut.length for cut in made.step().cuts] == [5]


def test_it_does_not_wait_with_an_empty_ring() -> None:
    made = lone_tail()
    made.complete()
    assert len(made.ring) == 0
    assert made.step().cuts


def test_it_does_not_wait_when_nobody_is_in_admission() -> None:
    made = lone_tail()
    made.in_admission = 0
    assert made.step().cuts


def test_half_a_budget_is_enough_to_go() -> None:
    """The budget is b_min = 32 here."""
    assert lone_tail(tokens=15).step().cuts == ()
    assert lone_tail(tokens=16).step().cuts


def test_two_small_requests_are_company_already() -> None:
    made = lone_tail()
    made.admit("other", 3)
    assert len(made.step().cuts) == 2


def test_company_that_arrives_goes_along() -> None:
    made = lone_tail()
    assert made.step().cuts == ()
    made.in_admission = 0
    made.admit("other", 8)
    assert [cut.length for cut in made.step().cuts] == [5, 8]


def test_a_ring_that_runs_empty_ends_the_wait() -> None:
    made = lone_tail()
    assert made.step().cuts == ()
    made.complete()
    assert made.step().cuts  # same turn, empty ring


def test_greedy_never_waits() -> None:
    assert lone_tail("greedy").step().cuts


def test_a_solo_request_waits_for_no_company() -> None:
    holds = Holds(progress_deadline_s=1.0)
    demand = Demand(pieces=(piece("a", 5, solo=True),), ring_waves=1, in_admission=1)
    cuts = (Cut(request_id=demand.pieces[0].request_id, start=0, length=5, final=True),)
    assert holds.wait_until(demand, cuts, budget=M, now=0.0) is None


def test_the_deadline_ends_the_wait_within_the_turn() -> None:
    made = lone_tail(deadline_s=0.05)
    plan = made.step()
    assert plan.cuts == ()
    assert plan.wait_until == pytest.approx(0.05)
    made.now = 0.04
    assert made.step().wait_until == pytest.approx(0.05)
    made.now = 0.05
    assert made.step().cuts


def test_a_second_wait_follows_only_after_a_wave() -> None:
    """The held request goes away and another small one comes: it goes at the next turn."""
    made = lone_tail()
    assert made.step().cuts == ()
    made.drop("tail")
    made.admit("next", 5)
    made.next_turn()
    assert made.step().cuts
    made.admit("after", 5)
    assert made.step().cuts == ()  # a wave went out, so this one may wait again


def test_the_wait_is_over_when_nothing_is_left_to_plan() -> None:
    made = lone_tail()
    assert made.step().cuts == ()
    made.drop("tail")
    assert made.step().cuts == ()
    made.next_turn()
    made.admit("next", 5)
    assert made.step().cuts == ()  # a turn of its own


def test_a_deadline_of_zero_means_no_holds() -> None:
    assert lone_tail(deadline_s=0.0).step().cuts


def test_a_request_withheld_by_the_fragment_rule_is_overdue_after_the_deadline() -> None:
    holds = Holds(progress_deadline_s=0.05)
    a, b = piece("a", 5), piece("b", 50)
    cut = Cut(request_id=a.request_id, start=0, length=5, final=True)
    holds.launched((cut,), (b.request_id,), now=1.0)
    assert holds.overdue(1.04) == frozenset()
    holds.launched((cut,), (b.request_id,), now=1.04)  # withheld again: since 1.0 still
    assert holds.overdue(1.05) == {"b"}
    taken = Cut(request_id=b.request_id, start=0, length=8, final=False)
    holds.launched((taken,), (), now=1.06)
    assert holds.overdue(9.0) == frozenset()


def test_requests_that_are_gone_are_forgotten() -> None:
    holds = Holds(progress_deadline_s=0.05)
    holds.launched((), (piece("b", 50).request_id,), now=1.0)
    holds.keep({piece("c", 1).request_id})
    assert holds.overdue(9.0) == frozenset()
