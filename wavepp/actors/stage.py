"""StageCore: one stage's two sides around StageControl and an executor.

Owns: the tree lock, the order of a wave's steps, the turning of failures into records, timings. May
not: decide (StageControl), compute (the executor), know how messages travel. StageControl takes the
lock it is given once an operation (a claim, a decision, a span), so neither side waits for a whole
round or wave of the other.

    WAVE (the actor's event loop)            LOOP (the data plane's one thread)
    round, stats, stacks                     prepare, forward
                 \\                         /
                  tree_lock, for microseconds: never across an await, a kernel call or a round

A stage that can't run a wave never raises into the data plane: error records travel beside the
activations, later stages skip those spans and still do their bookkeeping for the wave number.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from wavepp.actors.ports import (
    Carry,
    DeviceTimes,
    Parcel,
    StageExecutor,
    StageOutput,
    StageReport,
)
from wavepp.config import EngineConfig
from wavepp.control.options import CacheOptions, cache_config
from wavepp.control.stage import PreparedWave, StageControl
from wavepp.control.work import ErrorRecord, StageFacts, StageWork
from wavepp.errors import ProtocolError
from wavepp.protocol.messages import RoundMessage, RoundReply, WaveSchedule
from wavepp.requests import StageStats
from wavepp.units import RequestId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Between `prepare` and `forward` of one wave; stays on the stage. `wave` and `fatal` None: of
    an epoch that is over; it passes through."""

    schedule: WaveSchedule
    wave: PreparedWave | None
    fatal: str | None
    from_s: float
    done_s: float


