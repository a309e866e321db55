"""When planned work may wait, and for how long at most.

Owns: the one reason to wait for company, and the clock of everything that was held back. May not:
pack, or choose budgets. Source: paper, section on maximum pipeline utilization.

A lone wave below half its budget waits one turn while the ring is busy and another request is in
admission, so that the two can share a wave. A turn is one ring completion or arrival. No request is
held back, by this or by the fragment rule, past the progress deadline.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from wavepp.planner.demand import Demand
from wavepp.planner.packing import Cut
from wavepp.units import RequestId


class Holds:
    """What is being held back, since when."""

    def __init__(self, *, progress_deadline_s: float) -> None:
        assert progress_deadline_s >= 0, progress_deadline_s
        self.progress_deadline_s = progress_deadline_s
        self._since: dict[RequestId, float] = {}
        self._held_turn: int | None = None

    def overdue(self, now: float) -> frozenset[RequestId]:
        """Requests that may be held back no longer."""
        return frozenset(name for name, due in self._deadlines() if now >= due)

    def wait_until(
        self, demand: Demand, cuts: Sequence[Cut], *, budget: int, now: float
    ) -> float | None:
        """Until when this wave should wait for company (seconds; a new turn ends the wait too), or
        None: it goes now.
        """
        if not self._wants_company(demand, cuts, budget):
            return None
        if self._held_turn is not None and demand.turn != self._held_turn:
            return None  # it has waited its turn
        since = self._since.setdefault(cuts[0].request_id, now)
        until = since + self.progress_deadline_s
        if now >= until:
            return None
        self._held_turn = demand.turn
        return until

    def launched(self, cuts: Sequence[Cut], withheld: Collection[RequestId], *, now: float) -> None:
        """A wave of these spans goes out, without the withheld requests."""
        self._held_turn = None
        for name in withheld:
            self._since.setdefault(name, now)
        for cut in cuts:
            self._since.pop(cut.request_id, None)

    def keep(self, waiting: Collection[RequestId]) -> None:
        """Forgets requests that have nothing left to plan; with none left, the wait is over."""
        if not waiting:
            self._held_turn = None
        for name in [name for name in self._since if name not in waiting]:
            del self._since[name]

    def _deadlines(self) -> list[tuple[RequestId, float]]:
        return [(name, since + self.progress_deadline_s) for name, since in self._since.items()]

    def _wants_company(self, demand: Demand, cuts: Sequence[Cut], budget: int) -> bool:
        if demand.ring_waves == 0 or demand.in_admission == 0:
            return False
        if len(cuts) != 1 or any(piece.solo for piece in demand.pieces):
            return False
        return 2 * cuts[0].length < budget
