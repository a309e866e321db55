"""StageCache against a small independent model: equal endpoints, refusals, numbers and evictions,
step by step.

The model knows one attention group without a host tier, and names a block by its whole prefix. It
keeps no tree, no arrays and no eviction queue: an ordered list of prefixes, a counter of pins,
and dictionaries.
"""

from __future__ import annotations

from collections import Counter

from cache_world import B, World, attention
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from wavepp.units import RequestId

Path = tuple[int, ...]


class Model:
    """What one attention cache should do."""

    def __init__(self, units: int, headroom: int) -> None:
        self.free = units
        self.headroom = min(-(-headroom // B), units // 4)
        self.cached: list[Path] = []  # least recently used first
        self.pins: Counter[Path] = Counter()
        self.lease: dict[str, list[Path]] = {}
        self.room: dict[str, list[Path | None]] = {}  # None: a free unit
        self.need: dict[str, int] = {}
        self.own: dict[str, int] = {}  # units of a sequence that are not in the tree
        self.used: dict[str, list[Path]] = {}

    def reclaimable(self) -> list[Path]:
        taken = {path for room in self.room.values() for path in room}
        return [path for path in self.cached if not self.pins[path] and path not in taken]

    def spare(self) -> int:
        idle = sum(not self.pins[path] for path in self.cached)
        return self.free + idle - sum(map(len, self.room.values()))

    def do_lease(self, rid: str, blocks: list[Path], limit: int) -> int:
        spare, kept = self.spare(), []
        for path in blocks[:limit]:
            spare -= not self.pins[path]
            if path not in self.cached or spare < 0:
                break
            kept.append(path)
        self.pins.update(kept)
        self.lease[rid] = kept
        return len(kept)

    def gather(self, count: int) -> list[Path | None]:
        promised = sum(path is None for room in self.room.values() for path in room)
        from_free = min(count, self.free - promised)
        return [None] * from_free + self.reclaimable()[: count - from_free]

    def do_prepare(self, rid: str, total: int) -> bool:
        need = total - len(self.lease[rid])
        if need + self.headroom > self.spare():
            return False
        self.need[rid] = total
        self.room[rid] = self.gather(need)
        return True

    def do_commit(self, rid: str) -> int:
        claimed = [path for path in self.room[rid] if path is not None and self.pins[path]]
        self.room[rid] = [path for path in self.room[rid] if path not in claimed]
        self.room[rid] += self.gather(len(claimed))
        return len(claimed)

    def do_materialize(self, rid: str) -> None:
        need = len(self.room[rid])
        promised = sum(
            path is None for other, room in self.room.items() for path in room if other != rid
        )
        from_free = min(need, self.free - promised)
        own = [path for path in self.room.pop(rid) if path is not None and not self.pins[path]]
        for path in (own + self.reclaimable())[: need - from_free]:
            self.cached.remove(path)
        self.free -= from_free
        self.own[rid] = need
        self.used[rid] = self.lease.pop(rid)

    def do_publish(self, rid: str, blocks: list[Path]) -> None:
        for path in blocks[len(self.used[rid]) :]:
            if path not in self.cached:
                self.cached.append(path)
                self.own[rid] -= 1
            elif not self.pins[path] and self.spare() < 1:
                break
            self.pins[path] += 1
            self.used[rid].append(path)

    def do_release(self, rid: str) -> None:
        self.room.pop(rid, None)
        self.free += self.own.pop(rid, 0)
        paths = self.lease.pop(rid, []) + self.used.pop(rid, [])
        self.pins.subtract(paths)
        idle = [path for path in sorted(paths, key=len, reverse=True) if not self.pins[path]]
        self.cached = [path for path in self.cached if path not in idle] + idle


class ReferenceMachine(RuleBasedStateMachine):
    """Runs both and compares everything that can be seen."""

    @initialize(units=st.sampled_from([8, 12, 16]), headroom=st.sampled_from([0, 0, 8]))
    def build(self, units: int, headroom: int) -> None:
        self.world = World(attention(units), slots=99, headroom_tokens=headroom)
        self.model = Model(units, headroom)
        self.requests: dict[str, str] = {}  # request -> leased, held, running
        self.count = 0

    def _blocks(self, rid: str) -> list[Path]:
        ids = self.world.prompts[rid].tokens.tolist()
        return [tuple(ids[: (i + 1) * B]) for i in range(len(ids) // B)]

    def _choose(self, state: str, index: int) -> str | None:
        names = [rid for rid, at in self.requests.items() if at == state]
        return names[index % len(names)] if names else None

    def _compare(self) -> None:
        group = self.world.cache.stats().groups[0]
        assert group.free == self.model.free
        assert group.cached == len(self.model.cached)
        pool = self.world.cache._parts.pools[0]
        assert pool.spare == self.model.spare()
        names = {}
        for node in self.world.cache._parts.tree.nodes.values():
            upper, raw = node, b""
            while upper.parent is not None:
                raw, upper = upper.raw + raw, upper.parent
            for offset, unit in enumerate(node.places[0].tolist()):
                ids = memoryview(raw).cast("i")[: (node.start + offset + 1) * B]
                names[unit] = tuple(ids.tolist())
        order = [names[unit] for unit in pool.order.listed().tolist()]
        assert order == self.model.reclaimable()
        self.world.check()

    @rule(
        base=st.integers(0, 1),
        shared=st.sampled_from([0, 1, 2, 3, 4, 6]),
        own=st.sampled_from([1, 3, 4, 5, 8]),
        token=st.integers(2, 3),
        below=st.sampled_from([0, 0, 0, 1, 2]),
    )
    def arrive(self, base: int, shared: int, own: int, token: int, below: int) -> None:
        self.count += 1
        rid = f"r{self.count}"
        prompt = self.world.prompt([base] * (shared * B) + [token] * own)
        if self.world.cache.fits(prompt) is not None:
            return
        limit = max(0, prompt.reuse_cap - below * B)
        self.world.prompts[rid] = prompt
        vote = self.world.cache.lease(RequestId(rid), 1, prompt, limit)
        assert vote.endpoint == B * self.model.do_lease(rid, self._blocks(rid), limit // B)
        outcome = self.world.cache.prepare(RequestId(rid))
        accepted = self.model.do_prepare(rid, prompt.blocks_total)
        assert accepted == (outcome.refusal is None)
        if accepted:
            self.requests[rid] = "held"
        else:
            self.world.cache.undo(RequestId(rid))
            self.model.do_release(rid)
        self._compare()

    @rule(index=st.integers(0, 9), now=st.booleans())
    def commit(self, index: int, now: bool) -> None:
        rid = self._choose("held", index)
        if rid is None:
            return
        endpoint = len(self.model.lease[rid]) * B
        outcome = self.world.cache.commit(RequestId(rid), endpoint)
        assert outcome.committed
        assert outcome.substituted == self.model.do_commit(rid)
        self._compare()
        if now:
            self.world.materialize(rid)
            self.model.do_materialize(rid)
            self.requests[rid] = "running"
            self._compare()

    @rule(index=st.integers(0, 9), length=st.sampled_from([3, 4, 9, 40]))
    def execute(self, index: int, length: int) -> None:
        rid = self._choose("running", index)
        if rid is None:
            return
        if self.world.position[rid] < self.world.prompts[rid].num_tokens:
            self.world.execute(rid, length)
            self.model.do_publish(rid, self._blocks(rid)[: self.world.position[rid] // B])
            self._compare()
        if self.world.position[rid] == self.world.prompts[rid].num_tokens:
            self._end(rid)

    @rule(index=st.integers(0, 9), state=st.sampled_from(["held", "running"]))
    def abort(self, index: int, state: str) -> None:
        rid = self._choose(state, index)
        if rid is not None:
            self._end(rid)

    def _end(self, rid: str) -> None:
        self.world.cache.free(RequestId(rid))
        self.model.do_release(rid)
        del self.requests[rid]
        self._compare()


ReferenceMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None
)
TestReference = ReferenceMachine.TestCase