class TreeLock:
    """A mutex that knows the longest time it was held, in seconds. Not reentrant."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since_s = 0.0
        self.hold_max_s = 0.0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._since_s = time.perf_counter()

    def __exit__(self, *exc_info: object) -> None:
        self.hold_max_s = max(self.hold_max_s, time.perf_counter() - self._since_s)
        self._lock.release()


@dataclass(slots=True)
class LoopTimes:
    """Seconds of the stage by what it was doing, from the start to the end of its latest wave."""

    until_s: float
    sent_s: float = -math.inf  # when the latest wave's parcel was off
    busy_s: float = 0.0
    no_wave_s: float = 0.0
    activation_s: float = 0.0
    materialize_s: float = 0.0
    sending_s: float = 0.0
    waves: int = 0

    def add(self, prepare_from_s: float, prepared_s: float, device: DeviceTimes) -> None:
        """Adds a wave: every moment since the latest one's end counts once.

            until_s | sending | no wave | materialize | activation | copies | busy | sending |

        A device that was busy meanwhile did not wait for the preparing.
        """
        self.sending_s += self._spend(min(self.sent_s, device.from_s))
        self.no_wave_s += self._spend(min(prepare_from_s, device.from_s))
        self.materialize_s += self._spend(min(prepared_s, device.from_s))
        self.activation_s += self._spend(device.from_s)
        self.materialize_s += self._spend(device.computing_s)
        self.busy_s += self._spend(device.done_s)
        self.sending_s += self._spend(device.sent_s)
        self.waves += 1

    def _spend(self, at_s: float) -> float:
        """The seconds until then; the next ones count from there."""
        spent_s = max(at_s - self.until_s, 0.0)
        self.until_s += spent_s
        return spent_s


class StageCore:
    """One stage of a running pipeline."""

    def __init__(
        self,
        executor: StageExecutor,
        options: CacheOptions,
        *,
        epoch: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.executor = executor
        self._options = options
        self.facts: StageFacts = executor.facts
        self.tree_lock = TreeLock()
        shards = cache_config(executor.facts, options).hint_shards
        self.control = StageControl(
            executor.facts,
            options,
            epoch=epoch,
            tree_lock=self.tree_lock,
            shard_locks=[threading.Lock() for _ in range(shards)],
        )
        self._violations = 0  # that were told
        self._clock = clock
        self._times = LoopTimes(until_s=clock())
        self._fatal: str | None = None

    # WAVE side

    def successor(self, epoch: int) -> StageCore:
        """The same stage in another epoch: its weights and its times, but nothing cached. This one
        computes no more by now, and is not used again."""
        core = StageCore(self.executor, self._options, epoch=epoch, clock=self._clock)
        core._times, core._violations = self._times, self._violations
        core.control.violations = self.control.violations
        core.tree_lock.hold_max_s = self.tree_lock.hold_max_s
        return core

    async def round(self, message: RoundMessage) -> RoundReply | None:
        """Applies a round. None: it is of an epoch that is over.

        Raises:
            ProtocolError: the protocol was broken; this stage runs no more waves.
        """
        if message.epoch < self.control.epoch:
            return None
        try:
            reply = self.control.handle(message, now=self._clock())
        except (ProtocolError, AssertionError) as error:
            self._fatal = _describe(error)
            raise
        self._report_violations()
        return reply

    async def reset(self) -> bool:
        """Drops all cached content that no request uses. True: nothing is cached any more."""
        return self.control.reset()

    async def stats(self) -> StageStats:
        """One snapshot."""
        with self.tree_lock:
            cache = self.control.cache.stats()
            times = replace(self._times)
        groups = cache.groups
        return StageStats(
            stage=self.facts.stage,
            layers=self.facts.layers,
            busy_s=times.busy_s,
            wait_s={
                "no_wave": times.no_wave_s,
                "activation": times.activation_s,
                "materialize": times.materialize_s,
                "sending": times.sending_s,
            },
            idle_s=max(self._clock() - times.until_s, 0.0),
            waves=times.waves,
            blocks_total=sum(group.units for group in groups),
            blocks_used=sum(group.units - group.free - group.reclaimable for group in groups),
            blocks_cached=sum(group.cached for group in groups),
            snapshots_total=sum(group.units for group in groups if not group.paged),
            snapshots_filled=sum(group.units - group.free for group in groups if not group.paged),
            host_blocks_total=sum(group.host_units for group in groups),
            host_blocks_cached=sum(group.host_cached for group in groups),
            leases=cache.leases,
            escrows=cache.escrows,
            escrow_blocks=sum(group.reserved for group in groups),
            evicted=cache.evicted,
            offloaded=cache.offloaded,
            brought_back=cache.brought_back,
            victims_substituted=cache.substituted,
            lock_hold_max_s=self.tree_lock.hold_max_s,
            invariant_violations=self.control.violations,
            pid=os.getpid(),
            cpu_s=time.process_time(),
        )

    async def stacks(self) -> str:
        """What this process's threads are doing."""
        return thread_stacks()

    # LOOP side

    def prepare(self, schedule: WaveSchedule) -> Prepared:
        """First step of a wave, as soon as its schedule is there. Never raises."""
        from_s = self._clock()
        wave: PreparedWave | None = None
        if self._fatal is None and schedule.epoch >= self.control.epoch:
            try:
                wave = self.control.prepare(schedule)
                if wave.work.effects:
                    self.executor.materialize(wave.work.effects)
            except Exception as error:
                wave, self._fatal = None, _describe(error)
        return Prepared(
            schedule=schedule,
            wave=wave,
            fatal=self._fatal,
            from_s=from_s,
            done_s=self._clock(),
        )

    def forward(self, prepared: Prepared, parcel: Parcel | None) -> Parcel:
        """Second step, when the activations are there (None on the first stage). Never raises."""
        from_s = self._clock()
        epoch, wave = prepared.schedule.epoch, prepared.schedule.wave
        before = parcel if parcel is not None else Parcel(epoch=epoch, wave=wave)
        fatal = before.fatal or prepared.fatal
        if fatal is not None or prepared.wave is None:
            self._fatal = fatal
            return Parcel(epoch=epoch, wave=wave, reports=before.reports, fatal=fatal)
        output, computed, failures = self._compute(prepared.wave, before, first=parcel is None)
        try:
            report = self._finish(prepared, failures, output.device or from_s)
        except (ProtocolError, AssertionError) as error:
            self._fatal = _describe(error)
            return Parcel(epoch=epoch, wave=wave, reports=before.reports, fatal=self._fatal)
        failed = {record.request_id for record in failures}
        return Parcel(
            epoch=epoch,
            wave=wave,
            carry=output.carry,
            carried=tuple(span.request_id for span in computed.spans),
            outputs=tuple(out for out in output.outputs if out.request_id not in failed),
            errors=failures,
            reports=(*before.reports, report),
        )

    def sent(self) -> None:
        """The latest wave's parcel is off: what comes now is no sending any more."""
        self._times.sent_s = self._clock()

    def _compute(
        self, wave: PreparedWave, before: Parcel, *, first: bool
    ) -> tuple[StageOutput, StageWork, tuple[ErrorRecord, ...]]:
        """Runs the executor on what can be run: (its output, what it computed, all failures)."""
        failures = _merge(before.errors, wave.errors)
        failed = {record.request_id for record in failures}
        chosen = (
            {span.request_id for span in wave.work.spans} - failed if first else {*before.carried}
        )
        spans = tuple(span for span in wave.work.spans if span.request_id in chosen)
        work = StageWork(wave=wave.work.wave, spans=spans)
        nothing = StageWork(wave=wave.work.wave, spans=())
        if not spans:
            return StageOutput(), nothing, failures
        carry = before.carry
        if carry is not None and len(spans) < len(chosen):  # some have no place here
            kept = {span.request_id for span in spans}
            carry = keep_rows(carry, before.carried, kept, wave.schedule)
        try:
            output = self.executor.forward(work, carry)
        except Exception as error:
            lost = self._lost(work, failed, _describe(error), guilty=len(spans) == 1)
            return StageOutput(), nothing, _merge(failures, lost)
        return output, work, _merge(failures, self._unanswered(output))

    def _unanswered(self, output: StageOutput) -> tuple[ErrorRecord, ...]:
        """Records for the spans whose outputs are errors."""
        return tuple(
            ErrorRecord(
                request_id=span.request_id,
                stage=self.control.stage,
                message=span.error,
                guilty=True,
            )
            for span in output.outputs
            if span.error is not None
        )

    def _finish(
        self, prepared: Prepared, failures: Collection[ErrorRecord], since: DeviceTimes | float
    ) -> StageReport:
        """Bookkeeping for a wave that is over; `since`: when its forward began, or the device's
        own times."""
        assert prepared.wave is not None
        ack = self.control.finished(prepared.wave, failures)
        now = self._clock()
        device = since if isinstance(since, DeviceTimes) else _host_times(since, now)
        with self.tree_lock:
            self._times.add(prepared.from_s, prepared.done_s, device)
        self._report_violations()
        return StageReport(
            ack=ack,
            prepare_from_s=prepared.from_s,
            prepared_s=prepared.done_s,
            forward_from_s=device.computing_s,
            done_s=device.done_s,
        )

    def _lost(
        self, work: StageWork, failed: Collection[RequestId], message: str, *, guilty: bool
    ) -> tuple[ErrorRecord, ...]:
        """Records for spans that fell with the whole wave; only one that was alone is at fault."""
        return tuple(
            ErrorRecord(
                request_id=span.request_id,
                stage=self.control.stage,
                message=message,
                guilty=guilty,
            )
            for span in work.spans
            if span.request_id not in failed
        )

    def _report_violations(self) -> None:
        """An idle stage that holds something is a bug, counted and told, not a reason to stop."""
        if self.control.violations != self._violations:
            self._violations = self.control.violations
            logger.error("broken invariant: %s", self.control.violation)


