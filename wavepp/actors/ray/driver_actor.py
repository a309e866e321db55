"""DriverActor: a DriverCore in a process of its own, and the owner of the stage actors.

It compiles the graph inside its running loop and is the only one to execute it. The stages belong
to this actor: if it dies, Ray ends them too.
"""

from __future__ import annotations

from dataclasses import dataclass

import ray

from wavepp.actors.driver import DriverCore, driver_options
from wavepp.actors.ray.stages import StageGroup, StagePlacement
from wavepp.actors.trace import TraceWriter
from wavepp.config import EngineConfig
from wavepp.control.driver import DriverControl
from wavepp.control.work import StageFacts
from wavepp.errors import EngineDeadError, WavePPError
from wavepp.requests import EngineStats, PrefillRequest, PrefillResult, Produced


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A pipeline that runs.

    Attributes:
        semaphores: names in /dev/shm that its graph made.
    """

    facts: tuple[StageFacts, ...]
    semaphores: frozenset[str]


class DriverActor:
    """The driver of a pipeline on Ray. Errors meant for the user are returned, not raised: Ray
    would wrap them."""

    def __init__(self) -> None:
        self._core: DriverCore | None = None
        self._stages: StageGroup | None = None

    async def start(
        self, config: EngineConfig, factory: str, placement: StagePlacement
    ) -> Started | WavePPError:
        """Starts and builds the stages, compiles the graph, starts the core."""
        self._stages = StageGroup(config, factory, placement)
        facts = await self._stages.start()
        if isinstance(facts, WavePPError):
            return facts
        try:
            control = DriverControl(facts, driver_options(config))
            trace = TraceWriter(config.trace) if config.trace else None
        except WavePPError as error:
            return error
        planes = await self._stages.join()
        self._core = DriverCore(
            control,
            planes,
            planes,
            watchdog_s=config.watchdog_s,
            lease_alarm_s=config.lease_alarm_s,
            trace=trace,
            replace_stages=self._stages.replace,
        )
        return Started(facts=facts, semaphores=self._stages.semaphores)

    async def semaphores_after(self, known: frozenset[str]) -> frozenset[str]:
        """What the pipeline's graph made in /dev/shm, once that is not what is known."""
        assert self._stages is not None, "the engine is not started"
        async with self._stages.joined:
            await self._stages.joined.wait_for(lambda: self._names() != known)
            return self._names()

    async def submit(self, request: PrefillRequest, stream: bool) -> PrefillResult | WavePPError:
        """As EngineBackend.submit."""
        try:
            return await self._running().submit(request, stream=stream)
        except WavePPError as error:
            return error

    async def more(self, request_id: str, known: int) -> tuple[Produced, ...]:
        """As EngineBackend.more."""
        return await self._running().more(request_id, known)

    async def abort(self, request_id: str) -> bool:
        """As EngineBackend.abort."""
        return self._running().abort(request_id)

    async def stats(self) -> EngineStats | WavePPError:
        """As EngineBackend.stats."""
        try:
            return await self._running().stats()
        except WavePPError as error:
            return error

    async def reset_prefix_cache(self, stage: int | None) -> bool | WavePPError:
        """As EngineBackend.reset_prefix_cache."""
        try:
            return await self._running().reset_prefix_cache(stage)
        except WavePPError as error:
            return error

    async def check_health(self) -> WavePPError | None:
        """As EngineBackend.check_health."""
        try:
            self._running().check_alive()
        except WavePPError as error:
            return error
        return None

    async def close(self) -> None:
        """Ends requests, the graph and the stages, in this order."""
        if self._core is not None:
            await self._core.close()
        if self._stages is not None:
            await self._stages.close()

    def _names(self) -> frozenset[str]:
        return frozenset() if self._stages is None else self._stages.semaphores

    def _running(self) -> DriverCore:
        if self._core is None:
            raise EngineDeadError("the engine is not started")
        return self._core


RemoteDriverActor = ray.remote(DriverActor)
