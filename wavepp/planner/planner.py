"""Decides what goes into the next wave.

Owns: the wave budget and the packing of one wave. May not: admit, number waves, or keep request
state: it is told the pieces of work each time. Source: paper, section on wave planning; here the
greedy planner (always the full budget).
"""

from __future__ import annotations

from collections.abc import Sequence

from wavepp.planner.packing import Cut, Piece, pack_greedy


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