def all_replies(replies: Sequence[RoundReply | None]) -> tuple[RoundReply, ...]:
    """The replies to a round of the epoch that the stages are in: none is missing."""
    there = tuple(reply for reply in replies if reply is not None)
    assert len(there) == len(replies), "a stage is in a later epoch"
    return there


def _host_times(from_s: float, done_s: float) -> DeviceTimes:
    """Of a device that is done when its host is."""
    return DeviceTimes(from_s=from_s, computing_s=from_s, done_s=done_s, sent_s=done_s)


def cache_options(config: EngineConfig) -> CacheOptions:
    """The part of the configuration that a stage caches by."""
    return CacheOptions(
        slots=config.max_num_seqs,
        headroom_tokens=config.headroom_tokens,
        snapshot_interval=config.snapshot_interval,
        max_snapshots_per_path=config.max_snapshots_per_path,
        enable_prefix_caching=config.enable_prefix_caching,
        reservation=config.reservation,
    )


def keep_rows(
    carry: Carry, carried: Sequence[RequestId], kept: Collection[RequestId], wave: WaveSchedule
) -> Carry:
    """The rows of the kept spans alone, in their order.

    Args:
        carried: whose spans the carry holds now, in order. wave: how long each is.
    """
    lengths = {span.request_id: span.length for span in wave.spans}
    rows: list[int] = []
    start = 0
    for name in carried:
        end = start + lengths[name]
        rows.extend(range(start, end) if name in kept else ())
        start = end
    return {name: tensor[rows] for name, tensor in carry.items()}


def thread_stacks() -> str:
    """The stacks of all threads of this process, as text."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [f"process {os.getpid()}"]
    for ident, frame in sys._current_frames().items():
        parts.append(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(parts)


def _merge(
    first: tuple[ErrorRecord, ...], second: tuple[ErrorRecord, ...]
) -> tuple[ErrorRecord, ...]:
    """All records, one a request: the first stage to fail is the one that knows why."""
    known = {record.request_id for record in first}
    return (*first, *(record for record in second if record.request_id not in known))


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
