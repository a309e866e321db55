"""Long seeded histories, denser than Hypothesis draws them: pools run full, victims are hit,
hosts overflow."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from cache_world import World, attention, recurrent, sliding

from wavepp.units import RequestId

KINDS = {
    "attention": (attention(24),),
    "attention_host": (attention(20, host=12),),
    "hybrid": (attention(24), recurrent(6)),
    "hybrid_host": (attention(20, host=10), recurrent(4, host=4)),
    "recurrent": (recurrent(5),),
    "sliding_host": (sliding(22, window=7, host=8), attention(24, host=6), recurrent(5)),
}


class History:
    """One seeded history. `waiting` holds a lease and an escrow, `running` a sequence."""

    def __init__(self, kind: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = World(
            *KINDS[kind],
            slots=5,
            headroom_tokens=self.rng.choice([0, 0, 8, 16]),
            max_snapshots_per_path=self.rng.choice([2, 3, 8]),
        )
        self.bases = [[self.rng.randrange(3) for _ in range(48)] for _ in range(3)]
        self.waiting: list[str] = []
        self.running: list[str] = []
        self.seen: Counter[str] = Counter()

    def step(self, number: int) -> None:
        actions = [
            (self.arrive, 8),
            (self.move, 2),
            (self.start, 6),
            (self.execute, 9),
            (self.abort, 1),
            (self.trim, 1),
        ]
        names, weights = zip(*actions, strict=True)
        action = self.rng.choices(names, weights)[0]
        action(f"r{number}")
        if self.rng.random() < 0.01:
            self.world.cache.reset()

    def arrive(self, rid: str) -> None:
        rng, world = self.rng, self.world
        ids = rng.choice(self.bases)[: rng.randrange(1, 40)]
        ids = ids + [rng.randrange(3) for _ in range(rng.choice([1, 1, 3, 6]))]
        salt = rng.choice(["", "", "", "s"])
        prompt = world.prompt(ids, salt, room_tokens=rng.choice([0, 0, 3, 9]))
        hint = world.cache.hint(prompt).reuse.highest(prompt.reuse_cap)
        limit = rng.choice([hint, hint, prompt.reuse_cap, max(0, hint - 4)])
        oversized = rng.random() < 0.2
        before = world.cache.stats().groups
        vote = world.claim(rid, prompt, limit, oversized=oversized)
        assert vote.endpoint <= limit
        assert vote.reuse.usable(vote.endpoint)
        self.seen["hit"] += vote.endpoint > 0
        if vote.refusal is None:
            self.waiting.append(rid)
            self.seen["claimed"] += 1
            return
        self.seen["refused"] += 1
        world.cache.undo(RequestId(rid))
        assert world.cache.stats().groups == before

    def trim(self, rid: str) -> None:
        rng, world = self.rng, self.world
        prompt = world.prompt(rng.choice(self.bases)[: rng.randrange(5, 40)])
        world.prompts[rid] = prompt
        vote = world.cache.lease(RequestId(rid), 1, prompt, prompt.reuse_cap)
        limit = max(0, vote.endpoint - 4 * rng.randrange(4))
        trimmed = world.cache.trim(RequestId(rid), limit)
        assert trimmed.endpoint <= limit
        world.check()
        world.cache.release_lease(RequestId(rid))

    def move(self, _: str) -> None:
        if not self.waiting:
            return
        rid = self.rng.choice(self.waiting)
        lease = self.world.cache._holdings[RequestId(rid)].lease
        before = lease.endpoint * 4
        limit = max(0, before - 4 * self.rng.randrange(4))
        vote = self.world.cache.move(RequestId(rid), lease.attempt + 1, limit)
        if vote.refusal is not None:
            assert vote.endpoint == before
            self.seen["move_refused"] += 1
        else:
            assert vote.committed
            assert vote.endpoint == vote.reuse.highest(limit)
            self.seen["moved"] += vote.endpoint < before

    def start(self, _: str) -> None:
        for rid in self.waiting[: self.rng.randrange(1, 3)]:
            holding = self.world.cache._holdings[RequestId(rid)]
            if not holding.escrow.committed:
                continue
            self.waiting.remove(rid)
            self.running.append(rid)
            self.world.materialize(rid)

    def execute(self, _: str) -> None:
        for rid in list(self.running[:2]):
            prompt = self.world.prompts[rid]
            every = self.rng.choice([4, 8, 12])
            points = sorted({prompt.tail, *range(every, prompt.num_tokens, every)})
            length = self.rng.choice([3, 8, 20, 60])
            if self.world.position[rid] < prompt.num_tokens:
                self.world.execute(rid, length, points, [every] * (every == 12))
            if self.world.position[rid] == prompt.num_tokens:
                self.running.remove(rid)
                self.world.cache.free(RequestId(rid))
                self.seen["done"] += 1

    def abort(self, _: str) -> None:
        names = self.rng.choice([self.waiting, self.running])
        if names:
            rid = names.pop(self.rng.randrange(len(names)))
            self.world.cache.free(RequestId(rid))

    def drain(self) -> None:
        for rid in self.world.cache.held():
            self.world.cache.free(rid)
        self.world.check()
        stats = self.world.cache.stats()
        assert (stats.leases, stats.escrows, stats.sequences) == (0, 0, 0)
        assert stats.slots_free == 5
        for group in stats.groups:
            assert group.free + group.cached == group.units
            assert group.reclaimable == group.cached
            assert group.reserved == 0
            assert group.host_free + group.host_cached == group.host_units


def play(kind: str, seed: int, steps: int) -> History:
    history = History(kind, seed)
    for number in range(steps):
        history.step(number)
        history.world.check()
    history.drain()
    return history


@pytest.mark.parametrize("kind", KINDS)
def test_histories_keep_every_sum_and_every_content(kind: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(12):
        history = play(kind, seed, 150)
        seen.update(history.seen)
        stats = history.world.cache.stats()
        seen.update({"evicted": stats.evicted, "substituted": stats.substituted})
        seen.update({"offloaded": stats.offloaded, "brought_back": stats.brought_back})
        seen.update({"thinned": stats.snapshots_thinned, "skipped": stats.snapshots_skipped})
    # The histories are worth their time only if they reach the rare cases.
    expected = {"done", "hit", "moved", "refused", "evicted"}
    if kind.startswith("attention"):
        expected.add("substituted")
    if kind in ("attention_host", "hybrid_host"):
        expected |= {"offloaded", "brought_back"}
    if "recurrent" in kind or "hybrid" in kind:
        expected |= {"thinned", "skipped"}
    assert {name for name in expected if not seen[name]} == set(), seen
