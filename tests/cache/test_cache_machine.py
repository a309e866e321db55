"""Random histories of a stage cache, against what its memory really holds and with all sums
proved after each step."""

from __future__ import annotations

import copy

from cache_world import World, attention, recurrent, sliding
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from wavepp.cache.lease import Foresight
from wavepp.cache.types import LeaseVote, Prompt
from wavepp.units import RequestId

SHARED = [[7] * 40, [7] * 8 + [8] * 32, [9] * 40]


class StageCacheMachine(RuleBasedStateMachine):
    """Requests in every state over tiny pools: claims, moves, aborts, spans, resets, in any
    order."""

    groups = (attention(12),)
    caching = True

    @initialize(headroom=st.sampled_from([0, 0, 8]), most=st.sampled_from([2, 8]))
    def build(self, headroom: int, most: int) -> None:
        self.world = World(
            *self.groups,
            slots=3,
            headroom_tokens=headroom,
            max_snapshots_per_path=most,
            enable_prefix_caching=self.caching,
        )
        self.count = 0
        self.foreseen: list[tuple[Prompt, int, Foresight | None]] = []
        self.claimed: list[str] = []
        self.committed: list[str] = []
        self.running: list[str] = []

    def _pick(self, names: list[str], index: int) -> str | None:
        return names[index % len(names)] if names else None

    @rule(
        base=st.sampled_from(SHARED),
        shared=st.sampled_from([0, 4, 8, 8, 9, 12, 12, 16, 17, 21, 33]),
        own=st.sampled_from([1, 1, 2, 4, 5, 9]),
        cut=st.integers(0, 10),
        salt=st.sampled_from(["", "", "", "", "a"]),
        token=st.integers(1, 2),
    )
    def arrive(self, base, shared: int, own: int, cut: int, salt: str, token: int) -> None:
        ids = base[:shared] + [token] * own
        self.count += 1
        rid = f"r{self.count}"
        prompt = self.world.prompt(ids, salt)
        if self.world.cache.fits(prompt) is not None:
            return
        # The candidate: the hint, less (another stage has less), or more (the hint is stale).
        limit = max(0, self.world.hint(ids, salt) // 4 - max(0, cut - 8)) * 4
        if cut < 2:
            limit = prompt.reuse_cap
        self._claim(rid, prompt, limit, None)

    @rule(base=st.sampled_from(SHARED), shared=st.sampled_from([4, 8, 12, 17]), less=st.booleans())
    def foresee(self, base, shared: int, less: bool) -> None:
        """A walk whose claim comes later, when the tree may be another one."""
        prompt = self.world.prompt([*base[:shared], 1, 2])
        if self.world.cache.fits(prompt) is None:
            limit = max(0, prompt.reuse_cap - 4 * less)
            self.foreseen.append((prompt, limit, self.world.cache.foresee(prompt, limit)))

    @rule(index=st.integers(0, 99))
    def claim_foreseen(self, index: int) -> None:
        """Foreseen or not, the claim is the same."""
        if not self.foreseen:
            return
        prompt, limit, foresight = self.foreseen.pop(index % len(self.foreseen))
        self.count += 1
        rid = f"r{self.count}"
        twin = copy.deepcopy(self.world.cache)
        expected = twin.claim(RequestId(rid), 1, prompt, limit)
        assert self._claim(rid, prompt, limit, foresight) == expected
        if rid in self.claimed + self.committed:
            pins = [pool.pins.tolist() for pool in self.world.cache._parts.pools]
            assert pins == [pool.pins.tolist() for pool in twin._parts.pools]

    def _claim(
        self, rid: str, prompt: Prompt, limit: int, foresight: Foresight | None
    ) -> LeaseVote:
        before = self.world.cache.stats()
        vote = self.world.claim(rid, prompt, limit, foresight=foresight)
        assert vote.endpoint <= limit
        assert vote.reuse.usable(vote.endpoint)
        if vote.refusal is not None:
            self.world.cache.undo(RequestId(rid))
            assert self.world.cache.stats().groups == before.groups
        elif vote.committed:
            self.committed.append(rid)
        else:
            self.claimed.append(rid)
        return vote

    @rule(index=st.integers(0, 99), down=st.integers(0, 3), both=st.booleans())
    def move(self, index: int, down: int, both: bool) -> None:
        rid = self._pick(self.claimed + (self.committed if both else []), index)
        if rid is None:
            return
        lease = self.world.cache._holdings[RequestId(rid)].lease
        before = lease.endpoint * 4
        limit = max(0, before - down * 4)
        vote = self.world.cache.move(RequestId(rid), lease.attempt + 1, limit)
        if vote.refusal is not None:
            assert vote.endpoint == before
            return
        assert vote.committed
        assert vote.endpoint == vote.reuse.highest(limit)
        if rid in self.claimed:
            self.claimed.remove(rid)
            self.committed.append(rid)

    @rule(index=st.integers(0, 99))
    def materialize(self, index: int) -> None:
        rid = self._pick(self.committed, index)
        if rid is not None:
            self.committed.remove(rid)
            self.running.append(rid)
            self.world.materialize(rid)

    @rule(index=st.integers(0, 99), length=st.integers(1, 20), every=st.sampled_from([4, 8, 100]))
    def execute(self, index: int, length: int, every: int) -> None:
        rid = self._pick(self.running, index)
        if rid is None:
            return
        prompt = self.world.prompts[rid]
        points = {prompt.tail, *range(every, prompt.num_tokens, every)}
        if self.world.position[rid] < prompt.num_tokens:
            junctions = [every] if length % 2 else []
            self.world.execute(rid, length, sorted(points), junctions)
        if self.world.position[rid] == prompt.num_tokens:
            self.running.remove(rid)
            self.world.cache.free(RequestId(rid))

    @rule(count=st.integers(1, 3))
    def serve(self, count: int) -> None:
        """Brings the oldest requests to their end."""
        for rid in (self.running + self.committed)[:count]:
            if rid in self.committed:
                self.committed.remove(rid)
                self.world.materialize(rid)
            else:
                self.running.remove(rid)
            self.world.finish(rid)

    @rule(index=st.integers(0, 99))
    def abort(self, index: int) -> None:
        rid = self._pick(self.claimed + self.committed + self.running, index)
        if rid is None:
            return
        self.world.cache.free(RequestId(rid))
        self.world.cache.free(RequestId(rid))
        for names in (self.claimed, self.committed, self.running):
            if rid in names:
                names.remove(rid)

    @rule(really=st.integers(0, 9))
    def reset(self, really: int) -> None:
        if really == 0:
            self.world.cache.reset()

    @invariant()
    def all_sums_hold(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for rid in list(self.world.cache.held()):
            self.world.cache.free(rid)
        self.world.check()
        for group in self.world.cache.stats().groups:
            assert group.free + group.cached == group.units
            assert group.reserved == 0


class HostMachine(StageCacheMachine):
    groups = (attention(10, host=5),)


class HybridMachine(StageCacheMachine):
    groups = (attention(12, host=3), recurrent(4, host=2))


class RecurrentMachine(StageCacheMachine):
    groups = (recurrent(3),)


class SlidingMachine(StageCacheMachine):
    groups = (sliding(12, window=6, host=3), attention(14), recurrent(3))


class NoCachingMachine(StageCacheMachine):
    groups = (attention(12), recurrent(2))
    caching = False


SETTINGS = settings(max_examples=40, stateful_step_count=40, deadline=None)
for machine in (
    StageCacheMachine,
    HostMachine,
    HybridMachine,
    RecurrentMachine,
    SlidingMachine,
    NoCachingMachine,
):
    machine.TestCase.settings = SETTINGS
TestPlain = StageCacheMachine.TestCase
TestHost = HostMachine.TestCase
TestHybrid = HybridMachine.TestCase
TestRecurrent = RecurrentMachine.TestCase
TestSliding = SlidingMachine.TestCase
TestNoCaching = NoCachingMachine.TestCase
