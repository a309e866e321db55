"""EvictionOrder: which unit goes next: least recently used first, a path's tail before its head.

A unit's stamp is logical: a count of uses, no wall clock. (Operations on a stage follow the wave
numbers, so stamps refine them.) Units that become idle together are stamped deepest first.

The order is a list of segments, each a few thousand (unit, stamp) pairs in order, like the leaves
of a B-tree. A unit that leaves is only unmarked; a segment that is mostly stale is compacted and
merged with its neighbour. So every operation is a few vector steps on one or two segments, however
small the pieces it is called with.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from wavepp.cache.types import BoolArray, Int32Array, IntArray
from wavepp.cache.windows import Int64Array

IndexArray = npt.NDArray[np.intp]

SEGMENT_UNITS = 2048
FEW_SEGMENTS = 8  # up to here a pass over all stamps for each is faster than one search
EMPTY: Int32Array = np.empty(0, dtype=np.int32)


def as_index(ids: IntArray) -> IndexArray:
    """The same ids as the integers that numpy indexes with: others cost it more than twice the
    time, at each use."""
    return ids.astype(np.intp, copy=False)


@dataclass(slots=True, eq=False)
class _Segment:
    """Units with ascending stamps; `live` of them are really in the order."""

    ids: IndexArray
    stamps: Int64Array
    live: int


class EvictionOrder:
    """An ordered set of unit ids.

    Args:
        units: how many ids there are.
    """

    def __init__(self, units: int) -> None:
        self._stamp: Int64Array = np.full(units, -1, dtype=np.int64)
        self._queued: BoolArray = np.zeros(units, dtype=np.bool_)
        self._segments: list[_Segment] = []
        self._starts: list[int] = []  # lowest stamp of each segment
        self._clock = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, ids: IntArray) -> None:
        """Adds units as the most recently used. `ids` are deepest first."""
        if not len(ids):
            return
        ids = as_index(ids)
        assert not self._queued[ids].any(), "a unit was put into the eviction order twice"
        stamps = self.stamp(ids)
        self._queued[ids] = True
        self._count += len(ids)
        last = self._segments[-1] if self._segments else None
        if last is None or len(last.ids) + len(ids) > 2 * SEGMENT_UNITS:
            self._segments.append(_Segment(ids, stamps, len(ids)))
            self._starts.append(int(stamps[0]))
            return
        last.ids = np.concatenate([last.ids, ids])
        last.stamps = np.concatenate([last.stamps, stamps])
        last.live += len(ids)

    def stamp(self, ids: IntArray) -> Int64Array:
        """Notes a use of units that are not (yet) in the order; returns their stamps."""
        stamps = np.arange(self._clock, self._clock + len(ids))
        self._stamp[ids] = stamps
        self._clock += len(ids)
        return stamps

    def remove(self, ids: IntArray) -> None:
        """Takes out units that are in use again."""
        if not len(ids):
            return
        ids = as_index(ids)
        assert self._queued[ids].all(), "a unit that is not in the eviction order was taken out"
        self._queued[ids] = False
        self._count -= len(ids)
        for at, count in reversed(self._counted(self._stamp[ids])):
            self._shrink(at, count)

    def take(self, count: int) -> Int32Array:
        """Takes out the next `count` units (fewer if there are fewer), in eviction order."""
        taken: list[IndexArray] = []
        missing = min(count, self._count)
        while missing > 0:
            segment = self._segments[0]
            valid = np.flatnonzero(self._valid(segment))[:missing]
            got = segment.ids[valid]
            used = int(valid[-1]) + 1
            segment.ids, segment.stamps = segment.ids[used:], segment.stamps[used:]
            self._queued[got] = False
            self._count -= len(got)
            missing -= len(got)
            taken.append(got)
            segment.live -= len(got)
            if not segment.live:
                del self._segments[0], self._starts[0]
        return np.concatenate(taken).astype(np.int32) if taken else EMPTY

    def restore(self, ids: IntArray) -> None:
        """Puts units back where their last use puts them."""
        if not len(ids):
            return
        ids = as_index(ids)
        assert not self._queued[ids].any(), "a unit was put back twice"
        self._count += len(ids)
        stamps = self._stamp[ids]
        if (stamps[1:] < stamps[:-1]).any():
            order = np.argsort(stamps)
            ids, stamps = ids[order], stamps[order]
        if not self._segments:
            self._segments.append(_Segment(ids[:0], stamps[:0], 0))
            self._starts.append(int(stamps[0]))
        for at, chosen in reversed(self._by_segment(stamps)):
            self._merge(at, ids[chosen], stamps[chosen])
        self._queued[ids] = True

    def listed(self) -> Int32Array:
        """Every unit, in eviction order. O(units): for checks and tests."""
        lists = [segment.ids[self._valid(segment)] for segment in self._segments]
        return np.concatenate(lists).astype(np.int32) if lists else EMPTY

    def _valid(self, segment: _Segment) -> BoolArray:
        ids = segment.ids
        valid: BoolArray = self._queued[ids] & (self._stamp[ids] == segment.stamps)
        return valid

    def _by_segment(self, stamps: Int64Array) -> list[tuple[int, Int64Array]]:
        """(segment, indices of the stamps that belong to it), ascending."""
        first = max(bisect_right(self._starts, int(stamps.min())) - 1, 0)
        last = max(bisect_right(self._starts, int(stamps.max())) - 1, 0)
        if first == last:
            return [(first, np.arange(len(stamps)))]
        starts = np.array(self._starts[first + 1 : last + 1])
        which = np.searchsorted(starts, stamps, side="right")
        order = np.argsort(which, kind="stable")
        cuts = np.flatnonzero(np.diff(which[order])) + 1
        return [(first + int(which[chosen[0]]), chosen) for chosen in np.split(order, cuts)]

    def _merge(self, at: int, ids: IndexArray, stamps: Int64Array) -> None:
        """Puts units into a segment, and cuts it when it has become long."""
        segment = self._segments[at]
        kept = self._valid(segment)
        merged = np.concatenate([segment.stamps[kept], stamps])
        order = np.argsort(merged, kind="stable")  # two sorted runs: a merge
        all_ids, all_stamps = np.concatenate([segment.ids[kept], ids])[order], merged[order]
        step = len(order) if len(order) <= 2 * SEGMENT_UNITS else SEGMENT_UNITS
        cuts = np.arange(step, len(order), step)
        parts = list(zip(np.split(all_ids, cuts), np.split(all_stamps, cuts), strict=True))
        self._segments[at : at + 1] = [_Segment(own, when, len(own)) for own, when in parts]
        self._starts[at : at + 1] = [int(when[0]) for _, when in parts]

    def _counted(self, stamps: Int64Array) -> list[tuple[int, int]]:
        """(segment, how many of the stamps belong to it), ascending."""
        first = max(bisect_right(self._starts, int(stamps.min())) - 1, 0)
        last = max(bisect_right(self._starts, int(stamps.max())) - 1, 0)
        if first == last:
            return [(first, len(stamps))]
        if last - first > FEW_SEGMENTS:
            return [(at, len(chosen)) for at, chosen in self._by_segment(stamps)]
        starts = self._starts[first + 1 : last + 1]
        below = [0, *(int(np.count_nonzero(stamps < start)) for start in starts), len(stamps)]
        counts = [high - low for low, high in pairwise(below)]
        return [(first + place, count) for place, count in enumerate(counts) if count]

    def _shrink(self, at: int, count: int) -> None:
        """Notes that units left a segment; keeps segments from being mostly stale or tiny."""
        segment = self._segments[at]
        segment.live -= count
        assert segment.live >= 0, segment.live
        if not segment.live:
            del self._segments[at], self._starts[at]
            return
        if len(segment.ids) <= 2 * segment.live + 16:
            return
        kept = self._valid(segment)
        segment.ids, segment.stamps = segment.ids[kept], segment.stamps[kept]
        if at + 1 == len(self._segments):
            return
        after = self._segments[at + 1]
        if len(segment.ids) + len(after.ids) <= SEGMENT_UNITS:
            after.ids = np.concatenate([segment.ids, after.ids])
            after.stamps = np.concatenate([segment.stamps, after.stamps])
            after.live += segment.live
            self._starts[at + 1] = self._starts[at]
            del self._segments[at], self._starts[at]
