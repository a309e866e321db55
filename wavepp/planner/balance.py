"""Waves of equal time: as many as MPU wants, cut by what the slowest stage needs for them.

Owns: the time one wave may take, and the room of a wave counted in time. May not: measure, pack.
Goes beyond the paper, which counts tokens only and loses to static packing where context is long.
"""

from __future__ import annotations

from collections.abc import Sequence

from wavepp.planner.budget import WaveGoals, waves_available
from wavepp.planner.demand import Demand
from wavepp.planner.packing import Cut, Piece
from wavepp.planner.sizing import MpuSizing, WaveSize, packing_rules
from wavepp.planner.wave_time import StageCosts, WaveLoad, WaveTimeModel, span_context
from wavepp.units import WaveNumber


class TimeRoom:
    """Room for `seconds` of work on one stage, and for no more than `tokens_max` tokens."""

    def __init__(
        self, costs: StageCosts, *, seconds: float, tokens_max: int, tokens_min: int
    ) -> None:
        self._costs = costs
        self._seconds = seconds
        self._seconds_left = seconds
        self._tokens_left = tokens_max
        self._tokens_min = tokens_min
        self._used = False

    def tokens_for(self, piece: Piece) -> int:
        """What fits by time and by tokens; a wave that holds nothing takes at least b_min."""
        fitting = self._costs.tokens_within(piece.start, self._seconds_left * (1 + 1e-9))
        if not self._used:
            fitting = max(fitting, self._tokens_min)
        return min(fitting, self._tokens_left)

    def take(self, cut: Cut) -> None:
        """The span is in the wave."""
        load = WaveLoad(tokens=cut.length, context=span_context(cut.start, cut.length))
        self._used = True
        self._tokens_left -= cut.length
        self._seconds_left -= self._costs.work_seconds(load)
        assert self._tokens_left >= 0, self._tokens_left

    @property
    def is_half_full(self) -> bool:
        """At least half of the time is taken."""
        return 2 * self._seconds_left <= self._seconds


class BalancedSizing:
    """MPU's number of waves, in equal time on the slowest stage."""

    def __init__(self, goals: WaveGoals, costs: Sequence[StageCosts] | None) -> None:
        self.goals = goals
        self.mpu = MpuSizing(goals)
        self.model = WaveTimeModel(costs or [None] * goals.num_stages)
        self._loads: dict[WaveNumber, WaveLoad] = {}

    def size(self, demand: Demand) -> WaveSize:
        """T / n of the slowest stage's time."""
        budget = self.mpu.propose(demand)
        waves = waves_available(demand.lengths(), budget)
        load = _load_of(demand)
        costs = self.model.slowest(load)
        room = TimeRoom(
            costs,
            seconds=costs.work_seconds(load) / waves,
            tokens_max=self.goals.ladder[0],
            tokens_min=self.goals.wave_tokens_min,
        )
        rules = packing_rules(self.goals, budget, fills_up=False)
        return WaveSize(budget=budget, room=room, rules=rules)

    def decided(self, wave: WaveNumber, cuts: Sequence[Cut]) -> None:
        """Remembers what the wave holds until it was timed."""
        self.mpu.decided(wave, cuts)
        self._loads[wave] = WaveLoad.of(cuts)

    def timed(self, wave: WaveNumber, stage_seconds: Sequence[float]) -> None:
        """Feeds the model."""
        load = self._loads.get(wave)
        for older in [number for number in self._loads if number <= wave]:
            del self._loads[older]
        if load is not None:
            self.model.add(load, stage_seconds)


def _load_of(demand: Demand) -> WaveLoad:
    spans = [(piece.start, piece.remaining) for piece in demand.pieces]
    spans += [(chunk.start, chunk.length) for chunk in demand.chunks]
    return WaveLoad(
        tokens=sum(length for _, length in spans),
        context=sum(span_context(start, length) for start, length in spans),
    )
