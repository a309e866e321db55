"""Layer partition: the smallest largest stage, by exhaustive search on small cases."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavepp.planner.partition import balance_layers


def best_largest(loads: list[float], stages: int) -> float:
    count = len(loads)
    largest = []
    for cuts in combinations(range(1, count), stages - 1):
        edges = (0, *cuts, count)
        largest.append(max(sum(loads[a:b]) for a, b in pairwise(edges)))
    return min(largest)


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=9),
    st.integers(1, 5),
    st.integers(0, 80),
    st.integers(0, 80),
)
def test_largest_stage_is_smallest_possible(costs, stages, first, last):
    stages = min(stages, len(costs))
    counts = balance_layers(costs, stages, first_extra=first, last_extra=last)
    loads = [float(cost) for cost in costs]
    loads[0] += first
    loads[-1] += last
    assert sum(counts) == len(costs)
    assert min(counts) >= 1
    ends = [sum(counts[: i + 1]) for i in range(stages)]
    got = max(sum(loads[end - n : end]) for end, n in zip(ends, counts, strict=True))
    assert got == best_largest(loads, stages)


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [(8, 1, (8,)), (8, 2, (4, 4)), (8, 3, (3, 3, 2)), (30, 4, (8, 8, 7, 7)), (4, 4, (1, 1, 1, 1))],
)
def test_equal_layers_split_evenly(layers, stages, expected):
    assert sorted(balance_layers([1.0] * layers, stages), reverse=True) == list(expected)


def test_a_heavy_head_takes_layers_from_the_last_stage():
    assert balance_layers([1.0] * 8, 2, last_extra=2.0) == (5, 3)


def test_preferred_cuts_win_when_they_cost_little():
    costs = [1.0] * 93
    counts = balance_layers(costs, 8, preferred_cuts=range(12, 93, 12))
    assert counts == (12, 12, 12, 12, 12, 12, 12, 9)


def test_preferred_cuts_lose_when_they_unbalance():
    assert balance_layers([1.0] * 12, 2, preferred_cuts=[1]) == (6, 6)


def test_too_few_preferred_cuts_are_not_an_obstacle():
    assert balance_layers([1.0] * 6, 3, preferred_cuts=[3]) == (2, 2, 2)


def test_more_stages_than_layers_is_refused():
    with pytest.raises(ValueError, match="3 stages for 2 layers"):
        balance_layers([1.0, 1.0], 3)
