"""A pipeline in memory: the real leader, stage machines, caches and logs, under a virtual clock.

Rounds and waves travel on links with random delays; answers reach the leader one stage at a time,
in any order, some of them twice. A wave is: materialise, read, write, publish (see `device`). One
seed makes one run.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from device import Device
from stage_node import Node, Wave

from wavepp.cache.keys import encode_namespace, make_prompt
from wavepp.cache.store import StageCache
from wavepp.cache.types import CacheConfig, GroupSpec, Prompt
from wavepp.control.log import AppliedLog, DecisionLog
from wavepp.protocol.books import LeaderOptions
from wavepp.protocol.capacity import smallest_capacity
from wavepp.protocol.facts import (
    AttemptFailed,
    LeaderEffect,
    LeaderFact,
    Refused,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestServed,
    SpanPlanned,
    StageAnswered,
    StageCounted,
    WaveReturned,
)
from wavepp.protocol.leader import LeaderMachine
from wavepp.protocol.messages import (
    Admit,
    Decision,
    LogEntry,
    SpanPlan,
)
from wavepp.protocol.stage import StageMachine
from wavepp.protocol.states import Phase
from wavepp.protocol.votes import RoundAnswer, RoundAsk
from wavepp.units import LogNumber, RequestId, StageIndex, WaveNumber

BLOCK = 4
EVENTS_MAX = 200_000


def attention(units: int, name: str = "attn", host: int = 0) -> GroupSpec:
    """An attention window with so many blocks."""
    return GroupSpec(name=name, kind="attention", units=units, host_units=host)


def recurrent(units: int, name: str = "state") -> GroupSpec:
    """A recurrent window with so many snapshots."""
    return GroupSpec(name=name, kind="recurrent", units=units)


def config(
    *groups: GroupSpec, slots: int = 8, headroom: int = 0, block: int = BLOCK, **options: Any
) -> CacheConfig:
    """One stage's cache; `headroom` in tokens (2PM)."""
    return CacheConfig(
        block_size=block, groups=groups, slots=slots, headroom_tokens=headroom, **options
    )


