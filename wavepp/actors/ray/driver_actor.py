"""DriverActor: a DriverCore in a process of its own, and the owner of the stage actors.

It compiles the graph inside its running loop and is the only one to execute it. The stages belong
to this actor: if it dies, Ray ends them too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from wavepp.actors.driver import DriverCore, driver_options
from wavepp.actors.ray.pipeline import RayPlanes, compile_graph
from wavepp.actors.ray.semaphores import mapped_semaphores, unlink_semaphores
from wavepp.actors.ray.stage_actor import RemoteStageActor, StageHandle
from wavepp.actors.trace import TraceWriter
from wavepp.config import EngineConfig
from wavepp.control.driver import DriverControl
from wavepp.control.work import StageFacts
from wavepp.errors import EngineDeadError, WavePPError
from wavepp.requests import EngineStats, PrefillRequest, PrefillResult, Produced

CLOSE_S_MAX = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlacement:
    """Where and how stage actors are started. `env`: what their processes lack; {}: nothing."""

    group: PlacementGroup
    num_cpus: float
    num_gpus: float
    env: Mapping[str, str]


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
        self._stages: list[StageHandle] = []
        self._graph: Any = None

    async def start(
        self, config: EngineConfig, factory: str, placement: StagePlacement
    ) -> Started | WavePPError:
        """Starts and builds the stages, compiles the graph, starts the core."""
        self._stages = [
            _start_stage(index, placement) for index in range(config.pipeline_parallel_size)
        ]
        built = await asyncio.gather(*(s.build.remote(config, factory) for s in self._stages))
        facts: list[StageFacts] = []
        for outcome in built:
            if isinstance(outcome, WavePPError):
                return outcome
            facts.append(outcome)
        try:
            control = DriverControl(facts, driver_options(config))
            trace = TraceWriter(config.trace) if config.trace else None
        except WavePPError as error:
            return error
        self._graph = compile_graph(
            self._stages,
            ring_depth=config.ring_waves,
            device=config.device,
            blocking_sends=config.admission == "serial",
        )
        semaphores = await self._warm_up()
        planes = RayPlanes(self._stages, self._graph)
        self._core = DriverCore(
            control,
            planes,
            planes,
            watchdog_s=config.watchdog_s,
            lease_alarm_s=config.lease_alarm_s,
            trace=trace,
        )
        return Started(facts=tuple(facts), semaphores=semaphores)

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
        if self._graph is not None:
            graph, self._graph = self._graph, None
            await asyncio.to_thread(graph.teardown)
        stages, self._stages = self._stages, []
        closing = [asyncio.ensure_future(_close_stage(stage)) for stage in stages]
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_S_MAX)
        for stage in stages:
            ray.kill(stage)
        unlink_semaphores(mapped_semaphores())

    async def _warm_up(self) -> frozenset[str]:
        """Sends a pass without a wave through the graph: the first wave shall not pay for what Ray
        does at first use. Returns the semaphores, which every reader has opened now."""
        await (await self._graph.execute_async(None))
        opened = await asyncio.gather(*(stage.semaphores.remote() for stage in self._stages))
        return mapped_semaphores().union(*opened)

    def _running(self) -> DriverCore:
        if self._core is None:
            raise EngineDeadError("the engine is not started")
        return self._core


def worker_environment(env: Mapping[str, str]) -> dict[str, Any] | None:
    """The runtime_env that sets these variables; None where any worker will do."""
    return {"env_vars": dict(env)} if env else None


def _start_stage(index: int, placement: StagePlacement) -> StageHandle:
    return RemoteStageActor.options(
        num_cpus=placement.num_cpus,
        num_gpus=placement.num_gpus,
        max_restarts=0,
        runtime_env=worker_environment(placement.env),
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            placement_group=placement.group, placement_group_bundle_index=index
        ),
    ).remote(index)


async def _close_stage(stage: StageHandle) -> None:
    try:
        await stage.close.remote()
    except ray.exceptions.RayError:
        return  # it is dead already, which is what was wanted


RemoteDriverActor = ray.remote(DriverActor)
