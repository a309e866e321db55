"""Planners by name."""

from __future__ import annotations

import dataclasses

import pytest

from wavepp.errors import ConfigError
from wavepp.planner.balance import BalancedSizing
from wavepp.planner.factory import PlannerOptions, make_planner
from wavepp.planner.planner import GreedyWaves, WavePlanner
from wavepp.planner.sizing import FixedSizing, MpuSizing
from wavepp.planner.wave_time import StageCosts

OPTIONS = PlannerOptions(
    wave_tokens_max=128, wave_tokens_min=64, block_size=64, num_stages=2, ring_depth=4
)


@pytest.mark.parametrize(
    ("name", "policy"), [("static", FixedSizing), ("mpu", MpuSizing), ("balanced", BalancedSizing)]
)
def test_each_name_is_a_policy_under_the_same_rules(name: str, policy: type) -> None:
    planner = make_planner(name, OPTIONS)
    assert isinstance(planner, WavePlanner)
    assert isinstance(planner.sizing, policy)


def test_greedy_asks_nothing_of_the_block_size() -> None:
    options = dataclasses.replace(OPTIONS, wave_tokens_max=20, wave_tokens_min=20)
    assert isinstance(make_planner("greedy", options), GreedyWaves)
    with pytest.raises(ConfigError, match="max_num_batched_tokens 20"):
        make_planner("mpu", options)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'fastest' is none of greedy, static, mpu, balanced"):
        make_planner("fastest", OPTIONS)


def test_coefficients_are_one_set_a_stage() -> None:
    costs = [StageCosts(c0=0.1, c1=1.0, c2=0.0)]
    with pytest.raises(ConfigError, match="for 1 stages, the pipeline has 2"):
        make_planner("balanced", dataclasses.replace(OPTIONS, stage_costs=costs))
    planner = make_planner("balanced", dataclasses.replace(OPTIONS, stage_costs=costs * 2))
    assert isinstance(planner, WavePlanner)
    assert isinstance(planner.sizing, BalancedSizing)
    assert planner.sizing.model.costs == (*costs, *costs)
