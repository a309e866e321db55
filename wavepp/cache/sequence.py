"""Sequences: a running request's own units, from materialisation until it is freed.

Owns the release order (escrow, then lease) and what happens to computed blocks: published after
execution, never before, and only into this stage's tree. If the same block is there already the
older one is kept; the copy stays this request's own until it is freed, since waves already
prepared read it. Paper, section on admission (materialisation).

    blocks of a sequence:   [0, endpoint) pinned, in the tree     [endpoint, published) in the
    tree or a copy
                            [published, blocks_total) private
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from wavepp.cache import escrow as escrows
from wavepp.cache import lease as leases
from wavepp.cache.escrow import Escrow, Hold
from wavepp.cache.lease import Lease
from wavepp.cache.lru import EMPTY
from wavepp.cache.parts import Parts
from wavepp.cache.reclaim import allocate, bring_back
from wavepp.cache.tree import Attached, Node
from wavepp.cache.types import (
    NO_UNIT,
    Effect,
    Int32Array,
    Materialized,
    Offload,
    Prompt,
    PublishOutcome,
    RestoreSnapshot,
    ZeroSlot,
)
from wavepp.cache.windows import needed
from wavepp.units import RequestId


@dataclass(slots=True)
class Sequence:
    """What a running request owns on this stage. `endpoint` and `published` are in blocks.

    Attributes:
        tables: per group int32 [blocks_total]; empty for recurrent groups.
        slot: working slot; None without recurrent groups.
        tail: recurrent group -> the snapshot its escrow reserved for the prompt's tail.
        pending: position in tokens -> (recurrent group -> snapshot), ordered and not yet taken.
        borrowed: per group, older units in the tree that stand for this request's copies; pinned.
        node: holds block published - 1 as far as is known.
    """

    prompt: Prompt
    endpoint: int
    tables: list[Int32Array]
    slot: int | None
    published: int
    node: Node | None
    tail: dict[int, int] = field(default_factory=dict)
    pending: dict[int, dict[int, int]] = field(default_factory=dict)
    junctions: set[int] = field(default_factory=set)
    borrowed: list[list[Int32Array]] = field(default_factory=list)


def materialize(parts: Parts, lease: Lease, escrow: Escrow) -> tuple[Sequence, tuple[Effect, ...]]:
    """Allocates while the escrow is held, takes references, then releases escrow, then lease."""
    assert escrow.committed, "only a committed escrow is materialised"
    assert escrow.endpoint == lease.endpoint, (escrow.endpoint, lease.endpoint)
    effects: list[Effect] = []
    sequence = Sequence(
        prompt=lease.prompt,
        endpoint=lease.endpoint,
        tables=[EMPTY] * len(parts.pools),
        slot=None,
        published=lease.endpoint,
        node=lease.node,
        borrowed=[[] for _ in parts.pools],
    )
    places = leases.held(parts, lease)
    for group, spec in enumerate(parts.specs):
        if spec.paged:
            own = _take_blocks(parts, group, places[group], (sequence, escrow.holds[group]))
        else:
            own = _take_tail(parts, group, sequence, escrow.holds[group])
        effects.extend(own)
    if parts.recurrent:
        effects.extend(_take_slot(parts, lease, sequence, escrow))
    effects.sort(key=lambda effect: not isinstance(effect, Offload))
    escrows.release(parts, escrow)
    leases.release(parts, lease)
    return sequence, tuple(effects)


def describe(parts: Parts, request_id: RequestId, sequence: Sequence) -> Materialized:
    """What a sequence owns, without effects."""
    return Materialized(
        request_id=request_id,
        endpoint=sequence.endpoint * parts.block_size,
        block_tables={
            spec.name: table
            for spec, table in zip(parts.specs, sequence.tables, strict=True)
            if spec.paged
        },
        slot=sequence.slot,
        effects=(),
    )


def _take_blocks(
    parts: Parts, group: int, row: Int32Array, owner: tuple[Sequence, Hold]
) -> list[Effect]:
    """New units for the suffix and for leased blocks that are on the host; references on the
    leased ones."""
    sequence, hold = owner
    pool, prompt, endpoint = parts.pools[group], sequence.prompt, sequence.endpoint
    low, high = needed(pool.spec, endpoint, parts.block_size)
    leased = row[low:high].copy()
    on_host = np.flatnonzero(leased >= pool.units)
    suffix = prompt.blocks_total - endpoint
    units, effects = allocate(parts, group, suffix + len(on_host), hold)
    returning = units[suffix:]
    effects += bring_back(parts, group, leased[on_host], returning)
    leased[on_host] = returning
    pool.pin(leased)
    pool.pins[units[:suffix]] = 1
    table = np.full(prompt.blocks_total, NO_UNIT, dtype=np.int32)
    table[low:high] = leased
    table[endpoint:] = units[:suffix]
    sequence.tables[group] = table
    return effects


def _take_tail(parts: Parts, group: int, sequence: Sequence, hold: Hold) -> list[Effect]:
    if not hold.demand:
        return []
    units, effects = allocate(parts, group, hold.demand, hold)
    parts.pools[group].pins[units] = 1
    sequence.tail[group] = int(units[0])
    return effects


def _take_slot(parts: Parts, lease: Lease, sequence: Sequence, escrow: Escrow) -> list[Effect]:
    """A working slot, set to the leased snapshot or to the empty state."""
    assert escrow.slot, "a committed escrow has a working slot promised"
    parts.slots.promised -= 1
    escrow.slot = False
    slot = parts.slots.take()
    sequence.slot = slot
    effects: list[Effect] = []
    places = leases.held(parts, lease)
    for group, pool in enumerate(parts.pools):
        if pool.spec.paged:
            continue
        name = pool.spec.name
        if sequence.endpoint == 0:
            effects.append(ZeroSlot(group=name, slot=slot))
            continue
        unit = int(places[group, sequence.endpoint - 1])
        assert pool.pins[unit] > 0, "the leased snapshot is not pinned"
        on_host = unit >= pool.units
        number = unit - pool.units if on_host else unit
        effects.append(RestoreSnapshot(group=name, snapshot=number, slot=slot, from_host=on_host))
    return effects


def publish(parts: Parts, sequence: Sequence, upto: int) -> PublishOutcome:
    """Attaches full prompt blocks [published, upto) (in blocks); they were executed on this
    stage."""
    low = sequence.published
    if upto <= low or not parts.config.enable_prefix_caching:
        return PublishOutcome(attached=0, duplicates=0)
    assert upto <= len(sequence.prompt.keys), "only full prompt blocks are published"
    if not any(spec.paged for spec in parts.specs):
        sequence.published = upto
        return PublishOutcome(attached=0, duplicates=0)
    places = np.full((len(parts.pools), upto - low), -1, dtype=np.int32)
    for group, spec in enumerate(parts.specs):
        if spec.paged:
            places[group] = sequence.tables[group][low:upto]
    done = attach_at(parts, sequence, low, places)
    sequence.node, sequence.published = done.node, upto
    for group, older in enumerate(done.older):
        _borrow(parts, group, sequence, older)
    return PublishOutcome(attached=done.count, duplicates=sum(map(len, done.older)))


def attach_at(parts: Parts, sequence: Sequence, low: int, places: Int32Array) -> Attached:
    """Attaches units at blocks [low, ...) of the sequence's path, whatever became of the path
    meanwhile."""
    tree, prompt = parts.tree, sequence.prompt
    node = sequence.node
    if low == 0:
        return tree.attach((None, 0), prompt, places)
    if _holds_end(parts, sequence, low) or tree.valid(node, low, prompt):
        return tree.attach((node, low), prompt, places)
    match = tree.walk(prompt, low)
    holes = np.full((len(parts.pools), low - match.depth), -1, dtype=np.int32)
    return tree.attach((match.node, match.depth), prompt, np.concatenate([holes, places], axis=1))


def _holds_end(parts: Parts, sequence: Sequence, low: int) -> bool:
    """Block low - 1 of the cursor's path is a unit of this sequence, which pins it: the path is its
    own, and no tokens need be compared."""
    return any(
        len(table) and parts.tree.unit_at(sequence.node, low, group) == table[low - 1] != NO_UNIT
        for group, table in enumerate(sequence.tables)
    )


def _borrow(parts: Parts, group: int, sequence: Sequence, older: Int32Array) -> None:
    """Pins older copies, as far as the floor allows, so that what hangs below them stays
    reachable."""
    pool = parts.pools[group]
    if not len(older):
        return
    taken = np.cumsum(pool.fresh(older)) <= pool.spare
    chosen = older[taken]
    pool.pin(chosen)
    sequence.borrowed[group].append(chosen)


def release(parts: Parts, sequence: Sequence) -> None:
    """Unpins everything and gives the slot back: published blocks stay cached, the rest is free."""
    for group, pool in enumerate(parts.pools):
        own = [sequence.tables[group], *sequence.borrowed[group]]
        ids = np.concatenate(own)
        ids = ids[ids >= 0]
        pool.unpin(ids[np.argsort(-pool.depth[ids], kind="stable")])
    for units in (sequence.tail, *sequence.pending.values()):
        for group, unit in units.items():
            parts.pools[group].unpin(np.array([unit], dtype=np.int32))
    if sequence.slot is not None:
        parts.slots.give(sequence.slot)
        sequence.slot = None
