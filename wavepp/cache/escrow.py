"""Escrows: room for what a request will compute, promised before anything is evicted or copied.

Owns the reservations: free units by count, and concrete victims, which stay in the tree with
their content and may still be hit by others. Recurrent units are interchangeable: by count. Where
a victim is to be offloaded, its destination on the host is reserved before it. The floor
(available >= promised, per window) makes a committed escrow one that can always be met. Paper,
section on admission (capacity escrow, substitution at commit).

    demand of a group = hold.free + len(hold.victims)      (paged groups)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from wavepp.cache.blocks import BlockPool
from wavepp.cache.lru import EMPTY, as_index
from wavepp.cache.parts import Parts
from wavepp.cache.types import Int32Array, Refusal


@dataclass(slots=True)
class Hold:
    """One group's part of an escrow. `destinations[i]` is victim i's place on the host, -1: it is
    dropped."""

    demand: int = 0
    free: int = 0
    victims: Int32Array = field(default_factory=lambda: EMPTY)
    destinations: Int32Array = field(default_factory=lambda: EMPTY)


@dataclass(slots=True)
class Escrow:
    """One request's reservation. `endpoint` is in blocks."""

    endpoint: int
    holds: list[Hold]
    committed: bool = False
    slot: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The next state of one hold, fully acquired but not yet published."""

    hold: Hold
    gained: Hold
    claimed: Int32Array
    claimed_destinations: Int32Array


def reserve(
    parts: Parts,
    escrow: Escrow,
    endpoint: int,
    demands: Sequence[int],
    *,
    headrooms: Sequence[int],
    freed: Sequence[Int32Array],
) -> tuple[int, Refusal | None]:
    """Brings an escrow to the demand at an endpoint: all groups or none (prepare and commit alike).

    Args:
        demands: units per group.
        headrooms: units per group that must stay free beyond all promises.
        freed: per group, device units that the caller lets go right afterwards; they may be taken
        as victims already.

    Returns:
        victims substituted, and why not (then nothing has changed).
    """
    wants_slot = parts.recurrent and not escrow.slot
    if wants_slot and parts.slots.spare < 1:
        return 0, Refusal(reason="slots", group="slots", needed=1, available=parts.slots.spare)
    plans: list[Plan] = []
    for group, pool in enumerate(parts.pools):
        refusal = _check_floor(
            pool, escrow.holds[group], demands[group], headrooms[group], freed[group]
        )
        if refusal is not None:
            for undone, plan in zip(parts.pools, plans, strict=False):
                _undo(undone, plan)
            return 0, refusal
        plans.append(_plan(pool, escrow.holds[group], demands[group], freed[group]))
    substituted = sum(len(plan.claimed) for plan in plans)
    for pool, hold, plan in zip(parts.pools, escrow.holds, plans, strict=True):
        _publish(pool, hold, plan)
    escrow.holds = [plan.hold for plan in plans]
    if wants_slot:
        parts.slots.promised += 1
        escrow.slot = True
    escrow.endpoint = endpoint
    parts.counters.substituted += substituted
    return substituted, None


def release(parts: Parts, escrow: Escrow) -> None:
    """Gives the whole reservation back."""
    for pool, hold in zip(parts.pools, escrow.holds, strict=True):
        pool.promised -= hold.demand
        _give_back(pool, hold)
    if escrow.slot:
        parts.slots.promised -= 1
        parts.slots.releases += 1
    escrow.holds = []
    escrow.slot = False


def empty_escrow(parts: Parts) -> Escrow:
    """An escrow that holds nothing yet."""
    return Escrow(endpoint=0, holds=[Hold() for _ in parts.pools])


def forget_content(pool: BlockPool, hold: Hold) -> Int32Array:
    """Before a reset: idle victims become free units of the same escrow. Returns them; the caller
    detaches them."""
    idle = pool.pins[hold.victims] == 0
    victims: Int32Array = hold.victims[idle]
    pool.victim[victims] = False
    pool.unclaimed -= len(victims)
    pool.release_host(hold.destinations[idle])
    hold.victims, hold.destinations = hold.victims[~idle], hold.destinations[~idle]
    hold.free += len(victims)
    pool.reserved_free += len(victims)
    return victims


def _check_floor(
    pool: BlockPool, hold: Hold, demand: int, headroom: int, freed: Int32Array
) -> Refusal | None:
    if demand > pool.units:
        return Refusal(
            reason="never_fits", group=pool.spec.name, needed=demand, available=pool.units
        )
    room = pool.spare + hold.demand + len(freed)
    if demand + headroom > room:
        return Refusal(
            reason="capacity",
            group=pool.spec.name,
            needed=demand + headroom,
            available=max(room, 0),
        )
    return None


def _plan(pool: BlockPool, hold: Hold, demand: int, freed: Int32Array) -> Plan:
    """Acquires what is missing: free units, then victims; keeps everything the hold has."""
    if not pool.spec.paged:
        return Plan(Hold(demand=demand), Hold(), EMPTY, EMPTY)
    lost = pool.pins[as_index(hold.victims)] > 0
    if len(freed):
        lost &= ~np.isin(hold.victims, freed)
    if not lost.any() and hold.free + len(hold.victims) == demand:
        return Plan(replace(hold, demand=demand), Hold(), EMPTY, EMPTY)
    kept, destinations = hold.victims[~lost], hold.destinations[~lost]
    missing = demand - hold.free - len(kept)
    gained = _acquire(pool, max(missing, 0), freed)
    after = Hold(
        demand=demand,
        free=hold.free + gained.free,
        victims=np.concatenate([kept, gained.victims]),
        destinations=np.concatenate([destinations, gained.destinations]),
    )
    return Plan(after, gained, hold.victims[lost], hold.destinations[lost])


def _acquire(pool: BlockPool, count: int, freed: Int32Array) -> Hold:
    """Free units first; then victims in eviction order, each destination before its victim."""
    free = min(count, pool.free - pool.reserved_free)
    pool.reserved_free += free
    wanted = count - free
    destinations = pool.reserve_host(wanted)
    victims = pool.take_victims(wanted)
    short = wanted - len(victims)
    if short:
        late = freed[~pool.victim[freed]][:short]
        assert len(late) == short, (
            f"{pool.spec.name}: the floor held, yet {short} units are missing"
        )
        pool.mark_victims(late)
        victims = np.concatenate([victims, late])
    # The units that go first are the least worth keeping: they go without a destination.
    padding = np.full(wanted - len(destinations), -1, dtype=np.int32)
    return Hold(free=free, victims=victims, destinations=np.concatenate([padding, destinations]))


def _undo(pool: BlockPool, plan: Plan) -> None:
    """A failed commit releases only what it newly took."""
    _give_back(pool, plan.gained)


def _publish(pool: BlockPool, old: Hold, plan: Plan) -> None:
    """The replacements are held: now the claimed victims and any surplus go."""
    pool.promised += plan.hold.demand - old.demand
    pool.drop_victims(plan.claimed)
    pool.release_host(plan.claimed_destinations)
    surplus = plan.hold.free + len(plan.hold.victims) - plan.hold.demand
    if surplus > 0 and pool.spec.paged:
        _drop_surplus(pool, plan.hold, surplus)


def _drop_surplus(pool: BlockPool, hold: Hold, surplus: int) -> None:
    """Content first: victims that are worth most go back before free units do."""
    count = min(surplus, len(hold.victims))
    cut = len(hold.victims) - count
    pool.drop_victims(hold.victims[cut:])
    pool.release_host(hold.destinations[cut:])
    hold.victims, hold.destinations = hold.victims[:cut], hold.destinations[:cut]
    hold.free -= surplus - count
    pool.reserved_free -= surplus - count
    pool.releases += 1


def _give_back(pool: BlockPool, hold: Hold) -> None:
    pool.reserved_free -= hold.free
    pool.drop_victims(hold.victims)
    pool.release_host(hold.destinations)
    pool.releases += 1
