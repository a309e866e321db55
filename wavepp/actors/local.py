"""LocalPipeline: all stages in this process, one LOOP thread each, over in-process queues.

For tests, notebooks and debugging, and as the proof that the protocol does not depend on Ray.
Owns: the threads and queues. May not: decide or compute.

    schedule --> every stage's queue: prepare starts at once
    parcel 0 --> stage 1 --> ... --> stage P-1 --> back to the event loop
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from wavepp.actors.driver import DriverCore, driver_options
from wavepp.actors.ports import ExecutorFactory, Parcel
from wavepp.actors.stage import StageCore, all_replies, cache_options, thread_stacks
from wavepp.actors.trace import TraceWriter
from wavepp.config import EngineConfig
from wavepp.control.driver import DriverControl
from wavepp.control.work import StageFacts
from wavepp.errors import EngineDeadError
from wavepp.protocol.messages import RoundMessage, RoundReply, WaveSchedule
from wavepp.requests import EngineStats, PrefillRequest, PrefillResult, Produced, StageStats
from wavepp.units import WaveNumber

logger = logging.getLogger(__name__)

STOP_S_MAX = 30.0


class Handover:
    """Parcels on their way to one stage, in order.

    Args:
        blocking: `put` returns when the stage has taken the parcel, not before.
    """

    def __init__(self, *, blocking: bool) -> None:
        self._parcels: queue.SimpleQueue[Parcel] = queue.SimpleQueue()
        self._taken = threading.Semaphore(0) if blocking else None

    def put(self, parcel: Parcel) -> None:
        """The stage before sends."""
        self._parcels.put(parcel)
        if self._taken is not None:
            self._taken.acquire()

    def get(self) -> Parcel:
        """This stage receives; waits for a parcel."""
        parcel = self._parcels.get()
        if self._taken is not None:
            self._taken.release()
        return parcel


class LocalStage:
    """One stage: its core, its LOOP thread and the two queues in front of it."""

    def __init__(self, config: EngineConfig, factory: ExecutorFactory, index: int) -> None:
        self.index = index
        self.schedules: queue.SimpleQueue[WaveSchedule | None] = queue.SimpleQueue()
        self.parcels = Handover(blocking=config.admission == "serial")
        self.emit: Callable[[Parcel], None] = _no_successor
        self.core: StageCore | None = None
        self._config = config
        self._factory = factory
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[StageFacts] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name=f"wavepp-stage-{index}", daemon=True)

    def start(self) -> None:
        """Starts the thread, which builds the executor first; `ready` says how that went."""
        self._thread.start()

    def stop(self) -> None:
        """Tells the thread to end after the waves that it has."""
        self.schedules.put(None)

    def join(self, deadline_s: float) -> None:
        """Waits for the thread's end, until `deadline_s` on the monotonic clock; blocks."""
        if self._thread.ident is None:
            return
        self._thread.join(timeout=max(deadline_s - time.monotonic(), 0.0))
        if self._thread.is_alive():
            logger.error("stage %d still computes and is left behind", self.index)

    def _run(self) -> None:
        executor = None
        try:
            executor = self._factory(self._config, self.index)
            core = self.core = StageCore(executor, cache_options(self._config))
        except BaseException as error:
            if executor is not None:
                executor.close()
            self._loop.call_soon_threadsafe(_settle, self.ready, None, error)
            return
        try:
            self._loop.call_soon_threadsafe(_settle, self.ready, core.facts, None)
            while (schedule := self.schedules.get()) is not None:
                prepared = core.prepare(schedule)
                parcel = self.parcels.get() if self.index > 0 else None
                self.emit(core.forward(prepared, parcel))
                core.sent()
        finally:
            executor.close()


