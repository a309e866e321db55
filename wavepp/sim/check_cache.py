"""Checkers of what a stage holds: no gap, conservation, real escrows, order, contents.

Own nothing; see `watch`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from wavepp.cache.blocks import BlockPool
from wavepp.cache.store import _Holding
from wavepp.cache.tree import Node
from wavepp.cache.types import Int32Array, LeaseVote, Materialized
from wavepp.sim.check_admission import blocks_needed
from wavepp.sim.stage import SimStage
from wavepp.sim.violation import Violation
from wavepp.sim.watch import Checker, tap
from wavepp.sim.world import World
from wavepp.units import RequestId


class NoGap(Checker):
    """3: what a lease covers is there and pinned, evictable by nobody, until its sequence owns it;
    an admitted request always holds something."""

    name = "3 no gap"

    def held(self, stage: SimStage) -> None:
        control = stage.control
        cache = control.cache
        size = cache.config.block_size
        for request_id, holding in cache._holdings.items():
            lease = holding.lease
            if lease is None or lease.endpoint == 0:
                continue
            places = cache._parts.tree.path(lease.node, lease.endpoint)
            for group, pool in enumerate(cache._parts.pools):
                need = blocks_needed(pool.spec, lease.endpoint, size)
                ids = places[group, need.start : need.stop]
                safe = (ids >= 0).all() and (pool.pins[ids] > 0).all()
                self.require(bool(safe), f"stage {stage.index}: {request_id} lacks a pin", ids)
        for key in control.sequences._sequences:
            self.require(
                key.request_id in cache._holdings, f"stage {stage.index} dropped an admitted", key
            )


class Conservation(Checker):
    """4: free + resident = total on device and host; counts = tree + leases + escrows + sequences;
    slots are one request's each."""

    name = "4 conservation"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._holds = 0

    def held(self, stage: SimStage) -> None:
        cache = stage.control.cache
        slots = [
            holding.sequence.slot
            for holding in cache._holdings.values()
            if holding.sequence is not None and holding.sequence.slot is not None
        ]
        self.require(len(set(slots)) == len(slots), f"stage {stage.index} shares a slot:", slots)
        self._holds += 1
        if self._holds % self.world.options.audit_every == 0:
            self._recount(stage)

    def ended(self) -> None:
        for stage in self.world.stages:
            self._recount(stage)

    def _recount(self, stage: SimStage) -> None:
        parts = stage.control.cache._parts
        for group, pool in enumerate(parts.pools):
            resident = _resident(list(parts.tree.roots.values()), group)
            self.require(len(set(resident)) == len(resident), "a unit is in two places")
            device = [unit for unit in resident if unit < pool.units]
            private = np.flatnonzero((pool.owner[: pool.units] < 0) & (pool.pins[: pool.units] > 0))
            total = pool.free + len(device) + len(private)
            self.require(
                total == pool.units,
                f"stage {stage.index} {pool.spec.name}: {total} of {pool.units} units found",
            )
        try:
            stage.control.cache.check()
        except AssertionError as error:
            raise Violation(self.name, f"stage {stage.index}: {error}") from error


def _resident(nodes: list[Node], group: int) -> list[int]:
    found: list[int] = []
    while nodes:
        node = nodes.pop()
        places = node.places[group]
        found.extend(places[places >= 0].tolist())
        nodes.extend(node.children.values())
    return found


class EscrowIsReal(Checker):
    """5: promises never exceed what there is, so a committed request always materialises."""

    name = "5 escrow"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        for stage in world.stages:
            self._guard(stage)

    def _guard(self, stage: SimStage) -> None:
        cache = stage.control.cache
        materialize = cache.materialize

        def guarded(request_id: RequestId) -> Materialized:
            try:
                return materialize(request_id)
            except AssertionError as error:
                message = f"stage {stage.index} can't materialise {request_id}: {error}"
                raise Violation(self.name, message) from error

        setattr(cache, "materialize", guarded)  # noqa: B010 (an outside observer)

        tap(cache, "claim", after=partial(self._claimed, stage))

    def _claimed(
        self, stage: SimStage, vote: LeaseVote, request_id: RequestId, *rest: object
    ) -> None:
        """A victim that could have a place on the host has one, reserved before it."""
        cache = stage.control.cache
        escrow = cache._holdings[request_id].escrow
        for group, pool in enumerate(cache._parts.pools):
            holds = escrow.holds if escrow is not None else []
            homeless = bool((holds[group].destinations < 0).any()) if holds else False
            self.require(
                not homeless or not (pool.host_free or len(pool.host_order)),
                f"stage {stage.index} {pool.spec.name}: a victim of {request_id} has no place",
            )

    def held(self, stage: SimStage) -> None:
        for pool in stage.control.cache._parts.pools:
            self.require(
                pool.promised <= pool.available,
                f"stage {stage.index} {pool.spec.name}: {pool.promised} promised of",
                pool.available,
            )
        slots = stage.control.cache._parts.slots
        self.require(slots.spare >= 0, f"stage {stage.index} promised more slots than it has")


