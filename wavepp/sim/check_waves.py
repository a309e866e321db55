"""Checkers of waves: spans, ring and lanes, budget.

Own nothing; see `watch`.
"""

from __future__ import annotations

from wavepp.control.facts import Finish, WaveCompleted
from wavepp.control.stage import PreparedWave
from wavepp.protocol.messages import Abort, Admit, Decision, Free, Undo, WaveSchedule
from wavepp.sim.check_admission import being_admitted
from wavepp.sim.options import Job
from wavepp.sim.stage import SimStage
from wavepp.sim.watch import Checker
from wavepp.sim.world import World
from wavepp.units import RequestId


class Spans(Checker):
    """7: the spans of an attempt tile [endpoint, end) in order, alike on every stage; an answer
    comes after the last of them, is the one that the prompt leads to, and no span comes after it;
    an ending's fence is the attempt's last wave."""

    name = "7 spans"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._planned: dict[tuple[RequestId, int], int] = {}
        self._ends: dict[RequestId, int] = {}
        self._last: dict[tuple[RequestId, int], int] = {}
        self._over: set[RequestId] = set()
        self._waves: list[dict[int, WaveSchedule]] = [{} for _ in world.stages]
        self._rolled: set[tuple[int, RequestId, int]] = set()  # stage, attempt rolled back there

    def logged(self, decision: Decision) -> None:
        if isinstance(decision, Admit):
            self._planned[decision.request_id, decision.attempt] = decision.endpoint
        elif isinstance(decision, Undo | Abort | Free):
            last = self._last.get((decision.request_id, decision.attempt), 0)
            self.require(decision.fence_wave == last, f"the last wave was {last}", decision)

    def launched(self, schedule: WaveSchedule) -> None:
        for span in schedule.spans:
            key = (span.request_id, span.attempt)
            self.require(key in self._planned, "a span of what is not admitted", span)
            self.require(span.request_id not in self._over, "a span after the answer", span)
            self._last[key] = schedule.wave
            self.require(self._planned[key] == span.start, f"expected {self._planned[key]}", span)
            self._planned[key] = self._ends[span.request_id] = span.start + span.length
        for waves in self._waves:
            waves[schedule.wave] = schedule

    def prepared(self, stage: SimStage, wave: PreparedWave) -> None:
        expected = self._waves[stage.index].pop(wave.schedule.wave)
        self.require(wave.schedule == expected, f"stage {stage.index} got another wave", expected)
        spans = [(work.request_id, work.start, work.length) for work in wave.work.spans]
        rollbacks = [record for record in wave.errors if record.rollback is not None]
        for record in rollbacks:
            why = record.rollback
            lost = why is not None and why.alone and why.refusal.reason != "gone"
            self.require(not lost, f"stage {stage.index} is empty and has no room:", record)
        rolled = {record.request_id for record in rollbacks}
        self.require(
            not rolled or self.world.options.reservation != "escrow",
            f"stage {stage.index} had no room for",
            rolled,
        )
        for span in expected.spans:
            if span.request_id in rolled:
                self._rolled.add((stage.index, span.request_id, span.attempt))
        planned = [
            (span.request_id, span.start, span.length)
            for span in expected.spans
            if (stage.index, span.request_id, span.attempt) not in self._rolled
        ]
        self.require(spans == planned, f"stage {stage.index} runs other spans", spans, planned)

    def finished(self, job: Job, finish: Finish) -> None:
        result = finish.result
        self._over.add(self.world.names[job.name])
        if result.finish_reason not in ("stop", "length"):
            self.require(result.token_ids == (), "an answer without success", result)
            return
        request_id = self.world.names[job.name]
        end = len(job.tokens) + max(job.max_tokens - 1, 0)
        self.require(self._ends[request_id] == end, f"{request_id} ended early", end)
        text = self.world.texts[request_id]
        expected = text.produced(len(job.tokens), job.max_tokens)
        self.require(result.token_ids == expected, f"{request_id} got other tokens", expected)
        cap = 0 if job.scores else (len(job.tokens) - 1) // self.world.options.block_size
        cached = result.num_cached_tokens
        most = cap * self.world.options.block_size
        self.require(0 <= cached <= most, f"{request_id} reused {cached} of at most", most)


