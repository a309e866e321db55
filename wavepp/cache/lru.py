"""EvictionOrder: which unit goes next, least recently used first, the tail of a path before its
head.

Units that become idle together get one turn (a logical stamp: operations on a stage follow the
wave numbers, so turns refine them; no wall clock). A turn's units are kept in one array, deepest
first. Units that leave the order are only unmarked; an array is compacted once more than half of
it is stale, so every operation is a few vector steps and the arrays never hold more than about
twice the units that are in the order.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from wavepp.cache.types import BoolArray, Int32Array

SCAN_UNITS_MIN = 64
STALE_UNITS_MIN = 64
EMPTY = np.empty(0, dtype=np.int32)


class EvictionOrder:
    """An ordered set of unit ids.

    Args:
        units: how many ids there are.
        depth: int32 [units], position of each unit on its path; shared with and kept by the pool.
    """

    def __init__(self, units: int, depth: Int32Array) -> None:
        self._turn = np.full(units, -1, dtype=np.int64)
        self._queued: BoolArray = np.zeros(units, dtype=np.bool_)
        self._depth = depth
        self._entries: dict[int, Int32Array] = {}
        self._live: dict[int, int] = {}
        self._heap: list[int] = []
        self._clock = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, ids: Int32Array) -> None:
        """Adds units as the most recently used. `ids` are deepest first."""
        if not len(ids):
            return
        self.stamp(ids)
        self._queued[ids] = True
        self._entries[self._clock] = ids
        self._live[self._clock] = len(ids)
        heappush(self._heap, self._clock)
        self._count += len(ids)

    def stamp(self, ids: Int32Array) -> None:
        """Notes a use of units that are not (yet) in the order."""
        self._clock += 1
        self._turn[ids] = self._clock

    def remove(self, ids: Int32Array) -> None:
        """Takes out units that are in use again."""
        if not len(ids):
            return
        assert self._queued[ids].all(), (
            "a unit that is not in the eviction order was taken out of it"
        )
        self._queued[ids] = False
        self._count -= len(ids)
        turns = self._turn[ids]
        if (turns == turns[0]).all():
            self._forget(int(turns[0]), len(ids))
            return
        for turn, count in zip(*np.unique(turns, return_counts=True), strict=True):
            self._forget(int(turn), int(count))

    def take(self, count: int) -> Int32Array:
        """Takes out the next `count` units (fewer if there are fewer), in eviction order."""
        taken: list[Int32Array] = []
        missing = min(count, self._count)
        while missing > 0:
            turn = self._heap[0]
            if turn not in self._entries:
                heappop(self._heap)
                continue
            got = self._scan(turn, missing)
            taken.append(got)
            missing -= len(got)
        return np.concatenate(taken) if taken else EMPTY

    def restore(self, ids: Int32Array) -> None:
        """Puts units back where their last use puts them."""
        if not len(ids):
            return
        assert not self._queued[ids].any(), "a unit was put back twice"
        self._queued[ids] = True
        self._count += len(ids)
        turns = self._turn[ids]
        for turn in np.unique(turns):
            self._merge(int(turn), ids[turns == turn])

    def __contains__(self, unit: int) -> bool:
        return bool(self._queued[unit])

    def listed(self) -> Int32Array:
        """Every unit, in eviction order. O(units): for checks and tests."""
        lists = [self._valid(turn, self._entries[turn]) for turn in sorted(self._entries)]
        return np.concatenate(lists) if lists else EMPTY

    def _valid(self, turn: int, ids: Int32Array) -> Int32Array:
        valid: Int32Array = ids[self._queued[ids] & (self._turn[ids] == turn)]
        return valid

    def _scan(self, turn: int, wanted: int) -> Int32Array:
        """Up to `wanted` units from the front of one turn; drops what was passed over."""
        ids = self._entries[turn]
        chunk = ids[: max(2 * wanted, SCAN_UNITS_MIN)]
        valid = np.flatnonzero(self._queued[chunk] & (self._turn[chunk] == turn))[:wanted]
        got = chunk[valid]
        used = int(valid[-1]) + 1 if len(got) == wanted else len(chunk)
        self._entries[turn] = ids[used:]
        self._queued[got] = False
        self._count -= len(got)
        self._forget(turn, len(got))
        return got

    def _forget(self, turn: int, count: int) -> None:
        left = self._live[turn] - count
        assert left >= 0, (turn, left)
        if left == 0:
            del self._live[turn], self._entries[turn]
            if len(self._heap) > 2 * len(self._entries) + STALE_UNITS_MIN:
                self._heap = sorted(self._entries)
            return
        self._live[turn] = left
        ids = self._entries[turn]
        if len(ids) > 2 * left + STALE_UNITS_MIN:
            self._entries[turn] = self._valid(turn, ids)

    def _merge(self, turn: int, ids: Int32Array) -> None:
        if turn in self._entries:
            # The ids were marked as queued already: drop their stale entries before they come in
            # again.
            old = self._entries[turn]
            ids = np.concatenate([ids, self._valid(turn, old[~np.isin(old, ids)])])
        else:
            heappush(self._heap, turn)
        self._entries[turn] = ids[np.argsort(-self._depth[ids], kind="stable")]
        self._live[turn] = len(ids)
