"""One stage: the real StageControl, its two threads as turns, and a model of its device.

Owns: which thread runs when. May not: decide, or look into what a message says. WAVE answers
rounds, LOOP runs waves; both take the tree lock for a step at a time. Whenever one of them lets go
of it, or is about to take it, the other may run then and there, so their steps interleave at the
grain of one lock hold, and what is done without the lock may be out of date when it is taken.

    LOOP:  idle --schedule--> prepared --activations--> computing --time--> idle
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from wavepp.cache.escrow import Hold
from wavepp.cache.reclaim import allocate
from wavepp.control.options import CacheOptions
from wavepp.control.stage import PreparedWave, StageControl
from wavepp.control.work import ErrorRecord, GroupFacts, SpanOutput, SpanWork, StageFacts
from wavepp.planner.wave_time import WaveLoad
from wavepp.protocol.messages import RoundMessage, RoundReply, StageAck, WaveSchedule
from wavepp.protocol.votes import Retry
from wavepp.sim.clock import Action, Clock
from wavepp.sim.device import Device, Text
from wavepp.sim.options import VOCABULARY, Faults, StageOptions, WorldOptions
from wavepp.sim.times import StageTimes
from wavepp.sim.violation import Violation
from wavepp.units import RequestId, StageIndex, WaveNumber

SLOW = 20.0
STORM_AT_A_LOCK = 0.1  # of the storms that come with a round, for each time the lock is taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """What travels from stage to stage with one wave.

    Attributes:
        tokens: in the wave. errors: of all stages so far, the first word on a request counts.
        acks, seconds: one a stage so far.
    """

    wave: WaveNumber
    tokens: int = 0
    errors: tuple[ErrorRecord, ...] = ()
    outputs: tuple[SpanOutput, ...] = ()
    acks: tuple[StageAck, ...] = ()
    seconds: tuple[float, ...] = ()


class HoldLock:
    """The tree lock of a simulation: there is one thread, so it only says when it is wanted and
    when it is let go."""

    def __init__(self, wanted: Action, released: Action) -> None:
        self._wanted = wanted
        self._released = released
        self.held = False

    def __enter__(self) -> None:
        self._wanted()
        assert not self.held, "the tree lock is taken twice"
        self.held = True

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.held = False
        if kind is None:
            self._released()


@dataclass(slots=True, kw_only=True, eq=False)
class StagePorts:
    """What a stage is built with.

    Attributes:
        texts: what each request's tokens are.
        faults: now.
        pull_round: lets a message under way to this stage arrive.
        took: the parcel of the stage before was received.
        held: told after every lock hold. told: of every event, for the trace.
    """

    clock: Clock
    rng: random.Random
    texts: dict[RequestId, Text]
    faults: Callable[[], Faults]
    count: Callable[[str], None]
    pull_round: Callable[[], bool]
    reply: Callable[[RoundReply], None]
    emit: Callable[[Parcel], None]
    took: Action
    held: Callable[[], None]
    prepared: Callable[[PreparedWave], None]


def stage_facts(index: int, options: StageOptions, world: WorldOptions) -> StageFacts:
    """What the stage really has."""
    return StageFacts(
        stage=StageIndex(index),
        layers=(index, index + 1),
        block_size=world.block_size,
        vocab_size=VOCABULARY,
        max_model_len=1 << 20,
        groups=tuple(
            GroupFacts(
                name=group.name,
                kind=group.kind,
                units=group.units,
                bytes_per_unit=1,
                window=group.window,
                host_units=group.host_units,
            )
            for group in options.groups
        ),
    )


class SimStage:
    """One stage of a simulated pipeline."""

    def __init__(
        self,
        index: int,
        options: StageOptions,
        world: WorldOptions,
        ports: StagePorts,
        *,
        epoch: int = 1,
    ) -> None:
        self.index = index
        self.options = options
        self.ports = ports
        self.lock = HoldLock(self._wanted, self._released)
        self.control = StageControl(
            stage_facts(index, options, world),
            CacheOptions(
                slots=world.max_num_seqs,
                headroom_tokens=world.headroom_tokens,
                snapshot_interval=options.snapshot_interval,
                max_snapshots_per_path=options.max_snapshots_per_path,
                enable_prefix_caching=world.enable_prefix_caching,
                reservation=world.reservation,
            ),
            epoch=epoch,
            tree_lock=self.lock,
        )
        self.device = Device(
            self.control.cache.config.groups, block_size=world.block_size, slots=world.max_num_seqs
        )
        self.times = StageTimes()
        self._schedules: deque[tuple[WaveSchedule, float]] = deque()  # with the time it came
        self._parcels: deque[Parcel] = deque()
        self._prepared: PreparedWave | None = None
        self._computing = False
        self._blocks = world.admission == "serial" and index < len(world.stages) - 1
        self._sending = False
        self._scheduled_s = self._computing_from_s = 0.0
        self._wave_runs = False  # the WAVE thread is in the middle of something
        self._loop_runs = False

    # -- WAVE ------------------------------------------------------------------------------------

    def round(self, message: RoundMessage) -> None:
        """A round arrives: it is answered at once."""
        assert not self._wave_runs, "one round is out at a time"
        moves = any(isinstance(entry.decision, Retry) for entry in message.entries)
        if (message.ask.claims or moves) and self._happens(self.ports.faults().storm):
            self.storm()
        self._wave_runs = True
        reply = self.control.handle(message, now=self.ports.clock.now)
        self._wave_runs = False
        self.ports.reply(reply)
        if self._happens(self.ports.faults().reset):
            self.reset()

    def reset(self) -> None:
        """All content that nobody uses is lost, as after an eviction storm."""
        self.ports.count("reset")
        self._wave_runs = True
        self.control.reset()
        self._wave_runs = False

    def storm(self) -> None:
        """Others had blocks of this stage for a moment: the least recently used content is gone.

        Not while LOOP prepares a wave: its copies come first.
        """
        if self._loop_runs:
            return
        self.ports.count("storm")
        parts = self.control.cache._parts
        for group, pool in enumerate(parts.pools):
            spare = max(pool.spare, 0)
            count = self.ports.rng.choice((spare, max(spare - 1, 0), spare // 2, 0))
            units, effects = allocate(parts, group, count, Hold())
            self.device.perform(tuple(effects))
            pool.give(units)

    # -- LOOP ------------------------------------------------------------------------------------

    def schedule(self, schedule: WaveSchedule) -> None:
        """A wave's schedule arrives."""
        self._schedules.append((schedule, self.ports.clock.now))
        self._kick()

    def parcel(self, parcel: Parcel) -> None:
        """A wave's activations arrive from the stage before."""
        self._parcels.append(parcel)
        self._kick()

    def _kick(self) -> None:
        """LOOP gets a turn if it has something to do."""
        if self._computing or self._sending or not (self._schedules or self._prepared):
            return
        self.ports.clock.after(0.0, self._start)

    def _start(self) -> None:
        """Prepares the next wave, and starts to compute it when its activations are there."""
        if self._loop_runs or self._computing or self._sending:
            return
        if self._prepared is None:
            if not self._schedules:
                return
            schedule, self._scheduled_s = self._schedules.popleft()
            self._prepare(schedule)
        if self.index > 0 and not self._parcels:
            return
        assert self._prepared is not None
        if self.index > 0:
            self.ports.took()
        self._computing = True
        self._computing_from_s = self.ports.clock.now
        seconds = self._wave_seconds(self._prepared)
        if self._happens(self.ports.faults().slow):
            self.ports.count("slow")
            seconds *= SLOW
        wave = self._prepared.schedule.wave
        self.ports.clock.after(seconds, lambda: self._finish(wave))

    def _wave_seconds(self, prepared: PreparedWave) -> float:
        seconds = self.options.costs.seconds(WaveLoad.of(prepared.schedule.spans))
        samples = self.options.head_s and any(work.sample for work in prepared.work.spans)
        return seconds + self.options.head_s if samples else seconds

    def _prepare(self, schedule: WaveSchedule) -> None:
        self._loop_runs = True
        self._prepared = self.control.prepare(schedule)
        self.device.perform(self._prepared.work.effects)
        self._loop_runs = False
        self.ports.prepared(self._prepared)

    def _finish(self, wave: WaveNumber) -> None:
        """The wave is computed (or failed): publish, give back, pass it on."""
        prepared = self._prepared
        if self._loop_runs or prepared is None or prepared.schedule.wave != wave:
            return  # it was done while WAVE ran
        before = self._parcels.popleft() if self.index > 0 else Parcel(wave=wave)
        assert before.wave == wave, (before, wave)
        failures, outputs = self._compute(prepared, before)
        self._loop_runs = True
        ack = self.control.finished(prepared, failures)
        self._loop_runs = False
        self._prepared, self._computing = None, False
        self._sending = self._blocks
        from_s, done_s = self._computing_from_s, self.ports.clock.now
        self.times.computed(wave, scheduled_s=self._scheduled_s, from_s=from_s, done_s=done_s)
        self.ports.emit(
            Parcel(
                wave=wave,
                tokens=prepared.schedule.num_tokens,
                errors=failures,
                outputs=outputs,
                acks=(*before.acks, ack),
                seconds=(*before.seconds, done_s - from_s),
            )
        )
        self._kick()

    def sent(self) -> None:
        """The next stage has taken the parcel: with blocking sends LOOP may go on."""
        if self._sending:
            self.times.sent(self.ports.clock.now)
        self._sending = False
        self._kick()

    def _compute(
        self, prepared: PreparedWave, before: Parcel
    ) -> tuple[tuple[ErrorRecord, ...], tuple[SpanOutput, ...]]:
        """All failures so far, and what the spans that did not fail put out."""
        failures = _merge(before.errors, prepared.errors)
        failures = _merge(failures, self._break(prepared, failures))
        failed = {record.request_id for record in failures}
        outputs = []
        for work in prepared.work.spans:
            if work.request_id not in failed:
                outputs.append(self._compute_span(work))
        return failures, tuple(outputs)

    def _compute_span(self, work: SpanWork) -> SpanOutput:
        text = self.ports.texts[work.request_id]
        if not np.array_equal(text.tokens(work.start, work.length), work.token_ids):
            raise Violation("7 spans", f"{work.request_id} got other tokens at {work.start}")
        digest = self.device.compute(work, text)
        token = digest % VOCABULARY if work.sample else None
        return SpanOutput(request_id=work.request_id, token_id=token)

    def _break(
        self, prepared: PreparedWave, failures: tuple[ErrorRecord, ...]
    ) -> tuple[ErrorRecord, ...]:
        """A fault: this wave can't be run here. One request is at fault, or nobody can tell."""
        faults = self.ports.faults()
        failed = {record.request_id for record in failures}
        names = [work.request_id for work in prepared.work.spans if work.request_id not in failed]
        if not names or not self._happens(faults.error):
            return ()
        if self._happens(faults.guilty):
            self.ports.count("error, guilty")
            return (self._record(self.ports.rng.choice(names), guilty=True),)
        self.ports.count("error")
        return tuple(self._record(name, guilty=len(names) == 1) for name in names)

    def _record(self, request_id: RequestId, *, guilty: bool) -> ErrorRecord:
        return ErrorRecord(
            request_id=request_id,
            stage=StageIndex(self.index),
            message="a simulated failure",
            guilty=guilty,
        )

    # -- the lock --------------------------------------------------------------------------------

    def _released(self) -> None:
        """The tree lock was let go: observers look, and the other thread may run."""
        self.ports.held()
        self._other_turn()

    def _wanted(self) -> None:
        """The tree lock is about to be taken; what was read before that may be out of date."""
        if self._wave_runs and self._happens(self.ports.faults().storm * STORM_AT_A_LOCK):
            self.storm()
        self._other_turn()

    def _other_turn(self) -> None:
        """The other thread may be the one to take the tree lock now."""
        rate = self.ports.faults().interleave
        if self._wave_runs == self._loop_runs or not self._happens(rate):
            return
        if self._loop_runs:
            if self.ports.pull_round():
                self.ports.count("interleave")
        elif self._computing and self._prepared is not None:
            self.ports.count("interleave")
            self._finish(self._prepared.schedule.wave)
        elif self._schedules or self._prepared is not None:
            self.ports.count("interleave")
            self._start()

    def _happens(self, probability: float) -> bool:
        return probability > 0 and self.ports.rng.random() < probability


def _merge(
    first: tuple[ErrorRecord, ...], second: tuple[ErrorRecord, ...]
) -> tuple[ErrorRecord, ...]:
    """One record a request: the first to fail knows why."""
    known = {record.request_id for record in first}
    return (*first, *(record for record in second if record.request_id not in known))