class LocalPlanes:
    """Both planes over the stages of this process."""

    def __init__(self, stages: Sequence[LocalStage]) -> None:
        self._stages = stages
        self._loop = asyncio.get_running_loop()
        self._results: asyncio.Queue[Parcel] = asyncio.Queue()
        for stage, following in itertools.pairwise(stages):
            stage.emit = following.parcels.put
        stages[-1].emit = self._emit

    async def launch(self, schedule: WaveSchedule) -> None:
        """As DataPlane.launch."""
        for stage in self._stages:
            stage.schedules.put(schedule)

    async def collect(self) -> Parcel:
        """As DataPlane.collect."""
        return await self._results.get()

    async def round(self, messages: Sequence[RoundMessage]) -> tuple[RoundReply, ...]:
        """As StagesPlane.round."""
        pairs = zip(self._cores(), messages, strict=True)
        return all_replies([await core.round(message) for core, message in pairs])

    async def stats(self) -> tuple[StageStats, ...]:
        """As StagesPlane.stats."""
        return tuple([await core.stats() for core in self._cores()])

    async def reset(self, stage: int | None) -> bool:
        """As StagesPlane.reset."""
        cores = self._cores()
        return all([await core.reset() for core in (cores if stage is None else [cores[stage]])])

    async def stacks(self) -> str:
        """As StagesPlane.stacks."""
        return thread_stacks()

    async def wait_death(self) -> str:
        """As StagesPlane.wait_death; stages die only with this process."""
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def end_stalled(self, launched: WaveNumber) -> str | None:
        """As StagesPlane.end_stalled; a thread can't be ended."""
        return None

    def _cores(self) -> list[StageCore]:
        cores = [stage.core for stage in self._stages]
        assert all(core is not None for core in cores)
        return [core for core in cores if core is not None]

    def _emit(self, parcel: Parcel) -> None:
        self._loop.call_soon_threadsafe(self._results.put_nowait, parcel)


class LocalPipeline:
    """EngineBackend in this process."""

    def __init__(self, config: EngineConfig, executor_factory: ExecutorFactory) -> None:
        self._config = config
        self._factory = executor_factory
        self._stages: list[LocalStage] = []
        self._driver: DriverCore | None = None

    async def start(self) -> tuple[StageFacts, ...]:
        """As EngineBackend.start."""
        assert not self._stages, "started twice"
        indices = range(self._config.pipeline_parallel_size)
        self._stages = [LocalStage(self._config, self._factory, index) for index in indices]
        try:
            trace = TraceWriter(self._config.trace) if self._config.trace else None
            for stage in self._stages:
                stage.start()
            facts = await _all_ready(self._stages)
            planes = LocalPlanes(self._stages)
            control = DriverControl(facts, driver_options(self._config))
            self._driver = DriverCore(
                control,
                planes,
                planes,
                watchdog_s=self._config.watchdog_s,
                lease_alarm_s=self._config.lease_alarm_s,
                trace=trace,
            )
        except BaseException:
            await self.close()
            raise
        return facts

    async def submit(self, request: PrefillRequest, *, stream: bool = False) -> PrefillResult:
        """As EngineBackend.submit."""
        return await self._running().submit(request, stream=stream)

    async def more(self, request_id: str, known: int) -> tuple[Produced, ...]:
        """As EngineBackend.more."""
        return await self._running().more(request_id, known)

    async def abort(self, request_id: str) -> bool:
        """As EngineBackend.abort."""
        return self._running().abort(request_id)

    async def stats(self) -> EngineStats:
        """As EngineBackend.stats."""
        return await self._running().stats()

    async def reset_prefix_cache(self, stage: int | None = None) -> bool:
        """As EngineBackend.reset_prefix_cache."""
        return await self._running().reset_prefix_cache(stage)

    async def check_health(self) -> None:
        """As EngineBackend.check_health."""
        self._running().check_alive()

    async def close(self) -> None:
        """As EngineBackend.close."""
        if self._driver is not None:
            await self._driver.close()
        stages, self._stages = self._stages, []
        for stage in stages:
            stage.stop()
        deadline_s = time.monotonic() + STOP_S_MAX
        for stage in stages:
            await asyncio.to_thread(stage.join, deadline_s)

    def _running(self) -> DriverCore:
        if self._driver is None:
            raise EngineDeadError("the engine is not started")
        return self._driver


async def _all_ready(stages: Sequence[LocalStage]) -> tuple[StageFacts, ...]:
    """Waits for every stage; raises what the first one that failed raised."""
    await asyncio.wait([stage.ready for stage in stages])
    failures = [error for stage in stages if (error := stage.ready.exception()) is not None]
    if failures:
        raise failures[0]
    return tuple(stage.ready.result() for stage in stages)


def _settle(
    ready: asyncio.Future[StageFacts], facts: StageFacts | None, error: BaseException | None
) -> None:
    if ready.done():
        return
    if error is not None:
        ready.set_exception(error)
    else:
        assert facts is not None
        ready.set_result(facts)


def _no_successor(parcel: Parcel) -> None:
    raise AssertionError(f"wave {parcel.wave} has nowhere to go")
