"""A stage cache with an executor that remembers what every unit holds: the oracle of the cache
tests.

A unit's content is the prefix whose state it holds: (namespace, tokens up to the end of the block
or snapshot). Spans read and write content as real attention, sliding and recurrent layers would,
and fail on anything that is not their own prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

from wavepp.cache.keys import encode_namespace, make_prompt
from wavepp.cache.store import StageCache
from wavepp.cache.types import (
    BringBack,
    CacheConfig,
    GroupSpec,
    LeaseVote,
    Materialized,
    Offload,
    Prompt,
    RestoreSnapshot,
    SnapshotOrders,
    ZeroSlot,
)
from wavepp.cache.windows import needed
from wavepp.units import RequestId

B = 4

Content = tuple[bytes, bytes] | None


def attention(units: int, host: int = 0, name: str = "attention") -> GroupSpec:
    return GroupSpec(name=name, kind="attention", units=units, host_units=host)


def sliding(units: int, window: int, host: int = 0) -> GroupSpec:
    return GroupSpec(name="sliding", kind="sliding", units=units, window=window, host_units=host)


def recurrent(units: int, host: int = 0, name: str = "recurrent") -> GroupSpec:
    return GroupSpec(name=name, kind="recurrent", units=units, host_units=host)


def tokens(first: int, count: int) -> list[int]:
    """`count` distinct tokens from `first` on."""
    return list(range(first, first + count))


class World:
    """One stage: the real cache, and what its memory holds."""

    def __init__(self, *groups: GroupSpec, slots: int = 4, block_size: int = B, **options) -> None:
        self.config = CacheConfig(
            block_size=block_size, groups=tuple(groups), slots=slots, **options
        )
        self.cache = StageCache(self.config)
        self.device = {g.name: [None] * g.units for g in groups}
        self.host = {g.name: [None] * g.host_units for g in groups}
        self.slots = {g.name: [None] * slots for g in groups if not g.paged}
        self.prompts: dict[str, Prompt] = {}
        self.position: dict[str, int] = {}

    def prompt(self, ids: Sequence[int], salt: str = "", **options) -> Prompt:
        return make_prompt(ids, self.config.block_size, namespace=encode_namespace(salt), **options)

    def hint(self, ids: Sequence[int], salt: str = "") -> int:
        prompt = self.prompt(ids, salt)
        return self.cache.hint(prompt).reuse.highest(prompt.reuse_cap)

    def claim(self, rid: str, prompt: Prompt, limit: int | None = None, **options) -> LeaseVote:
        self.prompts[rid] = prompt
        limit = prompt.reuse_cap if limit is None else limit
        return self.cache.claim(RequestId(rid), 1, prompt, limit, **options)

    def lease(self, rid: str, prompt: Prompt, limit: int) -> LeaseVote:
        self.prompts[rid] = prompt
        return self.cache.lease(RequestId(rid), 1, prompt, limit)

    def admit(self, rid: str, prompt: Prompt, limit: int | None = None) -> LeaseVote:
        """Claims, moves to where the lease got to, and undoes on a refusal."""
        vote = self.claim(rid, prompt, limit)
        if not vote.committed and vote.refusal is None:
            vote = self.cache.move(RequestId(rid), vote.attempt + 1, vote.endpoint)
        if vote.refusal is not None:
            self.cache.undo(RequestId(rid))
        return vote

    def materialize(self, rid: str) -> Materialized:
        done = self.cache.materialize(RequestId(rid))
        self.apply(done.effects)
        self.position[rid] = done.endpoint
        self.read(rid)
        return done

    def apply(self, effects: Sequence[object]) -> None:
        for effect in effects:
            match effect:
                case Offload(group=group, device=device, host=host):
                    values = [self.device[group][unit] for unit in device]
                    for unit, value in zip(host, values, strict=True):
                        self.host[group][unit] = value
                case BringBack(group=group, host=host, device=device):
                    values = [self.host[group][unit] for unit in host]
                    for unit, value in zip(device, values, strict=True):
                        self.device[group][unit] = value
                case RestoreSnapshot(group=group, snapshot=unit, slot=slot, from_host=from_host):
                    tier = self.host if from_host else self.device
                    self.slots[group][slot] = tier[group][unit]
                case ZeroSlot(group=group, slot=slot):
                    self.slots[group][slot] = "zero"
                case _:
                    raise TypeError(effect)

    def content(self, rid: str, upto: int) -> Content:
        prompt = self.prompts[rid]
        return prompt.namespace, prompt.raw[: 4 * upto]

    def read(self, rid: str) -> None:
        """What a span that starts here would read must be this request's own prefix."""
        start, size = self.position[rid], self.config.block_size
        sequence = self.cache.sequence(RequestId(rid))
        assert sequence is not None
        for spec in self.config.groups:
            if not spec.paged:
                state = self.slots[spec.name][sequence.slot]
                expected = self.content(rid, start) if start else "zero"
                assert state == expected, f"{rid}: {spec.name} state at {start}"
                continue
            low, _ = needed(spec, start // size, size)
            for block in range(low, -(-start // size)):
                held = self.device[spec.name][sequence.block_tables[spec.name][block]]
                upto = min((block + 1) * size, start)
                assert held == self.content(rid, upto), f"{rid}: {spec.name} block {block}"

    def execute(
        self, rid: str, length: int, snapshots: Sequence[int] = (), junctions: Sequence[int] = ()
    ) -> SnapshotOrders:
        """Runs one span and publishes it, as a stage would."""
        start, size = self.position[rid], self.config.block_size
        end = min(start + length, self.prompts[rid].num_tokens)
        inside = [position for position in snapshots if start < position <= end]
        orders = self.cache.snapshot_orders(RequestId(rid), inside, junctions=junctions)
        self.apply(orders.effects)
        self.read(rid)
        sequence = self.cache.sequence(RequestId(rid))
        assert sequence is not None
        for name, table in sequence.block_tables.items():
            for block in range(start // size, -(-end // size)):
                upto = min((block + 1) * size, end)
                self.device[name][table[block]] = self.content(rid, upto)
        for order in orders.orders:
            for name, unit in order.units.items():
                self.device[name][unit] = self.content(rid, order.position)
        for states in self.slots.values():
            states[sequence.slot] = self.content(rid, end)
        self.position[rid] = end
        self.cache.publish(RequestId(rid), end)
        for order in orders.orders:
            self.cache.snapshot_taken(RequestId(rid), order.position)
        return orders

    def finish(self, rid: str, snapshots: Sequence[int] | None = None) -> None:
        """Runs what is left in one span, with a tail snapshot, and frees."""
        prompt = self.prompts[rid]
        points = [prompt.tail] if snapshots is None else snapshots
        if self.position[rid] < prompt.num_tokens:
            self.execute(rid, prompt.num_tokens, points)
        self.cache.free(RequestId(rid))

    def run(
        self,
        rid: str,
        ids: Sequence[int],
        salt: str = "",
        snapshots: Sequence[int] | None = None,
        limit: int | None = None,
    ) -> int:
        """One request from its hint to its end. Returns the endpoint it reused."""
        prompt = self.prompt(ids, salt)
        vote = self.admit(rid, prompt, limit)
        assert vote.refusal is None, vote
        self.materialize(rid)
        self.finish(rid, snapshots)
        return vote.endpoint

    def verify_index(self) -> None:
        """Every cached unit holds the prefix its key stands for (no key names an overwritten
        block)."""
        for node in self.cache._parts.tree.nodes.values():
            root, path = node, []
            while root.parent is not None:
                path.append(root.raw)
                root = root.parent
            raw = b"".join(reversed(path))
            names = {id(value): key for key, value in self.cache._parts.tree.roots.items()}
            for group, pool in enumerate(self.cache._parts.pools):
                for offset, unit in enumerate(node.places[group].tolist()):
                    if unit < 0:
                        continue
                    upto = 4 * self.config.block_size * (node.start + offset + 1)
                    name = pool.spec.name
                    on_host = unit >= pool.units
                    held = (
                        self.host[name][unit - pool.units] if on_host else self.device[name][unit]
                    )
                    assert held == (names[id(root)], raw[:upto]), (name, unit)

    def check(self) -> None:
        self.cache.check()
        self.verify_index()
