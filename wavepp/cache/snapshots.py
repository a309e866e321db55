"""Recurrent snapshots: units to save them into, and which of them are kept.

A snapshot is the state of every recurrent layer of the stage after exactly so many tokens; it
cannot be rewound. The driver says where they are taken (the tail of a prompt, intervals,
junctions); the tail's unit is promised by the escrow, the others are elastic. Too many along one
path thin out from the middle. Paper, section on recurrent caches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wavepp.cache.escrow import Hold
from wavepp.cache.parts import Parts
from wavepp.cache.reclaim import allocate, discard
from wavepp.cache.sequence import Sequence as RunningSequence
from wavepp.cache.sequence import attach_at
from wavepp.cache.types import Effect, Int32Array, SnapshotOrder, SnapshotOrders


def thin(depths: Sequence[int], droppable: Sequence[bool], most: int) -> tuple[int, ...]:
    """Indices to drop so that at most `most` snapshots stay on a path, the droppable one nearest
    the middle first.

    Args:
        depths: ascending; the last one, the path's tail, is never dropped.
    """
    left = list(range(len(depths)))
    dropped: list[int] = []
    while len(left) > most:
        middle = (len(left) - 1) / 2
        free = [at for at, index in enumerate(left[:-1]) if droppable[index]]
        if not free:
            break
        at = min(free, key=lambda place: (abs(place - middle), place))
        dropped.append(left.pop(at))
    return tuple(sorted(dropped))


def order(
    parts: Parts, sequence: RunningSequence, positions: Sequence[int], junctions: Sequence[int]
) -> SnapshotOrders:
    """Units for snapshots of the coming span; all but the tail's are elastic."""
    if not parts.recurrent or not parts.config.enable_prefix_caching:
        return SnapshotOrders()
    assert sequence.slot is not None, "a request with recurrent state has a working slot"
    orders: list[SnapshotOrder] = []
    skipped: list[int] = []
    effects: list[Effect] = []
    sequence.junctions.update(junctions)
    for position in sorted(set(positions)):
        assert position % parts.block_size == 0, position
        assert position // parts.block_size > sequence.endpoint, "a snapshot lies in the suffix"
        units = _units(parts, sequence, position, effects)
        if units is None:
            skipped.append(position)
            continue
        sequence.pending[position] = units
        names = {parts.specs[group].name: unit for group, unit in units.items()}
        orders.append(SnapshotOrder(position=position, slot=sequence.slot, units=names))
    parts.counters.snapshots_skipped += len(skipped)
    return SnapshotOrders(orders=tuple(orders), skipped=tuple(skipped), effects=tuple(effects))


def _units(
    parts: Parts, sequence: RunningSequence, position: int, effects: list[Effect]
) -> dict[int, int] | None:
    """One unit in each recurrent group: the tail's own, or what is spare; None when there is
    none."""
    assert position not in sequence.pending, f"a snapshot at {position} is on order already"
    groups = [group for group, spec in enumerate(parts.specs) if not spec.paged]
    if position == sequence.prompt.tail and sequence.tail:
        units = dict(sequence.tail)
        sequence.tail.clear()
        return units
    if any(parts.pools[group].spare < 1 for group in groups):
        return None
    units = {}
    for group in groups:
        found, offloads = allocate(parts, group, 1, Hold())
        parts.pools[group].pins[found] = 1
        effects.extend(offloads)
        units[group] = int(found[0])
    return units


def taken(parts: Parts, sequence: RunningSequence, position: int) -> None:
    """Attaches an ordered snapshot that was written; an older one at the same place is kept
    instead."""
    units = sequence.pending.pop(position)
    depth = position // parts.block_size
    assert sequence.published >= depth, "blocks are published before the snapshot that follows them"
    places = np.full((len(parts.pools), 1), -1, dtype=np.int32)
    for group, unit in units.items():
        places[group, -1] = unit
    done = attach_at(parts, sequence, depth - 1, places)
    if sequence.published == depth:
        sequence.node = done.node
    keep = position in sequence.junctions
    for group, unit in units.items():
        pool = parts.pools[group]
        pool.keep[unit] |= keep
        pool.unpin(np.array([unit], dtype=np.int32))
        for older in done.older[group]:
            pool.keep[older] |= keep
    parts.counters.snapshots_taken += 1
    _thin_path(parts, parts.tree.path(done.node, depth))


def _thin_path(parts: Parts, places: Int32Array) -> None:
    most = parts.config.max_snapshots_per_path
    for group, pool in enumerate(parts.pools):
        if pool.spec.paged:
            continue
        ids = places[group][places[group] >= 0]
        if len(ids) <= most:
            continue
        droppable = (pool.pins[ids] == 0) & ~pool.victim[ids] & ~pool.keep[ids]
        chosen = thin(pool.depth[ids].tolist(), droppable.tolist(), most)
        parts.counters.snapshots_thinned += len(chosen)
        discard(parts, group, ids[list(chosen)])
