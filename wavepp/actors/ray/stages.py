"""The stage actors of one pipeline and the graph that joins them, epoch after epoch.

Owns: the actors, the compiled graph, the names its channels leave in shared memory. May not: know
requests. When stages die the others keep their weights: the graph is torn down, the dead ones are
replaced in the same places, and all are joined by another graph.

    start --> join --> ... a stage dies ... --> replace = tear down, begin | build, join --> ...
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from wavepp.actors.ports import NewEpoch
from wavepp.actors.ray.pipeline import RayPlanes, compile_graph, first_line
from wavepp.actors.ray.semaphores import mapped_semaphores, unlink_semaphores
from wavepp.actors.ray.stage_actor import RemoteStageActor, StageHandle
from wavepp.config import EngineConfig
from wavepp.control.work import StageFacts
from wavepp.errors import EngineDeadError, WavePPError

logger = logging.getLogger(__name__)

CLOSE_S_MAX = 10.0
REPLACE_TRIES = 3
"""Stages may die while others are replaced."""
BEGIN_S_MAX = 30.0
"""A stage that computes nothing and does not answer for so long counts as dead."""
PATIENCE_S_MIN = 60.0
"""For what a new process, or the end of a wave, may take on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlacement:
    """Where and how stage actors are started. `env`: what their processes lack; {}: nothing."""

    group: PlacementGroup
    num_cpus: float
    num_gpus: float
    env: Mapping[str, str]


class StageGroup:
    """All stages of a pipeline. Used by one task at a time, on the loop that runs the graph."""

    def __init__(self, config: EngineConfig, factory: str, placement: StagePlacement) -> None:
        self._config = config
        self._factory = factory
        self._placement = placement
        self._stages: list[StageHandle] = []
        self._graph: Any = None
        self._patience_s = max(config.watchdog_s, PATIENCE_S_MIN)  # for the longest wave's end
        self.semaphores: frozenset[str] = frozenset()  # that the graph made in /dev/shm
        self.joined = asyncio.Condition()  # notified when there is another graph

    async def start(self) -> tuple[StageFacts, ...] | WavePPError:
        """Starts and builds all stages; an error meant for the user is a value."""
        indices = range(self._config.pipeline_parallel_size)
        self._stages = [self._start_stage(index) for index in indices]
        builds = (stage.build.remote(self._config, self._factory, 1) for stage in self._stages)
        return _all_facts(await asyncio.gather(*builds))

    async def join(self) -> RayPlanes:
        """Compiles the graph and sends a pass without a wave through it: the first wave shall not
        pay for what Ray does at first use."""
        config = self._config
        self._graph = compile_graph(
            self._stages,
            ring_depth=config.ring_waves,
            device=config.device,
            blocking_sends=config.admission == "serial",
        )
        await (await self._graph.execute_async(None))
        # Every reader has opened them now.
        opened = await asyncio.gather(*(stage.semaphores.remote() for stage in self._stages))
        async with self.joined:
            self.semaphores = mapped_semaphores().union(*opened)
            self.joined.notify_all()
        return RayPlanes(tuple(self._stages), self._graph)

    async def replace(self, epoch: int) -> NewEpoch:
        """As ports.Replace."""
        replaced: set[int] = set()
        for tries_left in reversed(range(REPLACE_TRIES)):
            try:
                facts = await self._renew(epoch, replaced)
                planes = await asyncio.wait_for(self.join(), self._patience_s)
            except EngineDeadError:
                raise
            except Exception as error:  # a graph that loses a stage fails in many ways
                reason = f"stages were not replaced: {type(error).__name__}: {first_line(error)}"
                if not tries_left:
                    raise EngineDeadError(reason) from None
                logger.warning("%s; once more", reason)
            else:
                return NewEpoch(facts=facts, stages=planes, data=planes, replaced=len(replaced))
        raise AssertionError("the last try returns or raises")

    async def close(self) -> None:
        """Ends the graph and the stages, in this order."""
        await self._tear_down()
        stages, self._stages = self._stages, []
        closing = [asyncio.ensure_future(_close_stage(stage)) for stage in stages]
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_S_MAX)
        for stage in stages:
            ray.kill(stage)
        unlink_semaphores(mapped_semaphores())

    async def _renew(self, epoch: int, replaced: set[int]) -> tuple[StageFacts, ...]:
        """Every stage in the epoch, nothing cached; adds to `replaced` those that are new."""
        try:
            await asyncio.wait_for(self._tear_down(), self._patience_s)
        except TimeoutError:
            raise EngineDeadError(
                f"the stages did not stop within {self._patience_s:g} s"
            ) from None
        begun = await asyncio.gather(*(_begin(stage, epoch) for stage in self._stages))
        dead = [index for index, facts in enumerate(begun) if facts is None]
        for index in dead:
            ray.kill(self._stages[index])  # it may only be silent
            self._stages[index] = self._start_stage(index)
            replaced.add(index)
        built = await asyncio.gather(*(self._build(index, epoch) for index in dead))
        facts = _all_facts([built[dead.index(i)] if i in dead else f for i, f in enumerate(begun)])
        if isinstance(facts, WavePPError):
            raise EngineDeadError(f"a stage could not be replaced: {facts}")
        return facts

    async def _build(self, index: int, epoch: int) -> StageFacts | WavePPError:
        """Builds a stage that takes the place of another, as soon as there is room for it."""
        stage = self._stages[index]
        patience_s = max(self._config.wait_for_resources_s, PATIENCE_S_MIN)
        try:
            await asyncio.wait_for(stage.semaphores.remote(), patience_s)
        except TimeoutError:
            raise EngineDeadError(
                f"Ray had no room for a new stage {index} within {patience_s:g} s"
            ) from None
        facts: StageFacts | WavePPError = await stage.build.remote(
            self._config, self._factory, epoch
        )
        return facts

    async def _tear_down(self) -> None:
        """Ends the graph, if there is one. A stage that computes a wave ends it first."""
        if self._graph is not None:
            await asyncio.to_thread(self._graph.teardown)
            self._graph = None
            unlink_semaphores(self.semaphores)

    def _start_stage(self, index: int) -> StageHandle:
        placement = self._placement
        return RemoteStageActor.options(
            num_cpus=placement.num_cpus,
            num_gpus=placement.num_gpus,
            max_restarts=0,
            runtime_env=worker_environment(placement.env),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=placement.group, placement_group_bundle_index=index
            ),
        ).remote(index)


def worker_environment(env: Mapping[str, str]) -> dict[str, Any] | None:
    """The runtime_env that sets these variables; None where any worker will do."""
    return {"env_vars": dict(env)} if env else None


def _all_facts(
    answers: Sequence[StageFacts | WavePPError | None],
) -> tuple[StageFacts, ...] | WavePPError:
    """The facts of every stage, or the first error."""
    facts: list[StageFacts] = []
    for answer in answers:
        if isinstance(answer, WavePPError):
            return answer
        assert answer is not None, answers
        facts.append(answer)
    return tuple(facts)


async def _begin(stage: StageHandle, epoch: int) -> StageFacts | None:
    """None: the stage is dead, or as good as dead."""
    try:
        facts: StageFacts = await asyncio.wait_for(stage.begin.remote(epoch), BEGIN_S_MAX)
    except (ray.exceptions.RayActorError, TimeoutError):
        return None
    return facts


async def _close_stage(stage: StageHandle) -> None:
    try:
        await stage.close.remote()
    except ray.exceptions.RayError:
        return  # it is dead already, which is what was wanted