class ReleaseOrder(Checker):
    """6: an escrow is released before its lease; when a lease falls, the new is acquired before the
    old is released."""

    name = "6 order"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        for stage in world.stages:
            self._tap(stage)

    def _tap(self, stage: SimStage) -> None:
        cache = stage.control.cache
        inside: list[tuple[str, RequestId, _Holding]] = []

        def enter(what: str) -> Callable[..., None]:
            def note(request_id: RequestId, *rest: object) -> None:
                holding = cache._holdings.get(request_id)
                if holding is not None:
                    inside.append((what, request_id, holding))

            return note

        def leave(result: object, request_id: RequestId, *rest: object) -> None:
            if inside and inside[-1][1] == request_id:
                inside.pop()

        for what in ("materialize", "undo", "move"):
            tap(cache, what, before=enter(what), after=leave)
        for group, pool in enumerate(cache._parts.pools):
            tap(pool, "unpin", before=self._unpinning(stage, pool, group, inside))

    def _unpinning(
        self,
        stage: SimStage,
        pool: BlockPool,
        group: int,
        inside: list[tuple[str, RequestId, _Holding]],
    ) -> Callable[..., None]:
        size = stage.control.cache.config.block_size

        def look(ids: Int32Array) -> None:
            if not inside or not len(ids):
                return
            what, request_id, holding = inside[-1]
            lease, escrow = holding.lease, holding.escrow
            if what != "move":
                self.require(
                    escrow is None or not escrow.holds,
                    f"stage {stage.index}: {what} of {request_id} unpins before its escrow goes",
                )
                return
            if lease is None or escrow is None:
                return
            row = stage.control.cache._parts.tree.path(lease.node, lease.endpoint)[group]
            kept = blocks_needed(pool.spec, lease.endpoint, size)
            if not set(ids.tolist()) & set(row[kept.start : kept.stop].tolist()):
                return  # what had been acquired anew is given back: the move was refused
            target = blocks_needed(pool.spec, escrow.endpoint, size)
            new = row[target.start : target.stop]
            ready = escrow.endpoint < lease.endpoint and bool((pool.pins[new] > 0).all())
            self.require(
                ready, f"stage {stage.index}: {request_id} let go before it had the lower endpoint"
            )

        return look


class Contents(Checker):
    """3, of state: what a stage offers for reuse was computed here, from the moment it is offered;
    an index has no key whose block holds something else."""

    name = "3 contents"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        for stage in world.stages:
            cache = stage.control.cache
            tap(cache, "publish", before=partial(self._publishing, stage))
            tap(cache, "snapshot_taken", before=partial(self._taken, stage))

    def _publishing(self, stage: SimStage, request_id: RequestId, upto: int) -> None:
        cache = stage.control.cache
        sequence = cache._holdings[request_id].sequence
        assert sequence is not None, request_id
        blocks = min(upto, sequence.prompt.num_tokens) // cache.config.block_size
        expected = self.world.texts[request_id].blocks(blocks * cache.config.block_size)
        for spec, table in zip(cache.config.groups, sequence.tables, strict=True):
            content = stage.device.units[spec.name]
            if not spec.paged:
                continue
            for block in range(sequence.published, blocks):
                self.require(
                    content[int(table[block])] == expected[block],
                    f"stage {stage.index} offers block {block} of {request_id} too early",
                )

    def _taken(self, stage: SimStage, request_id: RequestId, position: int) -> None:
        cache = stage.control.cache
        sequence = cache._holdings[request_id].sequence
        assert sequence is not None, request_id
        digest = self.world.texts[request_id].digest(position)
        for group, unit in sequence.pending[position].items():
            name = cache.config.groups[group].name
            self.require(
                stage.device.units[name][unit] == digest,
                f"stage {stage.index} offers a snapshot of {request_id} at {position} too early",
            )
