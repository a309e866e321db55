"""A whole pipeline under a virtual clock: the real driver and stages, with simulated planes.

Owns: messages, their delays, time, faults. May not: decide: everything that is decided is decided
by DriverControl and StageControl, which run unchanged.

    rounds     driver --Link--> stage s --Link--> driver          one out at a time
    waves      driver --Link--> every stage;  stage s --Link--> stage s + 1 --...--> driver

A run has three phases. Safety: requests arrive, faults happen. Liveness: faults are over, and
everything left is served or refused. Quiescence: nothing is left to happen, and all sums are zero.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import xxhash

from wavepp.control.driver import DriverControl
from wavepp.control.facts import (
    AbortRequested,
    Arrival,
    Arrived,
    Effect,
    Fact,
    Finish,
    LaunchWave,
    RoundAnswered,
    SendRound,
    TimerFired,
    WaveCompleted,
)
from wavepp.control.options import DriverOptions
from wavepp.control.work import Sampling, StageFacts
from wavepp.protocol.facts import StageAnswered
from wavepp.protocol.messages import RoundMessage, RoundReply, WaveSchedule
from wavepp.protocol.states import ENDED, Edge
from wavepp.requests import PrefillResult
from wavepp.sim.clock import Clock, Link
from wavepp.sim.device import Text
from wavepp.sim.options import Faults, Job, WorldOptions
from wavepp.sim.stage import Parcel, SimStage, StagePorts, stage_facts
from wavepp.sim.trace import Trace
from wavepp.sim.violation import Violation
from wavepp.sim.watch import Checker, hooks_of, tap
from wavepp.units import RequestId

TAIL = 50.0
IDLE_EVENTS_MAX = 4000
"""Events without any progress (a wave or an answer), while somebody waits."""

NO_FAULTS = Faults()


class World:
    """One run of one workload on one pipeline.

    Args:
        checkers: classes of observers.
        show: where trace lines go.
    """

    def __init__(
        self,
        options: WorldOptions,
        *,
        seed: int = 0,
        checkers: Sequence[Callable[[World], Checker]] = (),
        show: Callable[[str], None] | None = None,
    ) -> None:
        self.options = options
        self.seed = seed
        self.clock = Clock()
        self.trace = Trace(show)
        self.faults_seen: Counter[str] = Counter()
        self.results: dict[str, PrefillResult] = {}
        self.refusals: dict[str, str] = {}  # on arrival: name -> code
        self.jobs: dict[RequestId, Job] = {}
        self.names: dict[str, RequestId] = {}  # of the latest request of that name
        self.texts: dict[RequestId, Text] = {}
        self.before_round: Callable[[RoundMessage, SimStage], None] | None = None  # for tests
        self.after_finish: Callable[[Job], None] | None = None  # of users who then ask again
        self._delays = self.rng("delays")
        self._late = self.rng("late")
        self._cancelled: set[str] = set()
        self._progress_at = 0
        self._serial = 0  # of arrivals, in all epochs
        self._checkers = tuple(checkers)
        self._past_edges: Counter[Edge] = Counter()
        self._start_epoch(1)
        if options.death_s is not None:
            self.clock.at(options.death_s, self.replace_stage, outside=True)

    def _start_epoch(self, epoch: int) -> None:
        """Everything inside the pipeline is new."""
        options = self.options
        self.epoch = epoch
        self.driver = DriverControl(
            self._told_facts(),
            self._driver_options(),
            hash_bytes=_weak if options.weak_keys else xxhash.xxh3_128_digest,
        )
        self.arrived = 0  # in this epoch
        self.wave_tokens: list[int] = []  # of every wave launched
        self._replies: list[RoundReply] = []
        self.asked: set[RequestId] = set()  # whom the round that is out asks about
        self._timer: float | None = None
        self.stages = [self._stage(index) for index in range(len(options.stages))]
        self._round_links = self._links(options.round_delay_s)
        self._reply_links = self._links(options.round_delay_s)
        self._schedule_links = self._links(options.wave_delay_s)
        self._parcel_links = self._links(options.wave_delay_s)
        self._hooks = hooks_of([checker(self) for checker in self._checkers])
        tap(self.driver.log, "append", after=lambda number, decision: self._logged(decision))

    def replace_stage(self) -> None:
        """A fault: a stage's process dies. What was under way is lost, a new epoch starts with
        empty caches, and its driver takes over whoever has no answer."""
        self.count("stage death")
        self._say("driver", "epoch", str(self.epoch + 1), "a stage died")
        self._past_edges = self.edges
        self.jobs = {name: job for name, job in self.jobs.items() if job.name not in self.results}
        self.clock.forget()
        before = self.driver
        before.stop("a stage died")
        self._start_epoch(self.epoch + 1)
        self._turned(self.driver.take_over(before, now=self.clock.now))

    def rng(self, purpose: str) -> random.Random:
        """Randomness for one purpose, so that more of one changes nothing of another."""
        return random.Random(f"{self.seed}/{purpose}")

    @property
    def faults(self) -> Faults:
        """Until the calm."""
        return self.options.faults if self.clock.now < self.options.calm_s else NO_FAULTS

    @property
    def edges(self) -> Counter[Edge]:
        """Moves of the lifecycle table, of all epochs."""
        return self._past_edges + self.driver.leader.books.edges

    @property
    def is_lying(self) -> bool:
        """Some stage has less than it told the driver."""
        return any(stage.told for stage in self.options.stages)

    def cancelled(self, job: Job) -> bool:
        """Somebody gave this request up."""
        return job.name in self._cancelled

    # -- building --------------------------------------------------------------------------------

    def _told_facts(self) -> list[StageFacts]:
        facts = []
        for index, stage in enumerate(self.options.stages):
            groups = tuple(
                type(group)(
                    name=group.name,
                    kind=group.kind,
                    units=stage.told.get(group.name, group.units),
                    host_units=group.host_units,
                    window=group.window,
                )
                for group in stage.groups
            )
            told = type(stage)(groups=groups)
            facts.append(stage_facts(index, told, self.options))
        return facts

    def _driver_options(self) -> DriverOptions:
        options = self.options
        return DriverOptions(
            ring_depth=options.ring_depth,
            wave_tokens_max=options.wave_tokens_max,
            wave_tokens_min=options.wave_tokens_min,
            planner=options.planner,
            stage_costs=options.stage_costs,
            pipeline_fill=options.pipeline_fill,
            progress_deadline_s=options.progress_deadline_s,
            max_num_seqs=options.max_num_seqs,
            headroom_tokens=options.headroom_tokens,
            admission=options.admission,
            reservation=options.reservation,
            agreement=options.agreement,
            defer_shared_prefix=options.defer_shared_prefix,
            defer_max_s=options.defer_max_s,
            epoch=self.epoch,
        )

    def _links(self, mean_s: float) -> list[Link]:
        return [Link(self.clock, partial(self._delay, mean_s)) for _ in self.options.stages]

    def _delay(self, mean_s: float) -> float:
        delay = self._delays.uniform(0.2, 1.8) * mean_s
        if self.faults.tail and self._delays.random() < self.faults.tail:
            self.count("long tail")
            delay *= TAIL
        return delay

    def _stage(self, index: int) -> SimStage:
        ports = StagePorts(
            clock=self.clock,
            rng=self.rng(f"stage {index}/{self.epoch}"),
            texts=self.texts,
            faults=lambda: self.faults,
            count=self.count,
            pull_round=lambda: self._round_links[index].pull(),
            reply=lambda reply: self._reply_links[index].send(partial(self._reply_came, reply)),
            emit=lambda parcel: self._emit(index, parcel),
            took=lambda: self.stages[index - 1].sent(),
            held=lambda: self._held(index),
            prepared=lambda wave: self._each("prepared", self.stages[index], wave),
        )
        return SimStage(index, self.options.stages[index], self.options, ports, epoch=self.epoch)

    def count(self, fault: str) -> None:
        """A fault happened."""
        self.faults_seen[fault] += 1

    # -- running ---------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """A request arrives at its time."""
        self.clock.at(job.at_s, lambda: self._arrive(job), outside=True)

    def abort(self, name: str, *, at_s: float = 0.0) -> None:
        """Somebody gives up, in whatever state the request is."""
        self.clock.at(at_s, lambda: self._abort(name), outside=True)

    def run(self) -> None:
        """Until nothing is left to happen.

        Raises:
            Violation: somebody saw something.
        """
        while self.step():
            pass
        self._each("ended")

    def step(self) -> bool:
        """The next event; False: nothing is left to happen."""
        try:
            more = self.clock.step()
        except Violation:
            raise
        except Exception as error:  # whatever it is: nobody may raise here
            raise Violation("contract", f"{type(error).__name__}: {error}") from error
        if self.clock.events - self._progress_at > IDLE_EVENTS_MAX:
            raise Violation(
                "11 liveness", f"{IDLE_EVENTS_MAX} events without progress: {self.stories()}"
            )
        return more

    def stories(self) -> list[str]:
        """Of every request that is live."""
        return [record.life.story() for record in self.driver.leader.books.records.values()]

    # -- the caller ------------------------------------------------------------------------------

    def _arrive(self, job: Job) -> None:
        arrival = Arrival(
            user_id=job.name,
            token_ids=np.asarray(job.tokens, dtype=np.int64),
            max_tokens=job.max_tokens,
            sampling=Sampling(prompt_logprobs=0 if job.scores else None),
            namespace=job.salt,
        )
        refused = self.driver.refusal(arrival)
        if refused is not None:
            self.refusals[job.name] = refused.code
            self._say("driver", "refuse", job.name, refused.code)
            return
        self.arrived += 1
        self._serial += 1
        request_id = RequestId(f"{job.name}#{self._serial}")
        self.jobs[request_id] = job
        self.names[job.name] = request_id
        self.texts[request_id] = Text.of_job(job, self.options.block_size)
        self._say("driver", "arrive", job.name, f"{len(job.tokens)} tokens")
        self._tell(Arrived(arrival=arrival))
        if job.cancel_s is not None:
            self.abort(job.name, at_s=job.cancel_s)

    def _abort(self, name: str) -> None:
        request_id = self.names.get(name)
        record = None if request_id is None else self.driver.leader.record(request_id)
        if record is None:
            return
        self.count(f"cancel, {record.phase.value}")
        self._cancelled.add(name)
        self._say("driver", "cancel", name, record.phase.value)
        self._tell(AbortRequested(user_id=name))

    # -- the driver ------------------------------------------------------------------------------

    def _tell(self, fact: Fact) -> None:
        self._turned(self.driver.handle(fact, now=self.clock.now))

    def _turned(self, effects: Sequence[Effect]) -> None:
        self._perform(effects)
        self._each("turned")
        self._set_timer()
        self._cancel_in_phase()

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendRound(messages=messages):
                    self._send_round(messages)
                case LaunchWave(schedule=schedule):
                    self._launch(schedule)
                case Finish():
                    self._finish(effect)
                case _:
                    raise TypeError(effect)

    def _send_round(self, messages: Sequence[RoundMessage]) -> None:
        self._each("sent", messages)
        first = messages[0]
        self.asked = {*first.ask.hints, *(claim.request_id for claim in first.ask.claims)}
        claims = " ".join(f"{claim.request_id}@{claim.limit}" for claim in first.ask.claims)
        detail = f"announce {len(first.prompts)}, hint {len(first.ask.hints)}, claim {claims or 0}"
        self._say("driver", "round", str(first.round_number), detail)
        for stage, message in zip(self.stages, messages, strict=True):
            self._round_links[stage.index].send(partial(self._round_came, stage, message))

    def _round_came(self, stage: SimStage, message: RoundMessage) -> None:
        if self.before_round is not None:
            self.before_round(message, stage)
        stage.round(message)

    def _reply_came(self, reply: RoundReply) -> None:
        self._each("replied", reply)
        votes = " ".join(
            f"{vote.request_id}@{vote.endpoint}"
            + ("" if vote.is_committed else "?" if vote.refusal is None else "!")
            for vote in reply.answer.votes
        )
        stage = reply.ack.stage
        self._say(f"stage {stage}", "reply", str(reply.round_number),
                  f"log {reply.ack.applied}, {votes or 'no votes'}")  # fmt: skip
        self._replies.append(reply)
        if len(self._replies) < len(self.stages):
            return
        replies, self._replies, self.asked = tuple(self._replies), [], set()
        self._tell(RoundAnswered(replies=replies))
        for answered in replies:
            if self.faults.late and self._late.random() < self.faults.late:
                self.clock.after(self._late.uniform(0, 10 * self.options.round_delay_s),
                                 partial(self._tell_again, answered))  # fmt: skip

    def _tell_again(self, reply: RoundReply) -> None:
        """A fault: an old answer comes once more. Nothing may come of it."""
        self.count("late answer")
        fact = StageAnswered(stage=reply.ack.stage, answer=reply.answer)
        effects = self.driver.leader.handle(fact, now=self.clock.now)
        if effects:
            raise Violation("9 admission", f"an answer that came again led to {effects}")

    def _launch(self, schedule: WaveSchedule) -> None:
        self.wave_tokens.append(schedule.num_tokens)
        self._each("launched", schedule)
        spans = " ".join(f"{s.request_id}[{s.start}+{s.length}]" for s in schedule.spans)
        self._say("driver", "wave", str(schedule.wave), spans)
        for stage in self.stages:
            self._schedule_links[stage.index].send(partial(stage.schedule, schedule))

    def _emit(self, index: int, parcel: Parcel) -> None:
        failed = "".join(f", {record.request_id} failed" for record in parcel.errors)
        self._say(f"stage {index}", "computed", str(parcel.wave), f"log {parcel.acks[-1].applied}"
                  + failed)  # fmt: skip
        following = index + 1
        deliver = (
            partial(self.stages[following].parcel, parcel)
            if following < len(self.stages)
            else partial(self._completed, parcel)
        )
        stage = self.options.stages[index]
        takes_s = stage.link_s + parcel.tokens * stage.link_token_s
        self._parcel_links[index].send(deliver, takes_s=takes_s)

    def _completed(self, parcel: Parcel) -> None:
        self._progress_at = self.clock.events
        fact = WaveCompleted(
            epoch=self.epoch,
            wave=parcel.wave,
            outputs=parcel.outputs,
            errors=parcel.errors,
            acks=parcel.acks,
            stage_seconds=parcel.seconds,
        )
        self._each("completed", fact)
        self._tell(fact)

    def _finish(self, finish: Finish) -> None:
        self._progress_at = self.clock.events
        result = finish.result
        self.results[finish.user_id] = result
        self._say("driver", "finish", finish.user_id,
                  f"{result.finish_reason}, {result.num_cached_tokens} cached")  # fmt: skip
        job = self.jobs[self.names[finish.user_id]]
        self._each("finished", job, finish)
        if self.after_finish is not None:
            self.after_finish(job)

    def _set_timer(self) -> None:
        timer = self.driver.next_timer
        if timer is None or timer == self._timer:
            return
        self._timer = timer
        self.clock.at(timer, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._tell(TimerFired())

    def _cancel_in_phase(self) -> None:
        for record in list(self.driver.leader.books.records.values()):
            job = self.jobs[record.request_id]
            if job.cancel_in is record.phase and record.phase not in ENDED:
                self.abort(job.name)

    # -- observers -------------------------------------------------------------------------------

    def _say(self, place: str, what: str, which: str, detail: str = "") -> None:
        self.trace.line(self.clock.now, place, what, which, detail)

    def _logged(self, decision: object) -> None:
        self._say("driver", "decide", str(self.driver.log.last), repr(decision))
        self._each("logged", decision)

    def _held(self, index: int) -> None:
        self._each("held", self.stages[index])

    def _each(self, hook: str, *what: object) -> None:
        for look in self._hooks.get(hook, ()):
            look(*what)


def _weak(data: bytes) -> bytes:
    """A hash of 8 bits: many prefixes have the same key."""
    return xxhash.xxh3_64_digest(data)[:1]
