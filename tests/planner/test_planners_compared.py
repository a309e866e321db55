"""The planners against each other on a virtual pipeline (virtual_pipeline.py): deterministic, in
virtual seconds. Costs per stage: 15 ms a wave, 18 us a token, 0.135 ns a token of context, which is
the shape of a large hybrid model on eight devices; M = 16,384.
"""

from __future__ import annotations

import functools
import math
import random

import pytest
from virtual_pipeline import Outcome, Prompt, simulate

from wavepp.planner.wave_time import StageCosts
from wavepp.units import align_down

COSTS = StageCosts(c0=0.015, c1=18e-6, c2=1.35e-10)
NUM_PROMPTS = {"short": 320, "reuse131": 160, "reuse262": 160}  # so that filling counts little
WORKLOADS = ["cold65", "cold131", "reuse131", "reuse262", "mixed", "short"]


def prompts(workload: str, count: int | None = None) -> list[Prompt]:
    """Lengths vary by 2 %, reuse is 90 %, except: mixed has half of its prompts cold and half with
    a suffix of 1K to 6K; short has suffixes from 300 to 30K tokens, most of them small.
    """
    rng = random.Random(7)

    def about(tokens: int) -> int:
        return int(tokens * rng.uniform(0.98, 1.02))

    def reused(total: int, suffix: int) -> Prompt:
        return Prompt(total, (total - suffix) // 64 * 64)

    def make() -> Prompt:
        if workload == "short":
            suffix = min(int(300 / (1 - rng.random()) ** 1.2), 30_000)
            return reused(suffix + 20_000, suffix)
        if workload == "mixed" and rng.random() < 0.5:
            return reused(about(131_072), rng.randrange(1_000, 6_000))
        length = {"cold65": 65_536, "reuse262": 262_144}.get(workload, 131_072)
        total = about(length)
        return reused(total, total // 10) if workload.startswith("reuse") else Prompt(total)

    return [make() for _ in range(count or NUM_PROMPTS.get(workload, 80))]


@functools.cache
def outcome(planner: str, workload: str, concurrency: int, count: int | None = None) -> Outcome:
    """Of a long run that learns its costs; or of so many prompts, with costs that are known."""
    return simulate(
        planner,
        prompts(workload, count),
        concurrency=concurrency,
        costs=[COSTS] * 8,
        known_costs=count is not None,
    )


def throughput_ratio(workload: str, concurrency: int, count: int | None = None) -> float:
    """Of balanced over the better of static and mpu."""
    best = max(
        outcome(name, workload, concurrency, count).tokens_per_s for name in ("static", "mpu")
    )
    return outcome("balanced", workload, concurrency, count).tokens_per_s / best


@pytest.mark.parametrize("concurrency", [8, 16])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_balanced_is_no_slower_than_static_and_mpu(workload: str, concurrency: int) -> None:
    """Two prompts a user. In long runs of equal prompts it may be a little slower: it can't know
    that the pipeline will not be empty soon, and cuts waves for that."""
    assert throughput_ratio(workload, concurrency, 2 * concurrency) >= 0.995
    assert throughput_ratio(workload, concurrency) >= 0.985


def test_balanced_is_faster_on_the_whole() -> None:
    cells = [(workload, c) for workload in WORKLOADS for c in (1, 4, 8, 16)]
    ratios = [throughput_ratio(*cell) for cell in cells]
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) > 1.04


@pytest.mark.parametrize(
    ("workload", "concurrency"), [("reuse131", 1), ("reuse262", 1), ("reuse131", 4)]
)
def test_balanced_keeps_stages_busy_with_few_requests(workload: str, concurrency: int) -> None:
    assert throughput_ratio(workload, concurrency) > 1.15


def test_balanced_has_no_worse_tail_on_mixed() -> None:
    best = min(outcome(name, "mixed", 8).latency(0.95) for name in ("static", "mpu"))
    assert outcome("balanced", "mixed", 8).latency(0.95) <= 1.02 * best


COLD = Prompt(131_072)


@pytest.mark.parametrize("concurrency", [8, 16, 32])
def test_balanced_has_no_worse_tail_on_mixed_prompts_that_take_turns(concurrency: int) -> None:
    work = [COLD, Prompt(131_072, 117_952)] * concurrency
    tails = {name: tail(name, work, concurrency) for name in ("static", "mpu", "balanced")}
    assert tails["balanced"] <= 1.001 * min(tails["static"], tails["mpu"])


@pytest.mark.parametrize(("suffixes", "excess"), [((13_120, 13_120), 0.02), ((1_000, 6_000), 0.06)])
@pytest.mark.parametrize("concurrency", [8, 16])
def test_the_tail_on_mixed_prompts_in_random_order_is_near_the_best(
    concurrency: int, suffixes: tuple[int, int], excess: float
) -> None:
    """Short prompts fill what a long one leaves of a wave. They are done sooner for it, and the
    long ones later: so many clients, and as many requests a second, have the same mean.
    """
    ratios = []
    for seed in range(8):
        rng = random.Random(seed)
        warm = [align_down(131_072 - rng.randint(*suffixes), 64) for _ in range(40)]
        work = rng.sample([COLD] * 40 + [Prompt(131_072, cached) for cached in warm], 80)
        best = min(tail(name, work, concurrency) for name in ("static", "mpu"))
        ratios.append(tail("balanced", work, concurrency) / best)
    assert sum(ratios) / len(ratios) <= 1 + excess, ratios


def tail(planner: str, work: list[Prompt], concurrency: int) -> float:
    """The 95th percentile."""
    return simulate(planner, work, concurrency=concurrency, costs=[COSTS] * 8).latency(0.95)


def test_mpu_beats_greedy_where_little_work_is_admitted() -> None:
    for workload, concurrency in (("reuse131", 4), ("short", 8)):
        mpu, greedy = (outcome(name, workload, concurrency) for name in ("mpu", "greedy"))
        assert mpu.tokens_per_s > 1.15 * greedy.tokens_per_s


def test_timings_learned_on_line_do_as_well_as_known_ones() -> None:
    known = outcome("balanced", "short", 8, NUM_PROMPTS["short"])
    assert outcome("balanced", "short", 8).tokens_per_s > 0.98 * known.tokens_per_s


def test_a_slow_stage_is_found_and_ruled_by() -> None:
    slow = StageCosts(c0=0.02, c1=24e-6, c2=1.8e-10)
    costs = [COSTS, COSTS, slow, COSTS]
    runs = {
        name: simulate(name, prompts("reuse262"), concurrency=4, costs=costs)
        for name in ("static", "mpu", "balanced")
    }
    best = max(runs[name].tokens_per_s for name in ("static", "mpu"))
    assert runs["balanced"].tokens_per_s >= 0.99 * best


@pytest.mark.parametrize("planner", ["greedy", "static", "mpu", "balanced"])
def test_one_cold_prompt_of_eight_waves_idles_stages_for_the_fill_only(planner: str) -> None:
    """P = 4, c = 1: idle at most (P-1) / (8+P-1) and 5 points. Chunks wait for no other."""
    flat = StageCosts(c0=0.0, c1=1e-5, c2=0.0)
    run = simulate(planner, [Prompt(8 * 16_384)], concurrency=1, costs=[flat] * 4)
    assert 1 - run.busy_share <= 3 / 11 + 0.05


@pytest.mark.parametrize("planner", ["greedy", "static", "mpu", "balanced"])
def test_twice_as_many_users_as_stages_keep_every_stage_busy(planner: str) -> None:
    """c = 2P, cold, a uniform cost: busy >= 95 % with filling and draining counted in."""
    flat = StageCosts(c0=0.001, c1=1e-5, c2=0.0)
    work = [Prompt(65_536)] * 64
    run = simulate(planner, work, concurrency=8, costs=[flat] * 4, admission_s=0.001)
    assert run.busy_share >= 0.95


def test_a_run_is_repeatable() -> None:
    first, second = (
        simulate("balanced", prompts("short"), concurrency=8, costs=[COSTS] * 8) for _ in range(2)
    )
    assert first.schedules == second.schedules
    assert first.wall_s == second.wall_s
