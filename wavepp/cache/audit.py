"""The proof of all sums: recounts a stage's cache from what its requests hold and from the tree.

Reads everything, changes nothing. `check` asserts; `count` reports. O(everything): for tests, and
when a stage is idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from wavepp.cache.blocks import BlockPool
from wavepp.cache.escrow import Escrow
from wavepp.cache.lease import Lease, held
from wavepp.cache.lru import EMPTY
from wavepp.cache.parts import Parts
from wavepp.cache.sequence import Sequence as RunningSequence
from wavepp.cache.tree import Node
from wavepp.cache.types import TOKEN_BYTES, CacheStats, GroupStats, Int32Array
from wavepp.cache.windows import needed


@dataclass(frozen=True, slots=True)
class Owners:
    """Everything that may own units, as the door knows it."""

    leases: Sequence[Lease]
    escrows: Sequence[Escrow]
    sequences: Sequence[RunningSequence]


def count(parts: Parts, *, leases: int, escrows: int, sequences: int) -> CacheStats:
    """The numbers of a stage's cache now."""
    tally = parts.counters
    return CacheStats(
        groups=tuple(_group_stats(pool) for pool in parts.pools),
        leases=leases,
        escrows=escrows,
        sequences=sequences,
        slots_free=len(parts.slots.free),
        hint_version=parts.hints.version,
        evicted=tally.evicted,
        offloaded=tally.offloaded,
        brought_back=tally.brought_back,
        substituted=tally.substituted,
        snapshots_taken=tally.snapshots_taken,
        snapshots_skipped=tally.snapshots_skipped,
        snapshots_thinned=tally.snapshots_thinned,
    )


def _group_stats(pool: BlockPool) -> GroupStats:
    cached = int(np.count_nonzero(pool.owner[: pool.units] >= 0))
    return GroupStats(
        name=pool.spec.name,
        paged=pool.spec.paged,
        units=pool.units,
        free=pool.free,
        cached=cached,
        private=pool.units - pool.free - cached,
        reclaimable=len(pool.order) + pool.unclaimed,
        reserved=pool.promised,
        host_units=pool.spec.host_units,
        host_free=pool.host_free,
        host_cached=int(np.count_nonzero(pool.owner[pool.units :] >= 0)),
    )


def leftovers(parts: Parts) -> str | None:
    """What is not given back though nobody holds anything; None: free + cached = pool. Sums."""
    for pool in parts.pools:
        if pool.available != pool.units or pool.promised:
            return (
                f"{pool.units - pool.available} of {pool.units} units and "
                f"{pool.promised} promises of {pool.spec.name}"
            )
    slots = parts.slots
    if slots.promised or len(slots.free) != slots.total:
        return f"{slots.total - len(slots.free)} slots and {slots.promised} promises of slots"
    return None


def check(parts: Parts, owners: Owners) -> None:
    """Asserts every sum: pools, pins, reservations, floors, tree, hint index, working slots."""
    nodes = dict(_reachable(parts))
    assert nodes == parts.tree.nodes, "the tree's list of nodes is not the tree"
    for group in range(len(parts.pools)):
        _check_pins(parts, group, owners)
        _check_reservations(parts, group, owners)
        _check_units(parts, group)
        _check_places(parts, group, nodes)
    for node in nodes.values():
        _check_node(parts, node)
    _check_hints(parts, nodes)
    _check_slots(parts, owners)


def _reachable(parts: Parts) -> Iterator[tuple[int, Node]]:
    stack = list(parts.tree.roots.values())
    while stack:
        node = stack.pop()
        assert node.alive, "a dead run hangs in the tree"
        assert node.parent is None or node.end > node.start, "an empty run hangs in the tree"
        if node.parent is not None:
            yield node.index, node
        stack.extend(node.children.values())


def _check_pins(parts: Parts, group: int, owners: Owners) -> None:
    """pins = leases + sequences, unit by unit."""
    pool = parts.pools[group]
    expected = np.zeros_like(pool.pins)
    for lease in owners.leases:
        low, high = needed(pool.spec, lease.endpoint, parts.block_size)
        expected[held(parts, lease)[group][low:high]] += 1
    for sequence in owners.sequences:
        expected[_owned(sequence, group)] += 1
    wrong = np.flatnonzero(expected != pool.pins)
    assert not len(wrong), (
        f"{pool.spec.name}: pins of units {wrong.tolist()} are {pool.pins[wrong].tolist()}, "
        f"their owners are {expected[wrong].tolist()}"
    )


def _owned(sequence: RunningSequence, group: int) -> Int32Array:
    singles = [
        units[group] for units in (sequence.tail, *sequence.pending.values()) if group in units
    ]
    table = sequence.tables[group]
    ids = np.concatenate(
        [table[table >= 0], *sequence.borrowed[group], np.array(singles, dtype=np.int32)]
    )
    assert len(np.unique(ids)) == len(ids), "a sequence holds a unit twice"
    return ids


