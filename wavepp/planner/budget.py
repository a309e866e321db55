"""MPU: how many tokens the next wave may take, so that enough waves are there for every stage.

Owns: the ladder of budgets, the choice among them, and its damping. May not: pack, or keep
anything but the damping's own counters. Source: paper, section on maximum pipeline utilization.

Legend: P stages; M largest budget; b_min smallest; B tokens in a block; R waves in the ring; F
pipeline fills kept ready; S = R + (F-1)P waves wanted; W tokens of admitted work;

    b_0 = M,  b_{k+1} = max(b_min, B * floor(b_k / 2 / B))
    n(b) = max(ceil(W / b), N_{>b/2}),  N_{>b/2}: pieces strictly longer than b/2

Budgets are spoken of by their step k on the ladder: a higher step is a smaller budget.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from wavepp.errors import ConfigError
from wavepp.planner.demand import Demand
from wavepp.units import align_down, ceil_div

NEWLY_SPLIT_SHARE_MAX = 0.125
"""Of W: below a budget that fills the ring, pieces cut only for more waves may hold no more."""

SETTLE_RINGS = 10
"""After a change, a W within one block of the W it was made at may change nothing for this many
times R decisions.
"""


def budget_ladder(
    *, wave_tokens_max: int, wave_tokens_min: int, block_size: int
) -> tuple[int, ...]:
    """Budgets from M down to b_min, in tokens.

    Raises:
        ConfigError: M or b_min is no multiple of B, or not B <= b_min <= M.
    """
    for name, value in (
        ("max_num_batched_tokens", wave_tokens_max),
        ("min_wave_tokens", wave_tokens_min),
    ):
        if value < block_size or value % block_size:
            raise ConfigError(f"{name} {value} is no multiple of block_size {block_size}")
    if wave_tokens_min > wave_tokens_max:
        raise ConfigError(
            f"min_wave_tokens {wave_tokens_min} exceeds max_num_batched_tokens {wave_tokens_max}"
        )
    ladder = [wave_tokens_max]
    while ladder[-1] > wave_tokens_min:
        half = align_down(ladder[-1] // 2, block_size)
        ladder.append(max(wave_tokens_min, half))
    return tuple(ladder)


def pieces_over_half(lengths: list[int], budget: int) -> int:
    """N_{>b/2}: no two such pieces share a wave."""
    return sum(2 * length > budget for length in lengths)


def waves_available(lengths: list[int], budget: int) -> int:
    """n(b): how many waves of `budget` tokens the work would make."""
    return max(ceil_div(sum(lengths), budget), pieces_over_half(lengths, budget))


def _newly_split(demand: Demand, larger: int, smaller: int) -> int:
    """Tokens of the remaining suffixes that fit the larger budget but not the smaller one."""
    remaining = (piece.remaining for piece in demand.pieces)
    return sum(length for length in remaining if smaller < length <= larger)


def waves_wanted(*, ring_depth: int, pipeline_fill: int, num_stages: int) -> int:
    """S: waves that should be available, those in the ring included."""
    return ring_depth + (pipeline_fill - 1) * num_stages


def work_wanted(lengths: list[int], *, waves: int, wave_tokens_min: int) -> int:
    """Tokens that admitted work lacks for so many waves of the smallest budget; 0: it has enough.

    Args:
        lengths: of all pieces, those in flight too (`Demand.lengths`).
    """
    if waves_available(lengths, wave_tokens_min) >= waves:
        return 0
    return waves * wave_tokens_min - sum(lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveGoals:
    """The constants of one pipeline."""

    ladder: tuple[int, ...]
    block_size: int
    num_stages: int
    ring_depth: int
    pipeline_fill: int

    @property
    def waves_wanted(self) -> int:
        """S."""
        return waves_wanted(
            ring_depth=self.ring_depth,
            pipeline_fill=self.pipeline_fill,
            num_stages=self.num_stages,
        )

    @property
    def wave_tokens_min(self) -> int:
        """b_min."""
        return self.ladder[-1]

    def target(self, demand: Demand) -> int:
        """The step of the budget that the work asks for now, damping aside.

        The largest budget with n(b) >= S, else b_min; but once some budget gives n(b) >= R, a
        smaller one only while the remaining suffixes it would newly split hold at most 12.5 % of W.
        (Chunks in flight are split no more.)
        """
        lengths = demand.lengths()
        split_max = NEWLY_SPLIT_SHARE_MAX * sum(lengths)
        filling: int | None = None  # the largest budget that fills the ring
        for step, budget in enumerate(self.ladder):
            if filling is not None and _newly_split(demand, filling, budget) > split_max:
                return step - 1
            waves = waves_available(lengths, budget)
            if waves >= self.waves_wanted:
                return step
            if filling is None and waves >= self.ring_depth:
                filling = budget
        return len(self.ladder) - 1

    def is_starved(self, demand: Demand, step: int) -> bool:
        """The hysteresis check of a step down: n at the current budget is clearly below S."""
        waves = waves_available(demand.lengths(), self.ladder[step])
        return waves < self.waves_wanted - max(1, self.num_stages // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Damping:
    """The budget in use and what speaks for another one. A value: `decide` gives the next one.

    Attributes:
        step: the budget in use.
        rising, falling: decisions in a row that asked for a larger, a smaller budget.
        nearest_asked: of those that asked for a smaller one, the step nearest to `step`.
        changed_tokens: W at the last damped change; None: none is remembered.
        since_change: decisions since.
    """

    step: int
    rising: int = 0
    falling: int = 0
    nearest_asked: int = 0
    changed_tokens: int | None = None
    since_change: int = 0

    def decide(self, goals: WaveGoals, demand: Demand) -> Damping:
        """The state after one more decision; its `step` is the budget of the wave decided on."""
        target = goals.target(demand)
        if demand.ring_waves == 0:
            return Damping(step=target)
        state = replace(self, since_change=self.since_change + 1)
        if target == self.step:
            return replace(state, rising=0, falling=0)
        if target < self.step:
            return state._asked_up(goals, demand, target)
        return state._asked_down(goals, demand, target)

    def _asked_up(self, goals: WaveGoals, demand: Demand, target: int) -> Damping:
        asked = replace(self, rising=self.rising + 1, falling=0)
        is_burst = self.step - target > 1
        if not is_burst and 2 * asked.rising < goals.ring_depth:
            return asked
        return asked._changed(goals, demand, target)

    def _asked_down(self, goals: WaveGoals, demand: Demand, target: int) -> Damping:
        if not goals.is_starved(demand, self.step):
            return replace(self, rising=0, falling=0)
        nearest = target if self.falling == 0 else min(self.nearest_asked, target)
        asked = replace(self, rising=0, falling=self.falling + 1, nearest_asked=nearest)
        if asked.falling < goals.ring_depth:
            return asked
        return asked._changed(goals, demand, nearest)

    def _changed(self, goals: WaveGoals, demand: Demand, step: int) -> Damping:
        tokens = demand.tokens
        if self._is_settling(goals, tokens):
            return self
        return Damping(step=step, changed_tokens=tokens)

    def _is_settling(self, goals: WaveGoals, tokens: int) -> bool:
        """W is where it was when the budget was last changed, so nothing new speaks for another
        change: it only swings around a boundary.
        """
        if self.changed_tokens is None or self.since_change >= SETTLE_RINGS * goals.ring_depth:
            return False
        return abs(tokens - self.changed_tokens) <= goals.block_size
