"""BlockPool: the units of one window (cache group), on the device and on the host.

Owns the free lists, the counts and the eviction order of both tiers; knows nothing of tokens. One
id space:

    [0, D) device units        [D, D + H) host units

A device unit is free, cached (in the tree) or private (a sequence's, not in the tree). `pins`
counts leases and sequences. `victim` marks a cached device unit that backs an escrow, or a host
unit that is promised as an offload's
destination. Sums kept all the time (paper, section on admission, capacity floors):

    free + cached + private = D          available = free + cached with no pin (victims included)
    promised = demand of all escrows not yet materialised;   available >= promised is the floor
"""

from __future__ import annotations

import numpy as np

from wavepp.cache.lru import EMPTY, EvictionOrder, IndexArray, as_index
from wavepp.cache.types import BoolArray, GroupSpec, Int32Array, IntArray


class BlockPool:
    """Counts and lists of one group. Every method is a few vector operations."""

    def __init__(self, spec: GroupSpec) -> None:
        total = spec.units + spec.host_units
        # Filled, not taken as zeros: whoever touched their pages first would pay, under the mutex.
        self.spec = spec
        self.units = spec.units
        self.pins: Int32Array = np.full(total, 0, dtype=np.int32)
        self.owner: Int32Array = np.full(
            total, -1, dtype=np.int32
        )  # tree node, -1: not in the tree
        self.depth: Int32Array = np.full(total, 0, dtype=np.int32)  # blocks before it on its path
        self.victim: BoolArray = np.zeros(total, dtype=np.bool_)
        self.keep: BoolArray = np.zeros(
            total, dtype=np.bool_
        )  # a junction's snapshot: never thinned
        self.order = EvictionOrder(total)
        self.host_order = EvictionOrder(total)
        self._free = np.arange(spec.units - 1, -1, -1, dtype=np.int32)
        self._host_free = np.arange(total - 1, spec.units - 1, -1, dtype=np.int32)
        self.free = spec.units
        self.host_free = spec.host_units
        self.promised = 0
        self.reserved_free = 0  # of the free units, those that back escrows
        self.unclaimed = 0  # victims without a pin
        self.releases = 0

    @property
    def available(self) -> int:
        """Free units and those that could be reclaimed, whether or not they back an escrow."""
        return self.free + len(self.order) + self.unclaimed

    @property
    def spare(self) -> int:
        """What could still be pinned or promised without breaking the floor."""
        return self.available - self.promised

    def device_of(self, ids: Int32Array) -> Int32Array:
        """Those of ids that are device units."""
        return ids[(ids >= 0) & (ids < self.units)]

    def fresh(self, ids: Int32Array) -> BoolArray:
        """Which of ids (-1 allowed) a pin would take out of `available`."""
        mask: BoolArray = (ids >= 0) & (ids < self.units)
        mask &= self.pins[as_index(ids)] == 0
        return mask

    # -- pins ------------------------------------------------------------------------------------

    def pin(self, ids: Int32Array) -> None:
        """One more owner for each cached unit. Ids are distinct."""
        if not len(ids):
            return
        at = as_index(ids)
        counts = self.pins[at]
        self.pins[at] = counts + 1
        idle = _chosen(at, counts == 0)
        if not len(idle):
            return
        marked = self.victim[idle]
        if marked.any():
            self.unclaimed -= int(np.count_nonzero(idle[marked] < self.units))
            idle = idle[~marked]
        device, host = self._by_tier(idle)
        self.order.remove(device)
        self.host_order.remove(host)

    def unpin(self, ids: Int32Array) -> None:
        """One owner less for each unit; ids are distinct and deepest first. Idle private units
        become free."""
        if not len(ids):
            return
        at = as_index(ids)
        left = self.pins[at] - 1
        assert left.min() >= 0, f"{self.spec.name}: a unit was unpinned more often than pinned"
        self.pins[at] = left
        idle = _chosen(at, left == 0)
        if not len(idle):
            return
        self.releases += 1
        cached = self.owner[idle] >= 0
        if not cached.all():
            self.give(idle[~cached])
            idle = idle[cached]
        marked = self.victim[idle]
        if marked.any():
            self._unclaim(idle[marked])
            idle = idle[~marked]
        device, host = self._by_tier(idle)
        self.order.push(device)
        self.host_order.push(host)

    def _unclaim(self, victims: IndexArray) -> None:
        device, host = self._by_tier(victims)
        self.unclaimed += len(device)
        self.order.stamp(device)
        self.host_order.stamp(host)

    def _by_tier(self, at: IndexArray) -> tuple[IndexArray, IndexArray]:
        """(device units, host units) of these, in their order."""
        if not self.spec.host_units:
            return at, at[:0]
        on_host = at >= self.units
        return at[~on_host], at[on_host]

    # -- free units ------------------------------------------------------------------------------

    def pop(self, count: int) -> Int32Array:
        """Takes device units off the free list."""
        assert count <= self.free, (self.spec.name, count, self.free)
        self.free -= count
        return self._free[self.free : self.free + count].copy()

    def give(self, ids: IntArray) -> None:
        """Puts units that hold nothing on their free list (device or host)."""
        if not len(ids):
            return
        at = as_index(ids)
        assert not self.pins[at].any(), f"{self.spec.name}: a pinned unit was freed"
        self.keep[at] = False
        device, host = self._by_tier(at)
        self._free[self.free : self.free + len(device)] = device
        self.free += len(device)
        self._host_free[self.host_free : self.host_free + len(host)] = host
        self.host_free += len(host)
        self.releases += 1

    def free_lists(self) -> tuple[Int32Array, Int32Array]:
        """The free units of the device and of the host: for checks."""
        return self._free[: self.free], self._host_free[: self.host_free]

    # -- what backs an escrow ----------------------------------------------------------------------

    def take_victims(self, count: int) -> Int32Array:
        """Marks the next reclaimable device units; their content stays where it is."""
        victims = self.order.take(count)
        self.victim[as_index(victims)] = True
        self.unclaimed += len(victims)
        return victims

    def mark_victims(self, ids: Int32Array) -> None:
        """Marks pinned device units that the caller is about to unpin."""
        assert not self.victim[ids].any(), "a unit can back one escrow only"
        assert self.pins[ids].all(), "an idle unit is taken in eviction order"
        self.victim[ids] = True

    def drop_victims(self, ids: Int32Array) -> None:
        """Unmarks victims; idle ones are back in the eviction order by their last use."""
        if not len(ids):
            return
        at = as_index(ids)
        assert self.victim[at].all(), "not a victim"
        self.victim[at] = False
        idle = _chosen(at, self.pins[at] == 0)
        self.unclaimed -= len(idle)
        self.order.restore(idle)
        self.releases += 1

    def reserve_host(self, count: int) -> Int32Array:
        """Promises host units as destinations: free ones, then the host's least recently used;
        maybe fewer."""
        from_free = min(count, self.host_free)
        self.host_free -= from_free
        free = self._host_free[self.host_free : self.host_free + from_free].copy()
        if from_free < count and len(self.host_order):
            ids = np.concatenate([free, self.host_order.take(count - from_free)])
        else:
            ids = free
        self.victim[ids] = True
        return ids

    def release_host(self, ids: Int32Array) -> None:
        """Takes promises back. -1 entries are ignored."""
        ids = ids[ids >= 0]
        if not len(ids):
            return
        assert self.victim[ids].all(), "not a promised destination"
        self.victim[ids] = False
        empty = self.owner[ids] < 0
        self.give(ids[empty])
        idle = ids[~empty]
        self.host_order.restore(idle[self.pins[idle] == 0])

    def leave_host_order(self, ids: Int32Array) -> None:
        """Takes host units whose content is about to move or go out of the host's eviction
        order."""
        self.host_order.remove(ids[(self.pins[ids] == 0) & ~self.victim[ids]])

    # -- tree ------------------------------------------------------------------------------------

    def move(self, source: Int32Array, target: Int32Array) -> None:
        """Hands owner, depth and pins of each source unit to its target (which holds nothing)."""
        assert (self.owner[target] < 0).all(), "the target of a move holds something"
        for values, empty in ((self.owner, -1), (self.depth, 0), (self.pins, 0)):
            values[target] = values[source]
            values[source] = empty
        self.keep[target] = self.keep[source]
        self.keep[source] = False


def _chosen(at: IndexArray, mask: BoolArray) -> IndexArray:
    """Those of `at` under the mask; itself when that is all."""
    return at if mask.all() else at[mask]


def joined(*lists: Int32Array) -> Int32Array:
    """One int32 array of ids."""
    return np.concatenate(lists) if lists else EMPTY
