"""The ladder, n(b), the choice of a budget, and its damping."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_world import piece, pieces

from wavepp.errors import ConfigError
from wavepp.planner.budget import (
    Damping,
    WaveGoals,
    budget_ladder,
    pieces_over_half,
    waves_available,
)
from wavepp.planner.demand import Chunk, Demand
from wavepp.units import RequestId

M = 64


def goals(
    *,
    num_stages: int = 4,
    ring: int | None = None,
    fill: int = 2,
    b_min: int = M // 2,
    block: int = 4,
) -> WaveGoals:
    ladder = budget_ladder(wave_tokens_max=M, wave_tokens_min=b_min, block_size=block)
    return WaveGoals(
        ladder=ladder,
        block_size=block,
        num_stages=num_stages,
        ring_depth=2 * num_stages if ring is None else ring,
        pipeline_fill=fill,
    )


def busy(*remaining: int) -> Demand:
    """Work while a wave is in the ring, so that damping applies."""
    return Demand(pieces=pieces(*remaining), ring_waves=1)


# The ladder


def test_ladder_halves_to_block_multiples_and_ends_at_the_floor() -> None:
    ladder = budget_ladder(wave_tokens_max=16384, wave_tokens_min=8192, block_size=64)
    assert ladder == (16384, 8192)
    assert budget_ladder(wave_tokens_max=100, wave_tokens_min=20, block_size=4) == (100, 48, 24, 20)
    assert budget_ladder(wave_tokens_max=64, wave_tokens_min=64, block_size=64) == (64,)


@given(st.integers(1, 64), st.integers(1, 300), st.integers(1, 300))
def test_ladder_keeps_its_formula(block: int, one: int, other: int) -> None:
    low, high = sorted((one * block, other * block))
    ladder = budget_ladder(wave_tokens_max=high, wave_tokens_min=low, block_size=block)
    assert ladder[0] == high
    assert ladder[-1] == low
    for larger, smaller in itertools.pairwise(ladder):
        assert smaller == max(low, block * math.floor(larger / 2 / block))
        assert smaller < larger
        assert smaller % block == 0


@pytest.mark.parametrize(
    ("top", "low", "named"),
    [
        (100, 64, "max_num_batched_tokens 100"),
        (128, 40, "min_wave_tokens 40"),
        (128, 0, "min_wave_tokens 0"),
        (64, 128, "min_wave_tokens 128 exceeds max_num_batched_tokens 64"),
        (32, 32, "max_num_batched_tokens 32"),
    ],
)
def test_ladder_refuses_what_does_not_fit_the_block(top: int, low: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        budget_ladder(wave_tokens_max=top, wave_tokens_min=low, block_size=64)


# n(b)


def test_a_piece_of_exactly_half_a_wave_is_not_counted() -> None:
    assert pieces_over_half([32, 32, 32], M) == 0
    assert pieces_over_half([33, 32, 31], M) == 1
    assert waves_available([32, 32], M) == 1
    assert waves_available([33, 33], M) == 2


def test_pieces_that_cannot_share_raise_the_count_of_waves() -> None:
    assert waves_available([33] * 5, M) == 5  # 165 tokens alone would be 3 waves
    assert waves_available([M * 7 + 1], M) == 8


def test_chunks_in_flight_count_as_pieces() -> None:
    chunk = Chunk(request_id=RequestId("a"), start=0, length=M)
    demand = Demand(pieces=(piece("a", 40, start=M),), chunks=(chunk,), ring_waves=1)
    assert pieces_over_half(demand.lengths(), M) == 2
    assert waves_available(demand.lengths(), M) == 2


# The choice


def test_two_full_waves_of_work_on_four_stages_are_halved_into_four() -> None:
    chosen = goals()
    demand = Demand(pieces=pieces(2 * M))
    step = chosen.target(demand)
    assert chosen.ladder[step] == M // 2
    assert waves_available(demand.lengths(), chosen.ladder[step]) == 4


def test_waves_wanted_are_the_ring_and_the_fills_kept_ready() -> None:
    assert goals(num_stages=4, fill=1).waves_wanted == 8
    assert goals(num_stages=4, fill=2).waves_wanted == 12
    assert goals(num_stages=4, ring=6, fill=3).waves_wanted == 14


@given(st.lists(st.integers(1, 400), min_size=1, max_size=20), st.integers(1, 4))
def test_the_choice_is_the_largest_budget_with_enough_waves_else_the_floor(
    remaining: list[int], num_stages: int
) -> None:
    """With every piece longer than M, nothing is newly split, and the plain rule stands."""
    chosen = goals(num_stages=num_stages, b_min=8)
    demand = Demand(pieces=pieces(*(M + tokens for tokens in remaining)))
    lengths = demand.lengths()
    enough = [b for b in chosen.ladder if waves_available(lengths, b) >= chosen.waves_wanted]
    expected = enough[0] if enough else chosen.ladder[-1]
    assert chosen.ladder[chosen.target(demand)] == expected


def test_thinning_stops_where_it_would_mainly_split_requests_that_fit() -> None:
    """P = 2, R = 4, S = 6: four requests of 60 give 4 waves of 64; halving would split all."""
    assert goals(num_stages=2).target(busy(60, 60, 60, 60)) == 0


def test_thinning_goes_on_while_an_eighth_of_the_work_at_most_is_newly_split() -> None:
    small = goals(num_stages=2)  # R = 4, S = 6
    # W = 320, n(64) = 5 >= R; 40 tokens fit 64 and not 32: exactly 12.5 %.
    assert small.target(busy(280, 40)) == 1
    assert small.target(busy(279, 41)) == 0
    assert waves_available([280, 40], M) == 5


def test_thinning_is_not_limited_while_the_ring_is_not_filled() -> None:
    """n(64) = 3 < R = 4: all three requests are split."""
    assert goals(num_stages=2).target(busy(60, 60, 60)) == 1


def test_thinning_counts_from_the_budget_that_fills_the_ring() -> None:
    """Steps that newly split an eighth of W at most each may be too much together."""
    ladder = goals(num_stages=2, b_min=16, fill=9)  # budgets 64, 32, 16; R = 4, S = 18
    assert ladder.target(busy(240, 40, 20)) == 0  # 13.3 % at the first step
    assert ladder.target(busy(240, 30, 30)) == 1  # nothing, then 20 %
    assert ladder.target(busy(440, 40, 30)) == 1  # 7.8 %, then 5.9 %: 13.7 % together
    assert ladder.target(busy(440, 40, 20)) == 2  # 12 % together


# Damping


def run(chosen: WaveGoals, damping: Damping, works: list[tuple[int, ...]]) -> list[int]:
    """Steps after each of the decisions."""
    steps = []
    for work in works:
        damping = damping.decide(chosen, busy(*work))
        steps.append(damping.step)
    return steps


LITTLE, SOME, MUCH = (2 * M,), (7 * M,), (14 * M,)


def test_an_empty_ring_is_not_damped() -> None:
    damping = Damping(step=0).decide(goals(), Demand(pieces=pieces(*LITTLE), ring_waves=0))
    assert damping.step == 1
    damping = damping.decide(goals(), Demand(pieces=pieces(*MUCH), ring_waves=0))
    assert damping.step == 0


def test_one_step_up_must_persist_for_half_a_ring() -> None:
    chosen = goals()  # R = 8
    assert run(chosen, Damping(step=1), [MUCH] * 5) == [1, 1, 1, 0, 0]
    interrupted = [MUCH] * 3 + [LITTLE] + [MUCH] * 4
    assert run(chosen, Damping(step=1), interrupted) == [1] * 7 + [0]


def test_a_step_down_must_persist_for_a_ring() -> None:
    chosen = goals()  # R = 8
    assert run(chosen, Damping(step=0), [LITTLE] * 9) == [0] * 7 + [1, 1]
    interrupted = [LITTLE] * 7 + [MUCH] + [LITTLE] * 8
    assert run(chosen, Damping(step=0), interrupted) == [0] * 15 + [1]


def test_a_step_down_must_pass_the_hysteresis_check() -> None:
    """S = 12, P/2 = 2: with 10 or 11 waves left at M the budget stays, for ever."""
    chosen = goals()
    assert chosen.target(busy(11 * M)) == 1
    assert run(chosen, Damping(step=0), [(11 * M,)] * 50) == [0] * 50
    assert run(chosen, Damping(step=0), [(10 * M,)] * 50) == [0] * 50
    assert run(chosen, Damping(step=0), [(9 * M,)] * 8)[-1] == 1


def test_the_hysteresis_margin_is_at_least_one_wave() -> None:
    single = goals(num_stages=1)  # S = 3, R = 2
    assert not single.is_starved(busy(2 * M), 0)
    assert single.is_starved(busy(M), 0)


def test_a_burst_acts_at_once() -> None:
    chosen = goals(b_min=M // 4)
    assert run(chosen, Damping(step=2), [MUCH]) == [0]
    assert run(chosen, Damping(step=1), [MUCH]) == [1]  # one step is no burst


def test_a_lasting_drop_goes_to_the_largest_budget_asked_for_meanwhile() -> None:
    chosen = goals(b_min=M // 4)
    assert run(chosen, Damping(step=0), [LITTLE] * 8)[-1] == 2
    mixed = [LITTLE] * 7 + [SOME]  # 7 waves of 64, 14 of 32
    assert run(chosen, Damping(step=0), mixed)[-1] == 1


def swing(low: int, high: int, period: int, share: float) -> Callable[[int], int]:
    """W over time: `low` for a part of each period, `high` for the rest."""
    return lambda at: low if at % period < share * period else high


@settings(max_examples=300, deadline=None)
@given(data=st.data(), num_stages=st.integers(1, 8), share=st.sampled_from([0.25, 0.5, 0.75]))
def test_a_swing_of_a_block_changes_the_budget_at_most_once_in_ten_rings(
    data: st.DataObject, num_stages: int, share: float
) -> None:
    """Whatever the boundary (S waves, the hysteresis, the thinning limit), the work's shape, the
    budget at the start, and a period from R to 4R.
    """
    chosen = goals(num_stages=num_stages, b_min=data.draw(st.sampled_from([M // 2, M // 4, 8])))
    ring = chosen.ring_depth
    period = data.draw(st.integers(ring, 4 * ring))
    others = data.draw(st.lists(st.integers(1, 2 * M), max_size=3 * num_stages))
    base = data.draw(st.integers(1, 3 * num_stages * M))
    work = swing(base, base + chosen.block_size, period, share)
    start = data.draw(st.integers(0, len(chosen.ladder) - 1))
    steps = run(chosen, Damping(step=start), [(*others, work(at)) for at in range(30 * ring)])
    changes = [
        at for at, (old, new) in enumerate(zip([start, *steps], steps, strict=False)) if old != new
    ]
    for first, second in itertools.pairwise(changes):
        assert second - first >= 10 * ring, changes


@pytest.mark.parametrize("periods", [1, 2, 3, 4])
def test_work_that_swings_around_two_full_waves_settles(periods: int) -> None:
    chosen = goals(num_stages=2)  # R = 4
    ring = chosen.ring_depth
    work = swing(2 * M, 2 * M + chosen.block_size, periods * ring, 0.5)
    steps = run(chosen, Damping(step=0), [(work(at),) for at in range(10 * ring)])
    assert sum(old != new for old, new in zip([0, *steps], steps, strict=False)) <= 1


@pytest.mark.parametrize("periods", [2, 3, 4])
def test_a_swing_around_the_thinning_limit_settles(periods: int) -> None:
    """P = 4, R = 8: n(64) = 9 fills the ring and is starved. Splitting 60 of 540 tokens is allowed;
    when another piece grows from 32 to 36, the two are too much. No other rule damps this.
    """
    chosen = goals()
    ring = chosen.ring_depth
    assert chosen.is_starved(busy(448, 60, 36), 0)
    assert [chosen.target(busy(448, 60, last)) for last in (32, 36)] == [1, 0]
    last = swing(32, 36, periods * ring, 0.5)
    steps = run(chosen, Damping(step=0), [(448, 60, last(at)) for at in range(40 * ring)])
    changes = [at for at, pair in enumerate(itertools.pairwise([0, *steps])) if pair[0] != pair[1]]
    assert 1 <= len(changes) <= 4
    assert all(b - a >= 10 * ring for a, b in itertools.pairwise(changes))


def test_a_change_of_the_work_ends_the_settling() -> None:
    """After a step down, work that grows by more than a block brings the budget back in R/2."""
    chosen = goals()
    steps = run(chosen, Damping(step=0), [LITTLE] * 8 + [MUCH] * 4)
    assert steps[7] == 1
    assert steps[-1] == 0


def test_the_budget_is_always_on_the_ladder() -> None:
    chosen = goals(b_min=8)
    steps = run(chosen, Damping(step=0), [LITTLE] * 40 + [MUCH] * 5 + [SOME] * 40)
    assert set(steps) <= set(range(len(chosen.ladder)))
