"""All planners behind their one interface: progress, positions, lanes, decisions."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_world import World, pieces

from wavepp.planner.demand import Demand
from wavepp.planner.factory import PlannerOptions, make_planner
from wavepp.planner.packing import Piece
from wavepp.planner.planner import GreedyPlanner, Planner, WavePlanner
from wavepp.planner.sizing import MpuSizing
from wavepp.units import RequestId, WaveNumber

NAMES = ["greedy", "static", "mpu", "balanced"]
M, B_MIN, B = 64, 16, 4


def options(num_stages: int = 4, *, deadline_s: float = 10.0) -> PlannerOptions:
    return PlannerOptions(
        wave_tokens_max=M,
        wave_tokens_min=B_MIN,
        block_size=B,
        num_stages=num_stages,
        ring_depth=2 * num_stages,
        progress_deadline_s=deadline_s,
    )


def world(name: str, num_stages: int = 4, *, deadline_s: float = 10.0) -> World:
    planner = make_planner(name, options(num_stages, deadline_s=deadline_s))
    return World(planner, ring_depth=2 * num_stages, block_size=B)


def mpu_of(planner: Planner) -> MpuSizing:
    assert isinstance(planner, WavePlanner)
    assert isinstance(planner.sizing, MpuSizing)
    return planner.sizing


@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_do_is_an_empty_plan(name: str) -> None:
    plan = make_planner(name, options()).plan(Demand(pieces=()), now=0.0)
    assert plan.cuts == ()
    assert plan.wait_until is None


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num_stages=st.integers(1, 6))
def test_work_waits_at_most_a_turn_and_spans_tile_every_request(
    name: str, seed: int, num_stages: int
) -> None:
    """Random arrivals, endpoints, aborts, admissions, completions and clocks; an executor that may
    accept less. `World.step` asserts progress and positions at every single plan.
    """
    rng = random.Random(seed)
    made = world(name, num_stages, deadline_s=rng.choice([0.0, 0.05, 10.0]))
    ends: dict[str, tuple[int, int]] = {}
    for index in range(rng.randint(1, 12)):
        endpoint = rng.randrange(0, 20) * B
        tokens = rng.choice([1, rng.randint(1, 20), rng.randint(1, 400)])
        ends[f"r{index}"] = (endpoint, endpoint + tokens)
    arriving = list(ends)
    while arriving or made.requests:
        made.in_admission = rng.randint(0, 2)
        happens = rng.random()
        if arriving and happens < 0.3:
            name_in = arriving.pop(0)
            start, end = ends[name_in]
            made.admit(name_in, end - start, endpoint=start)
            made.next_turn(rng.random() * 0.1)
        elif made.requests and happens < 0.35:
            dropped = rng.choice(list(made.requests))
            made.drop(dropped)
            del ends[dropped]
        elif len(made.ring):
            made.complete()
            made.next_turn(rng.random() * 0.1)
        while made.ring.has_room and made.step(rng if rng.random() < 0.5 else None).cuts:
            pass
    for request, (start, end) in ends.items():
        position = start
        for at, length in made.spans[request]:
            assert at == position
            assert length > 0
            position += length
        assert position == end


@pytest.mark.parametrize("name", NAMES)
def test_no_wave_is_over_the_largest_budget(name: str) -> None:
    made = world(name)
    for index, tokens in enumerate((700, 3, 90, 64, 65, 1)):
        made.admit(f"r{index}", tokens)
    while made.requests:
        made.fill()
        made.complete()
        made.next_turn()
    assert max(sum(cut.length for cut in wave) for wave in made.waves) <= M


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_nobody_launches_changes_nothing(name: str) -> None:
    """Asked again and again, the planner says the same; a hold would end only with the turn."""
    planner, other = (make_planner(name, options()) for _ in range(2))
    demand = Demand(pieces=pieces(200, 30, 9), ring_waves=3)
    plans = [planner.plan(demand, now=0.0) for _ in range(40)]
    assert plans == [plans[0]] * 40
    assert other.plan(demand, now=0.0) == plans[0]


def test_only_launched_waves_are_decisions() -> None:
    """R = 8 decisions for little work bring the budget down, however often it was asked."""
    planner = make_planner("mpu", options())
    little = Demand(pieces=pieces(100), ring_waves=1)
    for number in range(1, 9):
        for _ in range(20):
            plan = planner.plan(little, now=0.0)
        assert plan.budget == (M if number < 8 else B_MIN)
        planner.launched(WaveNumber(number), plan.cuts, now=0.0)
    assert mpu_of(planner).budget == B_MIN


def test_two_full_waves_of_work_become_as_many_as_there_are_stages() -> None:
    """The paper's example: 2M tokens, b_min = M/2, P = 4: four waves of M/2."""
    planner = make_planner(
        "mpu",
        PlannerOptions(
            wave_tokens_max=M, wave_tokens_min=M // 2, block_size=B, num_stages=4, ring_depth=8
        ),
    )
    made = World(planner, ring_depth=8, block_size=B)
    made.admit("a", 2 * M)
    made.fill()
    assert [sum(cut.length for cut in wave) for wave in made.waves] == [M // 2] * 4
    greedy = world("greedy")
    greedy.admit("a", 2 * M)
    greedy.fill()
    assert [sum(cut.length for cut in wave) for wave in greedy.waves] == [M] * 2


def test_a_change_of_budget_moves_nobody() -> None:
    """Every request stays where it was and goes on from there, in order."""
    made = world("mpu")
    made.admit("a", 3 * M)
    made.admit("b", M)
    made.step()
    small = made.budgets[-1]
    for index in range(20):
        made.admit(f"r{index}", 3 * M)
    made.fill()
    assert made.budgets[-1] > small
    assert list(made.requests)[:2] == ["a", "b"]
    while made.requests:
        made.complete()
        made.next_turn()
        made.fill()
    for request in ("a", "b"):
        starts = [start for start, _ in made.spans[request]]
        assert starts == sorted(starts)
    assert sum(length for _, length in made.spans["a"]) == 3 * M


def test_a_burst_of_arrivals_fills_waves_at_once() -> None:
    made = world("mpu")
    made.admit("a", 40)
    made.step()
    assert made.budgets == [B_MIN]
    for index in range(30):
        made.admit(f"r{index}", 2 * M)
    made.step()
    assert made.budgets[-1] == M


def test_static_takes_the_largest_budget_and_fills_it() -> None:
    made = world("static")
    made.admit("a", 40)
    made.admit("b", 100)
    made.step()
    assert [(cut.request_id, cut.length) for cut in made.waves[0]] == [("a", 40), ("b", 24)]


def test_mpu_does_not_fill_a_half_full_wave_with_a_fragment() -> None:
    """At M: 40 of 64 are taken, 24 are left for a piece of 1,000."""
    made = world("mpu")
    for name, tokens in (("a", 40), ("b", 1000)):
        made.admit(name, tokens)
    plan = made.step()
    assert plan.budget == M
    assert [cut.request_id for cut in plan.cuts] == ["a"]
    assert [cut.request_id for cut in made.step().cuts] == ["b"]


def test_a_solo_request_runs_alone_in_every_planner() -> None:
    solo = Piece(request_id=RequestId("s"), start=0, remaining=8, solo=True)
    for name in NAMES:
        plan = make_planner(name, options()).plan(
            Demand(pieces=(solo, *pieces(8, 8)), ring_waves=1), now=0.0
        )
        assert [cut.request_id for cut in plan.cuts] == ["s"], name


@pytest.mark.parametrize("name", NAMES)
def test_steps_of_one_token_are_planned_at_once(name: str) -> None:
    """Local decoding: together; `balanced` keeps stages busy with a wave for each."""
    made = world(name)
    made.admit("a", 1, endpoint=36)
    made.admit("b", 1, endpoint=88)
    made.fill()
    assert made.spans == {"a": [(36, 1)], "b": [(88, 1)]}
    assert len(made.waves) == (2 if name == "balanced" else 1)


def test_greedy_behind_the_interface_is_the_greedy_planner() -> None:
    greedy = GreedyPlanner(wave_tokens_max=M, block_size=B)
    work = pieces(10, 100, 7)
    plan = make_planner("greedy", options()).plan(Demand(pieces=work), now=0.0)
    assert plan.cuts == greedy.plan(work, now=0.0)
    assert greedy.plan((), now=0.0) == ()
