"""RayPipeline: an EngineBackend whose stages and driver are Ray actors.

Owns: the cluster connection, the placement group and the driver actor. Whatever `start` has made
when it fails, or is cancelled, it gives back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Awaitable
from functools import partial
from typing import Any, TypeVar

from wavepp.actors.ports import ExecutorFactory
from wavepp.actors.ray import GRAPH_ENV
from wavepp.actors.ray.cluster import (
    Cluster,
    cpus_per_stage,
    give_back,
    reserve,
    threads_per_stage,
)
from wavepp.actors.ray.driver_actor import RemoteDriverActor, Started
from wavepp.actors.ray.semaphores import unlink_semaphores
from wavepp.actors.ray.stage_actor import factory_name
from wavepp.actors.ray.stages import StagePlacement, worker_environment
from wavepp.config import EngineConfig
from wavepp.control.work import StageFacts
from wavepp.errors import EngineDeadError, WavePPError
from wavepp.requests import EngineStats, PrefillRequest, PrefillResult, Produced

# isort: split
import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

logger = logging.getLogger(__name__)

T = TypeVar("T")

CALLS_MAX = 100_000  # calls the driver actor holds open at once: one a request
CLOSE_S_MAX = 60.0


class RayPipeline:
    """EngineBackend on Ray."""

    def __init__(self, config: EngineConfig, executor_factory: ExecutorFactory) -> None:
        self._config = with_whole_paths(config)
        self._factory = factory_name(executor_factory)
        self._cluster: Cluster | None = None
        self._group: PlacementGroup | None = None
        self._driver: Any = None
        self._semaphores: frozenset[str] = frozenset()
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> tuple[StageFacts, ...]:
        """As EngineBackend.start."""
        assert self._cluster is None, "started twice"
        try:
            await self._join_cluster()
            return await self._start_actors()
        except BaseException:
            await self.close()
            raise

    async def submit(self, request: PrefillRequest, *, stream: bool = False) -> PrefillResult:
        """As EngineBackend.submit."""
        driver = self._running()
        try:
            return await _answer(driver.submit.remote(request, stream))
        except asyncio.CancelledError:
            driver.abort.remote(request.request_id)
            raise

    async def more(self, request_id: str, known: int) -> tuple[Produced, ...]:
        """As EngineBackend.more."""
        more: tuple[Produced, ...] = await _answer(self._running().more.remote(request_id, known))
        return more

    async def abort(self, request_id: str) -> bool:
        """As EngineBackend.abort."""
        aborted: bool = await _answer(self._running().abort.remote(request_id))
        return aborted

    async def stats(self) -> EngineStats:
        """As EngineBackend.stats."""
        stats: EngineStats = await _answer(self._running().stats.remote())
        return stats

    async def reset_prefix_cache(self, stage: int | None = None) -> bool:
        """As EngineBackend.reset_prefix_cache."""
        done: bool = await _answer(self._running().reset_prefix_cache.remote(stage))
        return done

    async def check_health(self) -> None:
        """As EngineBackend.check_health."""
        await _answer(self._running().check_health.remote())

    async def close(self) -> None:
        """As EngineBackend.close."""
        if self._following is not None:
            self._following.cancel()
        driver, self._driver = self._driver, None
        if driver is not None and ray.is_initialized():
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
                await asyncio.wait_for(driver.close.remote(), CLOSE_S_MAX)
            ray.kill(driver)
        group, self._group = self._group, None
        if group is not None:
            give_back(group)
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            await asyncio.to_thread(cluster.leave)
        unlink_semaphores(self._semaphores)
        self._semaphores = frozenset()

    async def _join_cluster(self) -> None:
        """A start that is cancelled meanwhile still has a cluster to leave."""
        env = worker_env(threads_per_stage(self._config))
        join = partial(Cluster.join_or_start, env, wait_s=self._config.wait_for_resources_s)
        joining = asyncio.ensure_future(asyncio.to_thread(join))
        try:
            self._cluster = await asyncio.shield(joining)
        except asyncio.CancelledError:
            self._cluster = await joining
            raise

    async def _start_actors(self) -> tuple[StageFacts, ...]:
        config, cluster = self._config, self._cluster
        assert cluster is not None
        num_cpus = await asyncio.to_thread(cpus_per_stage, config)
        self._group = await reserve(config, num_cpus, may_grow=not cluster.is_own)
        placement = StagePlacement(
            group=self._group,
            num_cpus=num_cpus,
            num_gpus=1.0 if config.device == "cuda" else 0.0,
            env={} if cluster.is_own else worker_env(threads_per_stage(config)),
        )
        self._driver = RemoteDriverActor.options(
            num_cpus=0,
            max_restarts=0,
            max_concurrency=CALLS_MAX,
            runtime_env=worker_environment({} if cluster.is_own else worker_env(1)),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=0
            ),
        ).remote()
        started: Started = await _answer(
            self._driver.start.remote(config, self._factory, placement)
        )
        self._semaphores = started.semaphores
        self._following = asyncio.create_task(self._follow_semaphores(self._driver))
        return started.facts

    async def _follow_semaphores(self, driver: Any) -> None:
        """Notes what the graph of every epoch made: a driver that is killed can't clean up."""
        with contextlib.suppress(ray.exceptions.RayError):
            while True:
                self._semaphores = await driver.semaphores_after.remote(self._semaphores)

    def _running(self) -> Any:
        if self._driver is None:
            raise EngineDeadError("the engine is not started, or is closed")
        return self._driver


async def _answer(call: Awaitable[T | WavePPError]) -> T:
    """What the driver answers; its errors are values, its death is ours.

    Raises:
        WavePPError: the driver's answer.
        EngineDeadError: there is no driver any more.
    """
    try:
        answer = await call
    except ray.exceptions.RayActorError as error:
        raise EngineDeadError(f"the driver died: {str(error).strip().splitlines()[0]}") from None
    if isinstance(answer, WavePPError):
        raise answer
    return answer


def with_whole_paths(config: EngineConfig) -> EngineConfig:
    """The same configuration for processes that run in another folder."""
    paths = {"model": config.model, "trace": config.trace, "cost_model": config.cost_model}
    whole = {
        name: os.path.abspath(path)
        for name, path in paths.items()
        if path is not None and (name == "trace" or os.path.exists(path))
    }
    return config.model_copy(update=whole)


def worker_env(threads: int) -> dict[str, str]:
    """What worker processes need before they import anything: timeouts, threads, our modules."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**GRAPH_ENV, **dict.fromkeys(names, str(threads)), "PYTHONPATH": path}