class RingAndLanes(Checker):
    """8: at most R waves in flight, numbered without a gap; at most `max_num_seqs` requests hold
    something on a stage; a working slot stays with its request."""

    name = "8 ring"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._launched = 0
        self._completed = 0
        self._prepared = [0] * len(world.stages)
        self._slots: list[dict[RequestId, tuple[int, int]]] = [{} for _ in world.stages]

    def launched(self, schedule: WaveSchedule) -> None:
        self.require(schedule.wave == self._launched + 1, "a gap before wave", schedule.wave)
        self._launched += 1
        in_flight = self._launched - self._completed
        self.require(in_flight <= self.world.options.ring_depth, "waves in flight:", in_flight)

    def completed(self, fact: WaveCompleted) -> None:
        self.require(fact.wave == self._completed + 1, "a gap before wave", fact.wave)
        self._completed += 1
        self.require(
            [ack.stage for ack in fact.acks] == list(range(len(self.world.stages))),
            "not one acknowledgement a stage:",
            fact.acks,
        )

    def prepared(self, stage: SimStage, wave: PreparedWave) -> None:
        number = self._prepared[stage.index] = self._prepared[stage.index] + 1
        self.require(wave.schedule.wave == number, f"stage {stage.index} skipped", number)

    def held(self, stage: SimStage) -> None:
        holdings = stage.control.cache._holdings
        lanes = self.world.options.max_num_seqs
        self.require(len(holdings) <= lanes, f"stage {stage.index}: holders", len(holdings))
        known, now = self._slots[stage.index], {}
        for request_id, holding in holdings.items():
            sequence = holding.sequence
            if sequence is None or sequence.slot is None:
                continue
            here = now[request_id] = (sequence.endpoint, sequence.slot)
            before = known.get(request_id, here)
            moved = before[0] == here[0] and before[1] != here[1] and sequence.published > here[0]
            self.require(not moved, f"stage {stage.index}: {request_id} changed slots", before)
        self._slots[stage.index] = now


class Budget(Checker):
    """10: a wave holds at most M tokens, something always, and a span that is not its request's end
    stops at a block's end unless the whole budget holds none. While admitted work waits and the
    ring has room, some span is planned within two turns, and before the progress deadline; at once
    by the greedy planner, and while the ring is empty. A turn: a wave came back, or a request came.
    """

    name = "10 budget"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._completed = 0
        self._idle_turn: int | None = None  # since the last wave, when work began to wait
        self._idle_since: dict[RequestId, float] = {}

    def completed(self, fact: WaveCompleted) -> None:
        self._completed += 1

    def launched(self, schedule: WaveSchedule) -> None:
        options = self.world.options
        tokens = schedule.num_tokens
        self.require(0 < tokens <= options.wave_tokens_max, "tokens in a wave:", tokens)
        names = [span.request_id for span in schedule.spans]
        self.require(len(set(names)) == len(names), "two spans of one request:", names)
        for span in schedule.spans:
            aligned = (span.start + span.length) % options.block_size == 0
            unavoidable = span.length == options.wave_tokens_max < options.block_size
            self.require(span.final or aligned or unavoidable, "cut inside a block:", span)
        self._idle_turn = None
        self._idle_since = {}

    def turned(self) -> None:
        waiting = self._waiting()
        now = self.world.clock.now
        self._idle_since = {name: self._idle_since.get(name, now) for name in waiting}
        if not waiting:
            self._idle_turn = None
            return
        options, ring = self.world.options, self.world.driver.ring
        self.require(len(ring) > 0, "work waits, nothing runs:", waiting)
        self.require(options.planner != "greedy", "work waits, the ring has room:", waiting)
        turn = self._completed + self.world.arrived
        if self._idle_turn is None:
            self._idle_turn = turn
        self.require(turn == self._idle_turn, "work waits for a second turn:", waiting)
        until = min(self._idle_since.values()) + options.progress_deadline_s
        self.require(now < until, "work is held past the progress deadline:", waiting)
        timer = self.world.driver.next_timer
        self.require(timer is not None and timer <= until, "nothing ends the hold:", timer, until)

    def _waiting(self) -> list[RequestId]:
        """Requests with something left to plan, while the ring has room. Serial admission stops the
        planning loop: then they wait for its end."""
        driver = self.world.driver
        if not driver.ring.has_room:
            return []
        if self.world.options.admission == "serial" and being_admitted(self.world):
            return []
        return [
            record.request_id
            for record in driver.leader.admitted
            if record.run.planned < driver._by_id[record.request_id].known
        ]
