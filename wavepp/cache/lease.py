"""Leases: pins on what a request will reuse, from agreement until its sequence has references of
its own.

Owns the exact walk and the pins it leads to. A leased unit may be shared by others and evicted by
none. Leases have no expiry by time, and go lower only. Paper, section on admission (local lease).

The walk takes longest, and can be made before the mutex is taken: `foresee`. If the tree is still
the same then, only the pins are left to do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wavepp.cache.parts import Parts
from wavepp.cache.tree import Match, Node
from wavepp.cache.types import BoolArray, Int32Array, Prompt, ReuseVote
from wavepp.cache.windows import make_vote, needed, usable, within_floor


@dataclass(slots=True)
class Lease:
    """One request's claim on a prefix.

    Attributes:
        endpoint: in blocks; what `needed` says of it is pinned in every group.
        node: holds block endpoint - 1, or a part split off below it; None when nothing is pinned.
    """

    attempt: int
    prompt: Prompt
    node: Node | None
    endpoint: int


@dataclass(frozen=True, slots=True, eq=False)
class Foresight:
    """What a walk found, for as long as the tree does not change.

    Attributes:
        limit: how far it went at most, in blocks. changes: the tree's, before the walk.
        reuse: the vote, floors aside. present: per group, the units found on the path.
    """

    prompt: Prompt
    limit: int
    changes: int
    match: Match
    reuse: ReuseVote
    present: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Shift:
    """What a lease pins anew and lets go when it falls to a lower endpoint; per group, deepest
    first."""

    endpoint: int
    acquire: list[Int32Array]
    release: list[Int32Array]


def look(parts: Parts, prompt: Prompt, limit: int) -> ReuseVote:
    """The exact walk up to `limit` blocks, without a pin. Owns nothing; floors aside."""
    cap = min(limit, prompt.reuse_cap // parts.block_size)
    if not parts.config.enable_prefix_caching:
        return ReuseVote(attention=0)
    return _vote(parts, parts.tree.walk(prompt, cap).places, bounded=False)


def foresee(parts: Parts, prompt: Prompt, limit: int) -> Foresight:
    """The exact walk up to `limit` blocks and what it means, without a pin. Needs no mutex."""
    cap = min(limit, prompt.reuse_cap // parts.block_size)
    changes = parts.tree.changes
    match = parts.tree.walk(prompt, cap)
    reuse = _vote(parts, match.places, bounded=False)
    present = tuple(int(np.count_nonzero(row >= 0)) for row in match.places)
    return Foresight(prompt, cap, changes, match, reuse, present)


def acquire(
    parts: Parts, attempt: int, prompt: Prompt, limit: int, foresight: Foresight | None = None
) -> tuple[Lease, ReuseVote]:
    """Walks up to `limit` blocks, unless that was foreseen and still stands, and pins the highest
    usable endpoint that keeps every floor."""
    cap = min(limit, prompt.reuse_cap // parts.block_size)
    if not parts.config.enable_prefix_caching:
        return Lease(attempt, prompt, None, 0), ReuseVote(attention=0)
    seen = foresight
    if seen is None or not _stands(parts, seen, prompt, cap):
        seen = foresee(parts, prompt, cap)
    match, vote = seen.match, seen.reuse
    named = zip(parts.pools, seen.present, strict=True)
    if any(pool.spare < present for pool, present in named):
        vote = _vote(parts, match.places, bounded=True)
    endpoint = vote.highest(cap * parts.block_size) // parts.block_size
    # The match may reach deeper than the endpoint, into runs that this lease does not pin.
    node = parts.tree.climb(match.node, endpoint) if match.node and endpoint else None
    for pool, ids in zip(parts.pools, _pinned(parts, match.places, endpoint), strict=True):
        assert not len(ids) or ids.min() >= 0, "the endpoint needs a unit that is not held"
        pool.pin(ids)
    return Lease(attempt, prompt, node, endpoint), vote


def _stands(parts: Parts, seen: Foresight, prompt: Prompt, limit: int) -> bool:
    """Whether a walk now would find the same."""
    same_walk = seen.prompt is prompt and seen.limit == limit
    return same_walk and seen.changes == parts.tree.changes


def release(parts: Parts, lease: Lease) -> None:
    """Unpins everything, the tail before the head."""
    places = parts.tree.path(lease.node, lease.endpoint)
    for pool, ids in zip(parts.pools, _pinned(parts, places, lease.endpoint), strict=True):
        pool.unpin(ids[::-1])
    lease.node, lease.endpoint = None, 0


def usable_below(parts: Parts, lease: Lease, limit: int) -> ReuseVote:
    """Every endpoint at or below `limit` blocks on the leased path, floors aside."""
    upto = min(limit, lease.endpoint)
    if not parts.config.enable_prefix_caching:
        return ReuseVote(attention=0)
    return _vote(parts, held(parts, lease)[:, :upto], bounded=False)


def trim(parts: Parts, lease: Lease, reuse: ReuseVote, limit: int) -> None:
    """Lowers a lease to the highest endpoint of `reuse` at or below `limit` (in blocks) that keeps
    every floor; the new is pinned before the old is let go."""
    size = parts.block_size
    target = reuse.highest(min(limit, lease.endpoint) * size) // size
    while target < lease.endpoint:
        shift = plan_shift(parts, lease, target)
        pin_new(parts, shift)
        if keeps_floors(parts, shift):
            unpin_old(parts, lease, shift)
            return
        unpin_new(parts, shift)
        target = reuse.highest((target - 1) * size) // size


def plan_shift(parts: Parts, lease: Lease, endpoint: int) -> Shift:
    """What changes when the lease falls to `endpoint` (in blocks, usable on the path). Changes
    nothing yet."""
    assert 0 <= endpoint < lease.endpoint, (endpoint, lease.endpoint)
    places = held(parts, lease)
    new: list[Int32Array] = []
    old: list[Int32Array] = []
    for spec, row in zip(parts.specs, places, strict=True):
        low, high = needed(spec, lease.endpoint, parts.block_size)
        low_then, high_then = needed(spec, endpoint, parts.block_size)
        assert low_then <= low, "a window moved up while the endpoint fell"
        new.append(row[low_then : min(high_then, low)][::-1])
        old.append(row[max(low, high_then) : high][::-1])
    return Shift(endpoint, new, old)


def freed_by(parts: Parts, shift: Shift) -> list[Int32Array]:
    """Device units per group that only this lease pins and that the shift lets go."""
    freed = []
    for pool, ids in zip(parts.pools, shift.release, strict=True):
        device = pool.device_of(ids)
        freed.append(device[pool.pins[device] == 1])
    return freed


def pin_new(parts: Parts, shift: Shift) -> None:
    """First half of a shift: the new is pinned."""
    for pool, ids in zip(parts.pools, shift.acquire, strict=True):
        pool.pin(ids)


def unpin_new(parts: Parts, shift: Shift) -> None:
    """Undoes the first half."""
    for pool, ids in zip(parts.pools, shift.acquire, strict=True):
        pool.unpin(ids)


def unpin_old(parts: Parts, lease: Lease, shift: Shift) -> None:
    """Second half: the old is let go, and the lease stands at the lower endpoint."""
    for pool, ids in zip(parts.pools, shift.release, strict=True):
        pool.unpin(ids)
    assert shift.endpoint < lease.endpoint, "a lease goes lower only"
    lease.endpoint = shift.endpoint
    if lease.node is not None:
        lease.node = parts.tree.climb(lease.node, lease.endpoint) if lease.endpoint else None


def keeps_floors(parts: Parts, shift: Shift) -> bool:
    """Whether every pool still covers its escrows once the (already pinned) shift is done."""
    freed = freed_by(parts, shift)
    return all(pool.spare + len(ids) >= 0 for pool, ids in zip(parts.pools, freed, strict=True))


def held(parts: Parts, lease: Lease) -> Int32Array:
    """int32 [groups, endpoint]: the units on the leased path."""
    if lease.node is None:
        return np.full((len(parts.pools), lease.endpoint), -1, dtype=np.int32)
    return parts.tree.path(lease.node, lease.endpoint)


def host_blocks(parts: Parts, lease: Lease, endpoint: int) -> list[int]:
    """Blocks per group that resuming at `endpoint` must bring back from the host (0 for
    snapshots)."""
    if not any(spec.host_units for spec in parts.specs):
        return [0] * len(parts.pools)
    places = held(parts, lease)
    counts = []
    for spec, pool, row in zip(parts.specs, parts.pools, places, strict=True):
        low, high = needed(spec, endpoint, parts.block_size)
        counts.append(int(np.count_nonzero(row[low:high] >= pool.units)) if spec.paged else 0)
    return counts


def _pinned(parts: Parts, places: Int32Array, endpoint: int) -> list[Int32Array]:
    """Per group, what a lease at `endpoint` pins, head first."""
    rows = []
    for spec, row in zip(parts.specs, places, strict=True):
        low, high = needed(spec, endpoint, parts.block_size)
        rows.append(row[low:high])
    return rows


def _vote(parts: Parts, places: Int32Array, *, bounded: bool) -> ReuseVote:
    """The endpoints of a path; `bounded`: only those whose pins keep the floor invariant."""
    masks: list[BoolArray] = []
    for spec, pool, row in zip(parts.specs, parts.pools, places, strict=True):
        present = row >= 0
        mask = usable(spec, present, parts.block_size)
        if bounded and pool.spare < np.count_nonzero(present):
            mask = mask & within_floor(spec, pool.fresh(row), pool.spare, parts.block_size)
        masks.append(mask)
    return make_vote(parts.specs, masks, parts.block_size)
