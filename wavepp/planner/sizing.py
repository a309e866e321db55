"""How much the next wave may take: the policies that tell the planners apart.

Owns: the budget in use. May not: pack, or hold. Source: paper, section on maximum pipeline
utilization. The policy that counts in time is in balance.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from wavepp.planner.budget import Damping, WaveGoals
from wavepp.planner.demand import Demand
from wavepp.planner.packing import Cut, PackingRules, Room, TokenRoom
from wavepp.units import WaveNumber, ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveSize:
    """What one wave may take.

    Attributes:
        budget: b, in tokens; holds go by it.
        room: empty; the packing fills it.
    """

    budget: int
    room: Room
    rules: PackingRules


class SizingPolicy(Protocol):
    """Sizes waves one by one. `size` proposes and changes nothing; `decided` makes it count."""

    def size(self, demand: Demand) -> WaveSize:
        """For the wave about to be packed; there is work."""
        ...

    def decided(self, wave: WaveNumber, cuts: Sequence[Cut]) -> None:
        """The wave last sized went out with these spans."""
        ...

    def timed(self, wave: WaveNumber, stage_seconds: Sequence[float]) -> None:
        """How long each stage computed this wave."""
        ...


def packing_rules(goals: WaveGoals, budget: int, *, fills_up: bool) -> PackingRules:
    """The packing rules at one budget; `fills_up`: fragments of any size are taken."""
    return PackingRules(
        block_size=goals.block_size,
        tail_tokens_min=ceil_div(goals.wave_tokens_min, 2),
        fragment_tokens_min=0 if fills_up else max(goals.wave_tokens_min, ceil_div(budget, 2)),
    )


class FixedSizing:
    """Always the largest budget, filled to the brim: the paper's static packing."""

    def __init__(self, goals: WaveGoals) -> None:
        self.goals = goals

    def size(self, demand: Demand) -> WaveSize:
        """M tokens."""
        del demand
        budget = self.goals.ladder[0]
        rules = packing_rules(self.goals, budget, fills_up=True)
        return WaveSize(budget=budget, room=TokenRoom(budget), rules=rules)

    def decided(self, wave: WaveNumber, cuts: Sequence[Cut]) -> None:
        """Nothing is remembered."""
        del wave, cuts

    def timed(self, wave: WaveNumber, stage_seconds: Sequence[float]) -> None:
        """Time does not matter here."""
        del wave, stage_seconds


class MpuSizing:
    """The damped budget of the ladder."""

    def __init__(self, goals: WaveGoals) -> None:
        self.goals = goals
        self.damping = Damping(step=0)
        self._proposed = self.damping

    @property
    def budget(self) -> int:
        """Of the last decision."""
        return self.goals.ladder[self.damping.step]

    def propose(self, demand: Demand) -> int:
        """The budget of the wave about to be packed."""
        self._proposed = self.damping.decide(self.goals, demand)
        return self.goals.ladder[self._proposed.step]

    def size(self, demand: Demand) -> WaveSize:
        """The damped budget, fragments withheld."""
        budget = self.propose(demand)
        rules = packing_rules(self.goals, budget, fills_up=False)
        return WaveSize(budget=budget, room=TokenRoom(budget), rules=rules)

    def decided(self, wave: WaveNumber, cuts: Sequence[Cut]) -> None:
        """The proposed state is the state."""
        del wave, cuts
        self.damping = self._proposed

    def timed(self, wave: WaveNumber, stage_seconds: Sequence[float]) -> None:
        """Time does not matter here."""
        del wave, stage_seconds
