"""The allocator: hands out device units, evicting or offloading what it must, and brings host
content back.

Owns the moves between the tiers. It runs at materialisation only (and for elastic snapshots):
nothing is evicted or copied before. Eviction never fails and never blocks: content worth keeping
goes to its promised destination, else to a free host unit or over the host's least recently used
one, else it is dropped. Paper, section on admission (deferred offloading).
"""

from __future__ import annotations

import numpy as np

from wavepp.cache.escrow import Hold
from wavepp.cache.lru import EMPTY, as_index
from wavepp.cache.parts import Parts
from wavepp.cache.types import BoolArray, BringBack, Effect, Int32Array, Offload


def allocate(parts: Parts, group: int, count: int, hold: Hold) -> tuple[Int32Array, list[Effect]]:
    """`count` device units that hold nothing: free ones, then the hold's idle victims, then
    others in eviction order.

    The hold's free units are given up here and its used victims leave it; the rest stays for
    `escrow.release`.

    Returns:
        units (not pinned, not in the tree) and the offloads to perform before they are written.
    """
    pool = parts.pools[group]
    pool.reserved_free -= hold.free
    hold.free = 0
    free = min(count, pool.free - pool.reserved_free)
    units = pool.pop(free)
    wanted = count - free
    if not wanted:
        return units, []
    victims, destinations = _own_victims(parts, group, hold, wanted)
    short = wanted - len(victims)
    if short:
        extra_destinations = pool.reserve_host(short)
        extra = pool.take_victims(short)
        assert len(extra) == short, f"{pool.spec.name}: materialisation found no room for {short}"
        padding = np.full(short - len(extra_destinations), -1, dtype=np.int32)
        victims = np.concatenate([victims, extra])
        destinations = np.concatenate([destinations, padding, extra_destinations])
    effects = _evict(parts, group, victims, destinations)
    return np.concatenate([units, victims]), effects


def _own_victims(
    parts: Parts, group: int, hold: Hold, wanted: int
) -> tuple[Int32Array, Int32Array]:
    """Takes idle victims out of the hold; the claimed ones and what is not needed stay in it."""
    pool = parts.pools[group]
    idle = pool.pins[as_index(hold.victims)] == 0
    if len(idle) <= wanted and idle.all():
        victims, destinations = hold.victims, hold.destinations
        hold.victims = hold.destinations = EMPTY
        return victims, destinations
    chosen = np.flatnonzero(idle)[:wanted]
    victims, destinations = hold.victims[chosen], hold.destinations[chosen]
    hold.victims = np.delete(hold.victims, chosen)
    hold.destinations = np.delete(hold.destinations, chosen)
    return victims, destinations


def _evict(parts: Parts, group: int, victims: Int32Array, destinations: Int32Array) -> list[Effect]:
    """Empties marked device units; afterwards they hold nothing and are marked no more."""
    pool = parts.pools[group]
    pool.victim[as_index(victims)] = False
    pool.unclaimed -= len(victims)
    parts.counters.evicted += len(victims)
    if not pool.spec.host_units:
        parts.tree.detach(group, victims)
        return []
    claimed = (destinations >= 0) & (pool.pins[destinations] > 0)
    if claimed.any():
        destinations = _other_destinations(parts, group, destinations, claimed)
    kept = destinations >= 0
    source, target = victims[kept], destinations[kept]
    parts.tree.detach(group, victims[~kept])
    if not len(source):
        return []
    parts.tree.detach(group, target[pool.owner[target] >= 0])
    pool.victim[target] = False
    parts.tree.relocate(group, source, target)
    pool.host_order.push(target)
    parts.counters.offloaded += len(source)
    return [Offload(group=pool.spec.name, device=source, host=target - pool.units)]


def _other_destinations(
    parts: Parts, group: int, destinations: Int32Array, claimed: BoolArray
) -> Int32Array:
    """Somebody hit the host content that was to be overwritten: other destinations, or none."""
    pool = parts.pools[group]
    lost = destinations[claimed]
    found = pool.reserve_host(len(lost))
    destinations = destinations.copy()
    destinations[claimed] = np.concatenate(
        [found, np.full(len(lost) - len(found), -1, dtype=np.int32)]
    )
    pool.release_host(lost)
    return destinations


def bring_back(parts: Parts, group: int, host: Int32Array, device: Int32Array) -> list[Effect]:
    """Moves pinned host content into device units, with all its pins; the host units become
    free."""
    if not len(host):
        return []
    pool = parts.pools[group]
    assert pool.pins[host].all(), "only leased content is brought back"
    parts.tree.relocate(group, host, device)
    pool.give(host[~pool.victim[host]])
    parts.counters.brought_back += len(host)
    return [BringBack(group=pool.spec.name, host=host - pool.units, device=device)]


def discard(parts: Parts, group: int, ids: Int32Array) -> None:
    """Drops idle cached content (device or host) that backs nothing and frees its units."""
    if not len(ids):
        return
    pool = parts.pools[group]
    assert not pool.pins[ids].any(), "pinned content is never dropped"
    assert not pool.victim[ids].any(), "a victim is dropped by its escrow only"
    parts.tree.detach(group, ids)
    on_host = ids >= pool.units
    pool.order.remove(ids[~on_host])
    pool.host_order.remove(ids[on_host])
    pool.give(ids)


def wipe(parts: Parts, group: int, forgotten: Int32Array) -> None:
    """Drops all idle content of a group. `forgotten`: former victims, in no order any more."""
    pool = parts.pools[group]
    parts.tree.detach(group, forgotten)
    pool.give(forgotten)
    idle = np.flatnonzero((pool.owner >= 0) & (pool.pins == 0)).astype(np.int32)
    promised = pool.victim[idle]
    # A promised host unit keeps its promise but loses the content that was to be overwritten.
    parts.tree.detach(group, idle[promised])
    discard(parts, group, idle[~promised])