def _check_reservations(parts: Parts, group: int, owners: Owners) -> None:
    """Every mark has one escrow, every escrow holds its demand, and the floor stands."""
    pool = parts.pools[group]
    holds = [escrow.holds[group] for escrow in owners.escrows]
    victims = np.concatenate([EMPTY, *(hold.victims for hold in holds)])
    places = np.concatenate([EMPTY, *(hold.destinations for hold in holds)])
    marked = np.concatenate([victims, places[places >= 0]])
    assert (victims < pool.units).all(), "a victim is a device unit"
    assert sorted(marked.tolist()) == np.flatnonzero(pool.victim).tolist(), "marks != escrows"
    assert (pool.owner[victims] >= 0).all(), "a victim left the tree before materialisation"
    for hold in holds:
        assert len(hold.destinations) == len(hold.victims), "one destination entry a victim"
        if pool.spec.paged:
            assert hold.free + len(hold.victims) == hold.demand, hold
    assert pool.promised == sum(hold.demand for hold in holds), "promised != sum of demands"
    assert pool.reserved_free == sum(hold.free for hold in holds), "reserved free units"
    assert pool.reserved_free <= pool.free, "more free units are reserved than there are"
    assert pool.unclaimed == np.count_nonzero(pool.pins[victims] == 0), "unclaimed victims"
    assert pool.available >= pool.promised, (
        f"{pool.spec.name}: floor broken: {pool.available} available, {pool.promised} promised"
    )


def _check_units(parts: Parts, group: int) -> None:
    """Conservation: free + cached + private = device units, and the same on the host."""
    pool = parts.pools[group]
    units = pool.units
    free, host_free = pool.free_lists()
    assert len(np.unique(free)) == len(free) == pool.free, "the free list holds a unit twice"
    assert len(np.unique(host_free)) == len(host_free) == pool.host_free, "host free list"
    unused = np.concatenate([free, host_free])
    assert (pool.owner[unused] < 0).all(), "a free unit is in the tree"
    assert not pool.pins[unused].any(), "a free unit is pinned"
    assert not pool.victim[unused].any(), "a free unit is promised"
    cached = pool.owner >= 0
    private = (~cached[:units]) & (pool.pins[:units] > 0)
    total = pool.free + np.count_nonzero(cached[:units]) + np.count_nonzero(private)
    assert total == units, f"{pool.spec.name}: {total} units accounted for, {units} there"
    promised_empty = np.count_nonzero(pool.victim[units:] & ~cached[units:])
    host = pool.host_free + np.count_nonzero(cached[units:]) + promised_empty
    assert host == pool.spec.host_units, f"{pool.spec.name}: {host} host units accounted for"
    idle = cached & (pool.pins == 0) & ~pool.victim
    assert sorted(pool.order.listed()) == np.flatnonzero(idle[:units]).tolist(), "device order"
    host_idle = (np.flatnonzero(idle[units:]) + units).tolist()
    assert sorted(pool.host_order.listed()) == host_idle, "host order"
    assert len(pool.order) + len(pool.host_order) == np.count_nonzero(idle), "order counts"


def _check_places(parts: Parts, group: int, nodes: dict[int, Node]) -> None:
    """A unit is in at most one place of the tree, and knows it."""
    pool = parts.pools[group]
    owner = np.full_like(pool.owner, -1)
    for node in nodes.values():
        offsets = np.flatnonzero(node.places[group] >= 0)
        ids = node.places[group][offsets]
        assert (owner[ids] < 0).all(), "a unit is in two places of the tree"
        owner[ids] = node.index
        assert (pool.depth[ids] == offsets + node.start).all(), "a unit's depth is wrong"
    assert (owner == pool.owner).all(), f"{pool.spec.name}: owners differ from the tree"


def _check_node(parts: Parts, node: Node) -> None:
    assert len(node.keys) == node.length, "one key a block"
    assert len(node.raw) == node.length * parts.block_size * TOKEN_BYTES, "B tokens a block"
    parent = node.parent
    assert parent is not None
    assert node.start == parent.end, "a run begins where its parent ends"
    assert parent.children[node.raw[: parts.block_size * TOKEN_BYTES]] is node, "child's name"
    if not node.children:
        assert node.places[:, -1].max(initial=-1) >= 0, "a path ends in a block nobody holds"


def _check_hints(parts: Parts, nodes: dict[int, Node]) -> None:
    """The hint index equals the tree."""
    expected: dict[tuple[int, int], Counter[bytes]] = {}
    for node in nodes.values():
        for group in range(len(parts.pools)):
            for offset in np.flatnonzero(node.places[group] >= 0):
                table = expected.setdefault((node.shard, group), Counter())
                table[node.keys[offset]] += 1
    assert parts.hints.counts() == expected, "the hint index differs from the tree"


def _check_slots(parts: Parts, owners: Owners) -> None:
    slots = [sequence.slot for sequence in owners.sequences if sequence.slot is not None]
    assert len(set(slots)) == len(slots), "two requests share a working slot"
    assert sorted([*slots, *parts.slots.free]) == list(range(parts.slots.total)), "slots lost"
    promised = sum(escrow.slot for escrow in owners.escrows)
    assert parts.slots.promised == promised, "promised slots != escrows that need one"
    assert parts.slots.spare >= 0, "more working slots are promised than free"
