"""DriverCore: asyncio around DriverControl.

Owns: the callers' futures, the order in which effects are performed, the watchdog, the end of the
pipeline. May not: decide. Rounds never block the planner or a running wave: launching, collecting
and rounds are three tasks, and each only feeds facts to the control.

    submit, abort --> _feed(fact) --> DriverControl --> effects --> queues --> tasks --> planes
                          ^                                                      |
                          `---------------- WaveCompleted, RoundAnswered --------'
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import NoReturn

import numpy as np

from wavepp.actors.ports import DataPlane, Parcel, Replace, StageDiedError, StagesPlane
from wavepp.actors.streams import TokenStream
from wavepp.actors.trace import TraceWriter
from wavepp.actors.wave_sizes import WaveSizes
from wavepp.actors.wave_times import read_wave_times
from wavepp.config import EngineConfig
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
    TellProduced,
    TimerFired,
    WaveCompleted,
)
from wavepp.control.options import DriverOptions
from wavepp.control.work import Sampling
from wavepp.errors import EngineDeadError, ProtocolError, RequestError
from wavepp.protocol.messages import RoundMessage, WaveSchedule
from wavepp.requests import EngineStats, PrefillRequest, PrefillResult, Produced, StageStats
from wavepp.units import RequestId

logger = logging.getLogger(__name__)

DRAIN_S_MAX = 10.0
STACKS_S_MAX = 5.0
WATCH_S_MAX = 1.0
LOOK_AGAIN_S = 0.002


class DriverCore:
    """The deciding side of a running pipeline, on one event loop."""

    def __init__(
        self,
        control: DriverControl,
        stages: StagesPlane,
        data: DataPlane,
        *,
        watchdog_s: float,
        lease_alarm_s: float = 300.0,
        trace: TraceWriter | None = None,
        replace_stages: Replace | None = None,
    ) -> None:
        """`replace_stages`: without it the pipeline ends when a stage dies."""
        self.control = control
        self._stages = stages
        self._data = data
        self._watchdog_s = watchdog_s
        self._lease_alarm_s = lease_alarm_s
        self._alarmed_s = 0.0  # when the latest lease was asked for that an alarm was about
        self._trace = trace
        self._replace_stages = replace_stages
        self._restarts = 0
        self._stage_stats: tuple[StageStats, ...] = ()  # as the stages said last
        self._waits: dict[RequestId, tuple[RequestId, int]] = {}  # as the trace was told last
        self._clock: Callable[[], float] = time.monotonic
        self._started_s = self._clock()
        self._futures: dict[str, asyncio.Future[PrefillResult]] = {}
        self._streams: dict[str, TokenStream] = {}
        self._to_launch: asyncio.Queue[WaveSchedule] = asyncio.Queue()
        self._to_round: asyncio.Queue[tuple[RoundMessage, ...]] = asyncio.Queue()
        self._broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._sizes = WaveSizes()
        self._dead: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._main = asyncio.create_task(self._run(), name="wavepp-driver")

    async def submit(self, request: PrefillRequest, *, stream: bool = False) -> PrefillResult:
        """As EngineBackend.submit."""
        self.check_alive()
        arrival = build_arrival(request, stream=stream)
        refused = self.control.refusal(arrival)
        if refused is not None:
            raise refused
        future: asyncio.Future[PrefillResult] = asyncio.get_running_loop().create_future()
        self._futures[request.request_id] = future
        tokens = TokenStream()
        if stream:
            self._streams[request.request_id] = tokens
        self._feed(Arrived(arrival=arrival))
        try:
            return await future
        except asyncio.CancelledError:
            self.abort(request.request_id)
            raise
        finally:
            tokens.close()
            if self._streams.get(request.request_id) is tokens:  # not of a later one of that name
                del self._streams[request.request_id]

    async def more(self, request_id: str, known: int) -> tuple[Produced, ...]:
        """As EngineBackend.more."""
        stream = self._streams.get(request_id)
        return () if stream is None else await stream.after(known)

    def abort(self, request_id: str) -> bool:
        """As EngineBackend.abort."""
        if self._dead is not None or request_id not in self._futures:
            return False
        self._feed(AbortRequested(user_id=request_id))
        return True

    def check_alive(self) -> None:
        """
        Raises:
            EngineDeadError: the pipeline stopped, and why.
        """
        if self._dead is not None:
            raise EngineDeadError(self._dead)

    async def stats(self) -> EngineStats:
        """As EngineBackend.stats. Of stages that can't be asked now: what they said last."""
        self.check_alive()
        with contextlib.suppress(StageDiedError):
            self._stage_stats = await self._stages.stats()
        control, counters = self.control, self.control.counters
        leader, tally = control.leader, control.leader.books.tally
        leases = control.leader.lease_times()
        return EngineStats(
            requests_waiting=control.num_live - len(leader.admitted),
            requests_running=len(leader.admitted),
            requests_finished=counters.finished,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            computed_tokens=counters.computed_tokens,
            waves=counters.past_waves + control.ring.completed,
            ring_depth=control.ring.depth,
            ring_occupancy=0 if control.over is not None else len(control.ring),
            wall_s=self._clock() - self._started_s,
            rounds=counters.past_rounds + control.rounds.number,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            endpoints_lowered=tally.retries,
            lease_mismatches=tally.mismatches,
            capacity_refusals=tally.no_room,
            rolled_back=tally.rolled_back,
            deferred=tally.deferred,
            leases=len(leases),
            lease_age_s_max=self._clock() - min(leases) if leases else 0.0,
            stages=self._stage_stats,
            wave_tokens=tuple(self._sizes.latest),
            wave_size_counts=tuple(self._sizes.counts),
            launched_tokens=self._sizes.tokens,
            wave_budget=self._sizes.budget,
            endpoint_lowered_tokens=tally.candidate_tokens - tally.endpoint_tokens,
            driver_cpu_s=time.process_time(),
            stage_restarts=self._restarts,
        )

    async def reset_prefix_cache(self, stage: int | None) -> bool:
        """As EngineBackend.reset_prefix_cache. What has ended by now is no longer in use: the
        stages hear of it first. When a stage dies meanwhile, this waits for the next epoch."""
        while True:
            control = self.control
            number, deadline = control.log.last, self._clock() + DRAIN_S_MAX
            while control.over is not None or control.log.acked_min < number:
                self.check_alive()
                if self.control is not control or self._clock() > deadline:
                    break
                await asyncio.sleep(LOOK_AGAIN_S)
            self.check_alive()
            try:
                return await self._stages.reset(stage)
            except StageDiedError:
                await asyncio.sleep(LOOK_AGAIN_S)

    async def close(self) -> None:
        """Aborts what is left, lets waves in flight run out (for a while), and stops all tasks."""
        for request_id in list(self._futures):
            self.abort(request_id)
        try:
            if self._dead is None and await self._drained():
                self.control.check()
        finally:
            self._main.cancel()
            if self._timer is not None:
                self._timer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._main
            self._die("the engine is closed")
            if self._trace is not None:
                self._trace.close()
                self._trace = None

    async def _drained(self) -> bool:
        deadline = self._clock() + DRAIN_S_MAX
        while self.control.is_busy and self._dead is None:
            if self._clock() > deadline:
                return False
            await asyncio.sleep(LOOK_AGAIN_S)
        return self._dead is None

    async def _run(self) -> None:
        """Epoch after epoch, until something fails that no other stage can mend."""
        while True:
            failures = await self._run_epoch()
            died = [error for error in failures if isinstance(error, StageDiedError)]
            try:
                if not died or self._replace_stages is None or self._broken.done():
                    raise (died or failures)[0]
                await self._begin_epoch(str(died[0]), self._replace_stages)
            except Exception as error:
                dead = isinstance(error, EngineDeadError)
                reason = str(error) if dead else f"{type(error).__name__}: {error}"
                logger.error("the pipeline stopped: %s", reason)
                self._die(reason)
                return

    async def _run_epoch(self) -> tuple[Exception, ...]:
        """All tasks of the driver, until one fails: why."""
        jobs: tuple[Callable[[], Awaitable[NoReturn]], ...] = (
            self._launch_waves,
            self._collect_waves,
            self._hold_rounds,
            self._watch,
            self._await_death,
            self._await_broken,
        )
        failures: tuple[Exception, ...] = ()
        try:
            async with asyncio.TaskGroup() as group:
                for job in jobs:
                    group.create_task(_run_job(job))
        except* Exception as errors:
            failures = errors.exceptions
        return failures

    async def _begin_epoch(self, reason: str, replace_stages: Replace) -> None:
        """Goes on with other stages. Meanwhile requests come and go, and none is computed.

        Raises:
            EngineDeadError: there is nothing to go on with.
        """
        before = self.control
        epoch = before.options.epoch + 1
        logger.warning("%s; epoch %d begins", reason, epoch)
        before.stop(reason)
        self._to_launch, self._to_round = asyncio.Queue(), asyncio.Queue()
        planes = await replace_stages(epoch)
        self.control = DriverControl(planes.facts, replace(before.options, epoch=epoch))
        self._stages, self._data = planes.stages, planes.data
        self._restarts += planes.replaced
        now = self._clock()
        effects = self.control.take_over(before, now=now)
        if self._trace is not None:
            self._trace.write("epoch", now, {"epoch": epoch, "reason": reason})
        self._obey(effects, now)

    async def _launch_waves(self) -> NoReturn:
        while True:
            await self._data.launch(await self._to_launch.get())

    async def _collect_waves(self) -> NoReturn:
        while True:
            parcel = await self._data.collect()
            if parcel.fatal is not None:
                raise EngineDeadError(parcel.fatal)
            self._collected(parcel)

    async def _hold_rounds(self) -> NoReturn:
        while True:
            replies = await self._stages.round(await self._to_round.get())
            self._feed(RoundAnswered(replies=replies))

    async def _await_death(self) -> NoReturn:
        raise StageDiedError(await self._stages.wait_death())

    async def _await_broken(self) -> NoReturn:
        raise EngineDeadError(await asyncio.shield(self._broken))

    async def _watch(self) -> NoReturn:
        """When something is out and nothing has come back for `watchdog_s`, the stage that holds
        up the others counts as dead; nobody knows which: the pipeline ends."""
        while True:
            await asyncio.sleep(min(self._watchdog_s / 4, self._lease_alarm_s / 4, WATCH_S_MAX))
            self._look_for_old_leases()
            silent_s = self._clock() - self.control.progress_s
            if self.control.is_busy and silent_s > self._watchdog_s:
                logger.error("no progress for %.1f s; stacks:\n%s", silent_s, await self._dump())
                reason = f"no progress for {silent_s:.1f} s {self._out()}"
                if self._replace_stages is not None:
                    ended = await self._stages.end_stalled(self.control.ring.launched)
                    if ended is not None:
                        raise StageDiedError(f"{reason}; {ended}")
                raise EngineDeadError(reason)

    def _out(self) -> str:
        """What has not come back."""
        waves, rounds = [wave.wave for wave in self.control.ring], self.control.rounds
        return (
            f"(watchdog_s is {self._watchdog_s:g}): waves {waves} in the ring, round "
            f"{rounds.number} {'out' if rounds.is_out else 'answered'}, "
            f"{len(self.control.leader.lease_times())} leases"
        )

    def _look_for_old_leases(self) -> None:
        """Leases have no expiry by time; one that is held long is told, once."""
        now = self._clock()
        asked_s = [s for s in self.control.leader.lease_times() if s > self._alarmed_s]
        old_s = [s for s in asked_s if now - s > self._lease_alarm_s]
        if old_s:
            self._alarmed_s = max(old_s)
            logger.warning(
                "%d leases are older than lease_alarm_s %g; the oldest: %.1f s",
                len(old_s),
                self._lease_alarm_s,
                now - min(old_s),
            )

    async def _dump(self) -> str:
        try:
            async with asyncio.timeout(STACKS_S_MAX):
                return await self._stages.stacks()
        except TimeoutError:
            return f"no answer within {STACKS_S_MAX:g} s"

    def _collected(self, parcel: Parcel) -> None:
        if self._trace is not None:
            for report in parcel.reports:
                self._trace.write("wave", report.done_s, {"wave": parcel.wave, "report": report})
        self._feed(
            WaveCompleted(
                epoch=parcel.epoch,
                wave=parcel.wave,
                outputs=parcel.outputs,
                errors=parcel.errors,
                acks=tuple(report.ack for report in parcel.reports),
                stage_seconds=tuple(report.busy_s for report in parcel.reports),
            )
        )

    def _feed(self, fact: Fact) -> None:
        """The one door to the control. A broken contract ends the pipeline."""
        if self._dead is not None or self._broken.done():
            return
        now = self._clock()
        try:
            effects = self.control.handle(fact, now=now)
        except (ProtocolError, AssertionError) as error:
            logger.exception("the driver's control failed")
            self._broken.set_result(f"{type(error).__name__}: {error}")
            return
        if self._trace is not None:
            self._trace.write("fact", now, fact)
        self._obey(effects, now)

    def _obey(self, effects: list[Effect], now: float) -> None:
        if self._trace is not None:
            self._trace.write("effects", now, effects)
            self._trace_waits(self._trace, now)
        for effect in effects:
            self._perform(effect)
        self._set_timer(now)

    def _trace_waits(self, trace: TraceWriter, now: float) -> None:
        """Who waits for a prefix that another computes, when that changed: no message says so."""
        near = self.control.leader.books.near()
        waits = {r.request_id: (r.wait.donor, r.wait.target) for r in near if r.wait.donor}
        if waits != self._waits:
            self._waits = waits
            trace.write("waits", now, waits)

    def _set_timer(self, now: float) -> None:
        """Wakes the control when something may be due though nothing has come."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = self.control.next_timer
        if due_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(due_s - now, 0.0), self._feed, TimerFired())

    def _perform(self, effect: Effect) -> None:
        match effect:
            case LaunchWave(schedule=schedule, budget=budget):
                self._sizes.add(schedule.num_tokens, budget)
                self._to_launch.put_nowait(schedule)
            case SendRound(messages=messages):
                self._to_round.put_nowait(messages)
            case TellProduced(user_id=user_id, produced=produced):
                self._streams[user_id].put(produced)
            case Finish(user_id=user_id, result=result):
                future = self._futures.pop(user_id)
                if not future.done():  # its caller may be gone
                    future.set_result(result)
            case _:
                raise TypeError(effect)

    def _die(self, reason: str) -> None:
        """Every open request gets the reason; nothing is taken any more."""
        if self._dead is None:
            self._dead = reason
        for future in self._futures.values():
            if not future.done():
                future.set_exception(EngineDeadError(self._dead))
        self._futures.clear()


async def _run_job(job: Callable[[], Awaitable[NoReturn]]) -> None:
    await job()


def driver_options(config: EngineConfig) -> DriverOptions:
    """The part of the configuration that the driver decides by.

    Raises:
        ConfigError: the file of wave times can't be used.
    """
    return DriverOptions(
        ring_depth=config.ring_waves,
        wave_tokens_max=config.max_num_batched_tokens,
        wave_tokens_min=config.wave_tokens_min,
        planner=config.planner,
        stage_costs=read_wave_times(config),
        pipeline_fill=config.pipeline_fill,
        progress_deadline_s=config.progress_deadline_ms / 1000.0,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        max_num_queued_reqs=config.max_num_queued_reqs,
        max_num_queued_tokens=config.max_num_queued_tokens,
        headroom_tokens=config.headroom_tokens,
        admission=config.admission,
        reservation=config.reservation,
        agreement=config.agreement,
        defer_shared_prefix=config.defer_shared_prefix and config.enable_prefix_caching,
        defer_max_s=config.defer_max_ms / 1000.0,
        max_request_retries=config.max_request_retries,
    )


def build_arrival(request: PrefillRequest, *, stream: bool = False) -> Arrival:
    """The request as the control takes it.

    Raises:
        RequestError: a token id that no integer type holds.
    """
    try:
        tokens = np.asarray(request.prompt_token_ids, dtype=np.int64)
    except OverflowError:
        raise RequestError(
            "a token id is outside the vocabulary", code="token_out_of_range", param="prompt"
        ) from None
    return Arrival(
        user_id=request.request_id,
        token_ids=tokens,
        max_tokens=request.max_tokens,
        sampling=Sampling(
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
        ),
        namespace=request.cache_salt,
        stop_token_ids=frozenset(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        stream=stream,
    )