class Cluster:
    """Leader and stages. `submit`, `abort`, then `run`."""

    def __init__(
        self,
        configs: Sequence[CacheConfig],
        *,
        seed: int = 0,
        wave_tokens: int = 16,
        ring_depth: int = 4,
        delay_s: float = 0.005,
        duplicate: float = 0.0,
        fail: float = 0.0,
        work_wanted: int | None = None,
        lanes_max: int = 4,
        refuse_on_arrival: bool = True,
        **options: Any,
    ) -> None:
        self.block = configs[0].block_size
        self.refuse_on_arrival = refuse_on_arrival
        self.before_claims: Callable[[], None] | None = None  # once, between hints and claims
        self.random = random.Random(seed)
        self.wave_tokens, self.ring_depth, self.delay_s = wave_tokens, ring_depth, delay_s
        self.duplicate, self.fail, self.work_wanted = duplicate, fail, work_wanted
        capacity = smallest_capacity(
            [cache.groups for cache in configs],
            block_size=self.block,
            headroom_tokens=configs[0].headroom_tokens,
        )
        self.capacity = capacity
        self.leader = LeaderMachine(
            LeaderOptions(
                num_stages=len(configs),
                block_size=self.block,
                lanes_max=lanes_max,
                oversized_over=capacity.oversized_over,
                **options,
            )
        )
        self.log = DecisionLog(len(configs))
        self.nodes = [self._node(StageIndex(i), cache) for i, cache in enumerate(configs)]
        self.now = 0.0
        self.outcomes: dict[str, str] = {}
        self.refusals: dict[str, Refused] = {}
        self.admissions: list[tuple[str, int]] = []  # name, endpoint; in the order admitted
        self.arrived: list[str] = []
        self.decisions: list[Decision] = []
        self.rounds = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._prompts: dict[RequestId, Prompt] = {}
        self._produced: dict[RequestId, int] = {}
        self._awaited: set[int] = set()
        self._ring: dict[WaveNumber, Wave] = {}
        self._back: set[WaveNumber] = set()
        self._waves = WaveNumber(0)
        self._events = 0

    def _node(self, stage: StageIndex, cache_config: CacheConfig) -> Node:
        cache = StageCache(cache_config)
        return Node(StageMachine(stage, cache), cache, AppliedLog(stage), Device(cache))

    # -- the user --------------------------------------------------------------------------------

    def submit(
        self,
        name: str,
        tokens: Sequence[int],
        *,
        salt: str = "",
        at: float = 0.0,
        max_tokens: int = 1,
    ) -> None:
        """A request arrives; one that fits no empty pool is refused then and there (B1)."""
        namespace = encode_namespace(salt)
        room = max(max_tokens - 1, 0)
        prompt = make_prompt(tokens, self.block, namespace=namespace, room_tokens=room)
        self.at(at, lambda: self._arrive(RequestId(name), prompt))

    def abort(self, name: str, *, at: float = 0.0) -> None:
        """Somebody gives up, in whatever state it is."""
        self.at(at, lambda: self._abort(RequestId(name)))

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Runs an action at a time (now, if that is later)."""
        self._events += 1
        heapq.heappush(self._heap, (max(when, self.now), self._events, action))

    def run(self, until: float | None = None) -> None:
        """Runs until nothing is left to happen (or until a time)."""
        for _ in range(EVENTS_MAX):
            if not self._heap or (until is not None and self._heap[0][0] > until):
                break
            self.step()
        else:
            raise AssertionError(f"{EVENTS_MAX} events and no end: {self.stories()}")
        if until is not None:
            self.now = max(self.now, until)

    def step(self) -> None:
        """The next event, and the driver's turn after it."""
        self.now, _, action = heapq.heappop(self._heap)
        action()
        self._turn()
        self.leader.check()
        for node in self.nodes:
            node.machine.check()

    def finish(self) -> None:
        """Runs to the end, and asserts that everybody got an answer and nothing is left."""
        self.run()
        assert set(self.outcomes) == set(self.arrived), self.stories()
        self.conserve()

    def conserve(self) -> None:
        """Free + cached = pool on every stage; no pin, lease, escrow, lane, fence; logs equal."""
        self.leader.check()
        assert self.leader.books.gate.is_idle
        assert not self.leader.books.records
        for node in self.nodes:
            node.machine.check()
            node.cache.check()
            assert node.machine.is_idle
            assert node.cache.held() == ()
            stats = node.cache.stats()
            assert (stats.leases, stats.escrows, stats.sequences) == (0, 0, 0)
            assert stats.slots_free == node.cache.config.slots
            for group in stats.groups:
                assert group.free + group.cached == group.units, group
                assert group.reserved == 0, group
            assert node.decisions == self.decisions, "logs differ"
            assert node.log.digest == self.nodes[0].log.digest

    def stories(self) -> list[str]:
        """What became of every request that is still here."""
        return [record.life.story() for record in self.leader.books.records.values()]

    def warm(self, stage: int, tokens: Sequence[int], *, snapshots: Sequence[int] = ()) -> None:
        """Puts a prefix into one stage's cache only, as if a request had computed it there."""
        node, name = self.nodes[stage], RequestId("warmer")
        for end in [*snapshots, len(tokens)]:
            prompt = make_prompt([*tokens[:end], -1], self.block)
            vote = node.cache.claim(name, 1, prompt, 0)
            assert vote.committed, vote
            sequence = node.cache.materialize(name)
            node.device.begin(prompt, sequence)
            wanted = [end] if end in snapshots else []
            orders = node.cache.snapshot_orders(name, wanted)
            node.device.perform(orders.effects)
            node.device.run(prompt, sequence, (0, end), orders.orders)
            node.cache.publish(name, end)
            for order in orders.orders:
                node.cache.snapshot_taken(name, order.position)
            node.cache.free(name)

    # -- the driver ------------------------------------------------------------------------------

    def _arrive(self, request_id: RequestId, prompt: Prompt) -> None:
        self.arrived.append(request_id)
        held, most = prompt.num_tokens + prompt.room_tokens, self.capacity.tokens
        if self.refuse_on_arrival and most is not None and held > most:
            self.outcomes[request_id] = "refused on arrival"
            return
        self._prompts[request_id] = prompt
        self._serial += 1
        self._tell(
            RequestArrived(
                request_id=request_id,
                serial=self._serial,
                num_tokens=prompt.num_tokens,
                room_tokens=prompt.room_tokens,
                reuse_cap=prompt.reuse_cap,
                keys=prompt.keys,
            )
        )

    def _abort(self, request_id: RequestId) -> None:
        if self.leader.record(request_id) is not None:
            self.outcomes[request_id] = "abort"
        self._tell(RequestCancelled(request_id=request_id))

    def _tell(self, fact: LeaderFact) -> None:
        self._perform(self.leader.handle(fact, now=self.now))

    def _perform(self, effects: Sequence[LeaderEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Refused):
                self.outcomes[effect.request_id] = "refused"
                self.refusals[effect.request_id] = effect
            else:
                self._log(effect)

    def _log(self, decision: Decision) -> LogNumber:
        if isinstance(decision, Admit):
            self.admissions.append((decision.request_id, decision.endpoint))
            self._agreement(decision)
        self.decisions.append(decision)
        return self.log.append(decision)

    def _agreement(self, decision: Admit) -> None:
        """Checker 1: every stage holds a lease there and committed."""
        for node in self.nodes:
            request = node.machine._requests[decision.request_id]
            assert request.vote is not None
            assert request.vote.is_committed, request
            assert request.vote.endpoint == decision.endpoint, request

    def _first_come_first_served(self, ask: RoundAsk) -> None:
        """Checker 9: claims in order of arrival, and nobody passes one who waits for capacity."""
        records = [self.leader.books.records[claim.request_id] for claim in ask.claims]
        serials = [record.serial for record in records]
        assert serials == sorted(serials), serials
        for record in self.leader.books.near():
            if record.phase is Phase.WAITING and serials:
                assert record.serial > serials[-1], (record.request_id, ask.claims)

    def _turn(self) -> None:
        while len(self._ring) < self.ring_depth and self._plan():
            pass
        if self._awaited:
            return
        flush = not self._ring and bool(self.log.unacked())
        wanted = self.work_wanted
        if wanted is None:
            wanted = 0 if self._ring else self.wave_tokens
        plan = self.leader.next_round(now=self.now, work_wanted=wanted, flush=flush)
        if plan is None:
            timer = self.leader.next_timer()
            if timer is not None and not self._heap:
                self.at(timer, lambda: None)
            return
        self.rounds += 1
        if plan.ask.claims and self.before_claims is not None:
            hook, self.before_claims = self.before_claims, None
            hook()
        for decision in (*plan.decisions, *plan.announce):
            self._log(decision)
        names = [announce.request_id for announce in plan.announce]
        payload = {name: self._prompts[name] for name in names}
        self._awaited = set(range(len(self.nodes)))
        for node in self.nodes:
            self._send_round(node, payload, plan.ask)

    def _send_round(self, node: Node, payload: dict[RequestId, Prompt], ask: RoundAsk) -> None:
        entries, apply_to = self.log.unacked(node.log.stage), self.log.last
        self.at(self._later(), lambda: self._round_came(node, entries, apply_to, payload, ask))

    def _round_came(
        self,
        node: Node,
        entries: tuple[LogEntry, ...],
        apply_to: LogNumber,
        payload: dict[RequestId, Prompt],
        ask: RoundAsk,
    ) -> None:
        node.apply(entries, apply_to)
        for request_id, prompt in payload.items():
            node.machine.store(request_id, prompt)
        answer, counters, ack = node.machine.answer(ask), node.machine.counters, node.log.ack
        stage = node.log.stage

        def deliver() -> None:
            self.log.acknowledge(ack)
            self._tell(StageCounted(stage=stage, counters=counters))
            self._tell(StageAnswered(stage=stage, answer=answer))
            self._awaited.discard(stage)

        self.at(self._later(), deliver)
        if self.random.random() < self.duplicate:
            self.at(self._later() + 3 * self.delay_s, lambda: self._again(stage, answer))

    def _again(self, stage: StageIndex, answer: RoundAnswer) -> None:
        self._tell(StageAnswered(stage=stage, answer=answer))

    def _later(self) -> float:
        return self.now + self.random.uniform(0.0, self.delay_s)

    # -- waves -----------------------------------------------------------------------------------

    def _plan(self) -> bool:
        room, spans = self.wave_tokens, []
        number = WaveNumber(self._waves + 1)
        for record in self.leader.admitted:
            known = record.arrival.num_tokens + self._produced.get(record.request_id, 0)
            left = known - record.run.planned
            length = min(left, room)
            if length == 0:
                continue
            start, end = record.run.planned, record.run.planned + length
            spans.append(
                SpanPlan(
                    request_id=record.request_id,
                    attempt=record.attempt,
                    start=start,
                    length=length,
                    final=length == left,
                )
            )
            self._tell(
                SpanPlanned(request_id=record.request_id, wave=number, end=end, last=length == left)
            )
            room -= length
        if not spans:
            return False
        self._waves = number
        wave = Wave(number, tuple(spans), self.log.unacked(), self.log.last)
        self._ring[number] = wave
        self.at(self._later(), lambda: self._wave_came(0, wave))
        return True

    def _wave_came(self, stage: int, wave: Wave) -> None:
        """Stages execute waves in number order; the next stage gets each some time later."""
        if stage == len(self.nodes):
            self._wave_done(wave)
            return
        node = self.nodes[stage]
        node.waves.append(wave)
        node.waves.sort(key=lambda other: other.number)
        while node.waves and node.waves[0].number == node.finished + 1:
            current = node.waves.pop(0)
            node.execute(current)
            self.at(self._later(), lambda done=current: self._wave_came(stage + 1, done))

    def _wave_done(self, wave: Wave) -> None:
        """The links reorder waves; the driver takes them in number order."""
        self._back.add(wave.number)
        while self._ring and (first := min(self._ring)) in self._back:
            self._back.discard(first)
            self._returned(self._ring.pop(first))

    def _returned(self, wave: Wave) -> None:
        live = [span for span in wave.spans if self._is_live(span)]
        done = tuple((span.request_id, span.start + span.length) for span in live)
        for node in self.nodes:
            self._tell(StageCounted(stage=node.log.stage, counters=node.machine.counters))
        self._tell(WaveReturned(wave=wave.number, computed=done))
        for span in live:
            if self.random.random() < self.fail:
                self._failed(span.request_id)
            elif span.final:
                self._completed(span.request_id)

    def _failed(self, request_id: RequestId) -> None:
        """Somebody was at fault: this request, or another one of its wave."""
        if self.random.random() < 0.3:
            self.outcomes[request_id] = "error"
            self._tell(RequestFailed(request_id=request_id))
        else:
            self._produced.pop(request_id, None)
            self._tell(AttemptFailed(request_id=request_id))

    def _completed(self, request_id: RequestId) -> None:
        """All known tokens are computed: one more token, or the end."""
        if self._produced.get(request_id, 0) < self._prompts[request_id].room_tokens:
            self._produced[request_id] = self._produced.get(request_id, 0) + 1
            return
        self.outcomes[request_id] = "done"
        self._tell(RequestServed(request_id=request_id))

    def _is_live(self, span: SpanPlan) -> bool:
        record = self.leader.record(span.request_id)
        return record is not None and record.attempt == span.attempt


def edges_taken(clusters: Sequence[Cluster]) -> Counter[Any]:
    """Moves of the lifecycle table over several runs."""
    total: Counter[Any] = Counter()
    for cluster in clusters:
        total.update(cluster.leader.books.edges)
    return total


def distinct(count: int, start: int) -> list[int]:
    """T(n): tokens that no other prompt has, if `start` differs by enough."""
    return list(range(start, start + count))
