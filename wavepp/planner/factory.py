"""A planner from a name and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from wavepp.errors import ConfigError
from wavepp.planner.balance import BalancedSizing
from wavepp.planner.budget import WaveGoals, budget_ladder
from wavepp.planner.planner import GreedyWaves, Planner, WavePlanner
from wavepp.planner.sizing import FixedSizing, MpuSizing, SizingPolicy
from wavepp.planner.wave_time import StageCosts

PlannerName = Literal["greedy", "static", "mpu", "balanced"]

PROGRESS_DEADLINE_S = 0.05
"""No hold lasts longer: many times what an admission takes, a fraction of a large wave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerOptions:
    """What planners are built from; names as in EngineConfig.

    Attributes:
        wave_tokens_max: M. wave_tokens_min: b_min. ring_depth: R. pipeline_fill: F.
        stage_costs: `balanced` only: coefficients to start from, one a stage; none: all measured.
    """

    wave_tokens_max: int
    wave_tokens_min: int
    block_size: int
    num_stages: int
    ring_depth: int
    pipeline_fill: int = 2
    progress_deadline_s: float = PROGRESS_DEADLINE_S
    stage_costs: Sequence[StageCosts] | None = None


def make_planner(name: str, options: PlannerOptions) -> Planner:
    """The planner of this name.

    Raises:
        ConfigError: unknown name; M or b_min do not fit B (not asked of `greedy`); not one
            coefficient set a stage.
    """
    if name not in get_args(PlannerName):
        raise ConfigError(f"planner {name!r} is none of {', '.join(get_args(PlannerName))}")
    if name == "greedy":
        return GreedyWaves(wave_tokens_max=options.wave_tokens_max, block_size=options.block_size)
    return WavePlanner(_sizing(name, options), progress_deadline_s=options.progress_deadline_s)


def make_goals(options: PlannerOptions) -> WaveGoals:
    """The constants of the pipeline.

    Raises:
        ConfigError: M or b_min do not fit B.
    """
    ladder = budget_ladder(
        wave_tokens_max=options.wave_tokens_max,
        wave_tokens_min=options.wave_tokens_min,
        block_size=options.block_size,
    )
    return WaveGoals(
        ladder=ladder,
        block_size=options.block_size,
        num_stages=options.num_stages,
        ring_depth=options.ring_depth,
        pipeline_fill=options.pipeline_fill,
    )


def _sizing(name: str, options: PlannerOptions) -> SizingPolicy:
    goals = make_goals(options)
    if name == "static":
        return FixedSizing(goals)
    if name == "mpu":
        return MpuSizing(goals)
    costs = options.stage_costs
    if costs is not None and len(costs) != options.num_stages:
        raise ConfigError(
            f"wave times for {len(costs)} stages, the pipeline has {options.num_stages}"
        )
    return BalancedSizing(goals, costs)
