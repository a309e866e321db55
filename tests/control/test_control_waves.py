"""The running control plans its waves with the planners: budgets, holds, timings, wanted work."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from world import World

from wavepp.control.options import DriverOptions
from wavepp.control.planning import WavePlanning
from wavepp.errors import ConfigError
from wavepp.planner.balance import BalancedSizing
from wavepp.planner.packing import Piece
from wavepp.planner.planner import WavePlanner
from wavepp.planner.sizing import MpuSizing
from wavepp.units import RequestId

M = 16


def launched(world: World) -> list[tuple[int, int]]:
    """Budget and tokens of each wave so far."""
    return [(launch.budget, launch.schedule.num_tokens) for launch in world.launches]


def admitted(world: World, *, waves: int = 0) -> World:
    """Runs until nothing is left to admit; wave planes stand still but for so many waves."""
    while any(world.rounds) or world.replies:
        if len(world.replies) == len(world.cores):
            world.answer_round()
            continue
        for stage in range(len(world.cores)):
            if world.rounds[stage] is not None:
                world.deliver_round(stage)
    for _ in range(waves):
        for stage in range(len(world.cores)):
            world.run_wave(stage)
        world.complete_wave()
    return world


@pytest.mark.parametrize(
    ("planner", "expected"),
    [
        ("mpu", [(M // 2, M // 2)] * 4),
        ("static", [(M, M)] * 2),
        ("greedy", [(M, M)] * 2),
    ],
)
def test_two_full_waves_of_work_on_four_stages(
    planner: str, expected: list[tuple[int, int]]
) -> None:
    """Only budgets leave no stage without a wave."""
    world = World(stages=4, wave_tokens=M, wave_tokens_min=M // 2, ring_depth=8, planner=planner)
    world.arrive("a", list(range(10, 10 + 2 * M)))
    admitted(world)
    assert launched(world) == expected
    world.drain()


def test_a_burst_brings_the_largest_budget_at_once() -> None:
    world = World(stages=2, blocks=64, wave_tokens=M, wave_tokens_min=4, lanes=8, planner="mpu")
    world.arrive("a", [10] * 6)
    admitted(world)
    for index in range(6):
        world.arrive(f"b{index}", [20 + index] * 36)
    admitted(world, waves=1)
    budgets = [budget for budget, _ in launched(world)]
    assert list(dict.fromkeys(budgets)) == [4, M]  # not by way of M / 2
    world.drain()


class Lone:
    """The ring is busy with a, b is admitted and short, c is about to be admitted."""

    def __init__(self) -> None:
        self.world = World(
            stages=2, wave_tokens=M, wave_tokens_min=M, ring_depth=4, planner="mpu",
            progress_deadline_s=0.05, blocks=32, defer_shared_prefix=False,
        )  # fmt: skip
        self.world.arrive("a", list(range(10, 10 + M)))
        admitted(self.world)
        self.world.arrive("b", [100] * 3)
        self.world.hold_round()  # announces b
        self.world.arrive("c", [200] * 3)
        self.world.hold_round()  # b is admitted, c is announced

    @property
    def waves(self) -> list[list[str]]:
        """Requests by wave."""
        return [
            [span.request_id.partition("#")[0] for span in launch.schedule.spans]
            for launch in self.world.launches
        ]


def test_a_lone_short_wave_waits_for_company() -> None:
    lone = Lone()
    assert lone.waves == [["a"]]
    assert lone.world.driver.next_timer == 0.05
    lone.world.hold_round()
    assert lone.waves == [["a"]]  # the same turn
    lone.world.hold_round()
    assert lone.waves == [["a"], ["b", "c"]]
    lone.world.drain()


def test_the_wait_for_company_ends_with_the_turn() -> None:
    lone = Lone()
    lone.world.run_wave(0)
    lone.world.run_wave(1)
    lone.world.complete_wave()
    assert lone.waves == [["a"], ["b"]]
    assert lone.world.driver.next_timer is None
    lone.world.drain()


def test_the_wait_for_company_ends_at_the_progress_deadline() -> None:
    lone = Lone()
    lone.world.wait()
    assert lone.waves == [["a"], ["b"]]
    lone.world.drain()


def test_stage_times_reach_the_balanced_planner_but_not_those_of_failed_waves() -> None:
    world = World(stages=2, wave_tokens=M, planner="balanced", defer_shared_prefix=False)
    planner = world.driver.waves.planner
    assert isinstance(planner, WavePlanner)
    sizing = planner.sizing
    assert isinstance(sizing, BalancedSizing)
    world.arrive("fails", [10, 991])  # on stage 1
    world.drain()
    assert world.results["fails"].finish_reason == "error"
    assert sizing.model.costs == (None, None)
    world.ticks = 0.25  # of every look at the clock
    world.arrive("a", [10] * 8)
    world.drain()
    costs = sizing.model.costs
    assert all(cost is not None and cost.c1 > 0 for cost in costs), costs


def test_only_launched_waves_are_decisions_in_the_running_control() -> None:
    """The driver asks with every fact; the damping counts waves."""
    world = World(
        stages=2, wave_tokens=M, wave_tokens_min=4, ring_depth=4, planner="mpu", blocks=64
    )
    planner = world.driver.waves.planner
    assert isinstance(planner, WavePlanner)
    sizing = planner.sizing
    assert isinstance(sizing, MpuSizing)
    world.arrive("a", [10] * 90)
    admitted(world)
    before = sizing.damping
    for _ in range(20):
        world.abort("nobody")
    assert sizing.damping == before
    world.drain()


def piece(remaining: int) -> Piece:
    return Piece(request_id=RequestId("a"), start=0, remaining=remaining)


def test_work_is_wanted_until_the_planner_has_the_waves_it_wants() -> None:
    """R = 4 and a fill of P = 2 more: 6 waves of 4 tokens."""
    options = DriverOptions(ring_depth=4, wave_tokens_max=M, wave_tokens_min=4, max_num_seqs=1)

    def wanted(*lengths: int) -> int:
        planning = WavePlanning(options, block_size=4, num_stages=2)
        work = [piece(length) for length in lengths]
        return planning.work_wanted(
            planning.demand(work, lambda span: True, in_admission=0, behind=0)
        )

    assert wanted() == 24
    assert wanted(14) == 10
    assert wanted(20) == 4
    assert wanted(21) == 0  # six waves, the last one of a token
    assert wanted(*[3] * 6) == 0  # no two share a wave of 4


def test_wave_sizes_that_do_not_fit_the_stages_blocks_are_refused() -> None:
    world = World(stages=1, block_size=4)
    facts = [core.facts for core in world.cores]
    wrong = replace(world.driver.options, planner="mpu", wave_tokens_max=10)
    with pytest.raises(ConfigError, match="max_num_batched_tokens 10 is no multiple of block_size"):
        type(world.driver)(facts, wrong)


@pytest.mark.parametrize("planner", ["static", "mpu", "balanced"])
def test_every_planner_serves_a_mixed_crowd(planner: str) -> None:
    rng = random.Random(planner)
    world = World(stages=3, blocks=64, wave_tokens=M, wave_tokens_min=4, planner=planner)
    for index in range(12):
        world.arrive(str(index), [10 + index] * rng.choice([1, 5, 17, 33]), max_tokens=2)
        for _ in range(rng.randrange(6)):
            world.step(rng)
    world.drain(rng)
    assert {result.finish_reason for result in world.results.values()} <= {"length", "stop"}


def test_whoever_is_not_admitted_is_in_admission_or_waits_behind() -> None:
    """Six requests of which two may be there at once."""
    world = World(stages=2, blocks=64, lanes=2, wave_tokens=M, wave_tokens_min=4)
    leader, rng = world.driver.leader, random.Random(3)
    seen: set[tuple[int, int, int]] = set()
    for index in range(6):
        world.arrive(f"r{index}", [10 + index] * 24)
    while world.step(rng):
        counts = (len(leader.admitted), *leader.unadmitted)
        assert sum(counts) <= len(leader.books.records)
        seen.add(counts)
    assert {(0, 2, 4), (2, 0, 4), (0, 0, 0)} <= seen
