"""Decides what goes into the next wave.

Owns: the planners, behind one interface, and their choice by name. May not: admit, number waves, or
keep request state: it is told the demand each time. Source: paper, section on maximum pipeline
utilization.

    greedy    every wave takes M tokens, first come first served, cut wherever a block ends
    static    M tokens too, by the packing rules (tails, holds), filled up with fragments
    mpu       the paper's: a budget that keeps enough waves available, and all packing rules
    balanced  waves of equal time on the slowest stage, as long as costs least

One wave: `plan` proposes spans; the executor may accept fewer; `launched` says what was accepted,
before anything else is planned. Only then has a decision been made: a proposal that nobody launches
changes nothing. Positions belong to the driver, which advances them by what was accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from wavepp.planner.demand import Demand
from wavepp.planner.holds import Holds
from wavepp.planner.packing import Cut, Piece, pack_greedy, pack_wave
from wavepp.planner.sizing import SizingPolicy
from wavepp.units import RequestId, WaveNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A proposal for one wave.

    Attributes:
        cuts: its spans, in schedule order; empty: nothing to run now.
        budget: tokens it was allowed.
        wait_until: work waits for company until then (seconds), or until the next turn; ask again.
    """

    cuts: tuple[Cut, ...]
    budget: int
    wait_until: float | None = None


class Planner(Protocol):
    """What the driver asks."""

    def plan(self, demand: Demand, *, now: float) -> Plan:
        """The next wave's spans. Call it while the ring has room.

        Args:
            now: seconds on the driver's monotonic clock.
        """
        ...

    def launched(self, wave: WaveNumber, cuts: Sequence[Cut], *, now: float) -> None:
        """The last plan went out as this wave, with these of its spans (or shorter ones)."""
        ...

    def timed(self, wave: WaveNumber, stage_seconds: Sequence[float]) -> None:
        """How long each stage computed this wave, first stage first. Tell only waves that did not
        fail, in order.
        """
        ...


class GreedyPlanner:
    """Every wave takes as many tokens as M allows, first come first served."""

    def __init__(self, *, wave_tokens_max: int, block_size: int) -> None:
        assert wave_tokens_max >= 1, wave_tokens_max
        assert block_size >= 1, block_size
        self.wave_tokens_max = wave_tokens_max
        self.block_size = block_size

    def plan(self, pieces: Sequence[Piece], *, now: float) -> tuple[Cut, ...]:
        """The next wave's spans; empty when there is no work.

        Args:
            pieces: what admitted requests still have to compute, in FCFS order.
            now: seconds on the driver's monotonic clock.
        """
        del now  # the greedy planner holds nothing back, so time changes nothing
        if not pieces:
            return ()
        return pack_greedy(pieces, budget=self.wave_tokens_max, block_size=self.block_size)


class GreedyWaves:
    """`GreedyPlanner` behind the planners' interface: no memory, no rules, no holds."""

    def __init__(self, *, wave_tokens_max: int, block_size: int) -> None:
        self._greedy = GreedyPlanner(wave_tokens_max=wave_tokens_max, block_size=block_size)

    def plan(self, demand: Demand, *, now: float) -> Plan:
        """As full as M allows."""
        cuts = self._greedy.plan(demand.pieces, now=now)
        return Plan(cuts=cuts, budget=self._greedy.wave_tokens_max)

    def launched(self, wave: WaveNumber, cuts: Sequence[Cut], *, now: float) -> None:
        """Nothing is remembered."""
        del wave, cuts, now

    def timed(self, wave: WaveNumber, stage_seconds: Sequence[float]) -> None:
        """Time does not matter here."""
        del wave, stage_seconds


class WavePlanner:
    """Packs by the rules into what a sizing policy allows, and holds lone waves for company."""

    def __init__(self, sizing: SizingPolicy, *, progress_deadline_s: float) -> None:
        self.sizing = sizing
        self._holds = Holds(progress_deadline_s=progress_deadline_s)
        self._withheld: tuple[RequestId, ...] = ()

    def plan(self, demand: Demand, *, now: float) -> Plan:
        """The next wave's spans."""
        self._holds.keep({piece.request_id for piece in demand.pieces})
        if not demand.pieces:
            return Plan(cuts=(), budget=0)
        size = self.sizing.size(demand)
        packed = pack_wave(demand.pieces, size.room, size.rules, overdue=self._holds.overdue(now))
        self._withheld = packed.withheld
        wait_until = self._holds.wait_until(demand, packed.cuts, budget=size.budget, now=now)
        if wait_until is not None:
            return Plan(cuts=(), budget=size.budget, wait_until=wait_until)
        return Plan(cuts=packed.cuts, budget=size.budget)

    def launched(self, wave: WaveNumber, cuts: Sequence[Cut], *, now: float) -> None:
        """These spans went out: a decision was made."""
        self._holds.launched(cuts, self._withheld, now=now)
        self.sizing.decided(wave, cuts)

    def timed(self, wave: WaveNumber, stage_seconds: Sequence[float]) -> None:
        """For policies that count in time."""
        self.sizing.timed(wave, stage_seconds)
