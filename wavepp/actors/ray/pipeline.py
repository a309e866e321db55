"""The compiled graph over the stage actors, and the two planes that the driver uses.

    forward(prepare_0(wave)) -> forward(prepare_1(wave), parcel 0) -> ... -> parcel P-1 -> driver

Two methods of every actor are in the graph, so each stage prepares a wave the moment its schedule
arrives, while the wave is still upstream. Only the driver's event loop executes the graph:
`execute` is not safe for two threads, and a graph must be compiled inside the loop that awaits it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.dag import InputNode

from wavepp.actors.ports import Parcel, StageDiedError
from wavepp.actors.ray.channel import NappingType
from wavepp.actors.ray.stage_actor import StageHandle
from wavepp.actors.stage import all_replies
from wavepp.errors import EngineDeadError
from wavepp.protocol.messages import RoundMessage, RoundReply, WaveSchedule
from wavepp.requests import StageStats
from wavepp.units import WaveNumber

INLINE_TOKENS_MAX = 16384
DEATH_NEWS_S_MAX = 30.0
"""A broken channel is seen before Ray says which process died; on a busy machine long before."""
STAGE_STACKS_S_MAX = 3.0
PROGRESS_S_MAX = 3.0
SPARE_EXECUTIONS = 2
"""Executions the graph takes beyond the ring: its own count of what is out lags behind ours."""


def compile_graph(
    stages: Sequence[StageHandle], *, ring_depth: int, device: str, blocking_sends: bool = False
) -> Any:
    """Compiles the graph; call it inside the event loop that will execute it. Blocks.

    With blocking sends a channel between two stages of a node holds one parcel: a stage can't hand
    over the next one before this one was read. (It may compute it: the graph's writers know no
    rendezvous. Between nodes all parcels are buffered: see channel.py.)
    With device "cuda" activations travel by NCCL beside the parcels. Not run on a GPU.
    """
    buffers = ring_depth + SPARE_EXECUTIONS
    between = 1 if blocking_sends else buffers
    with InputNode() as schedule:
        schedule.type_hint = NappingType(local=buffers, remote=buffers)
        parcel: Any = None
        for stage in stages:
            prepared = stage.prepare.bind(schedule)
            prepared.type_hint = NappingType(local=buffers, remote=buffers)
            arguments = (prepared,) if parcel is None else (prepared, parcel)
            parcel = stage.forward.bind(*arguments)
            if device == "cuda" and stage is not stages[-1]:
                parcel = parcel.with_tensor_transport(transport="nccl")
            else:
                local = buffers if stage is stages[-1] else between
                parcel.type_hint = NappingType(local=local, remote=buffers)
    return parcel.experimental_compile(
        enable_asyncio=True,
        _max_inflight_executions=buffers,
        _overlap_gpu_communication=device == "cuda",
    )


class RayPlanes:
    """StagesPlane by actor calls, DataPlane by the compiled graph."""

    def __init__(self, stages: Sequence[StageHandle], graph: Any) -> None:
        self._stages = stages
        self._graph = graph
        self._launched: asyncio.Queue[Any] = asyncio.Queue()

    async def launch(self, schedule: WaveSchedule) -> None:
        """As DataPlane.launch."""
        try:
            self._launched.put_nowait(await self._graph.execute_async(schedule))
        except Exception as error:
            raise await self._why(error) from None

    async def collect(self) -> Parcel:
        """As DataPlane.collect. The parcel holds no view of the channel: it has no arrays."""
        wave = await self._launched.get()
        try:
            parcel: Parcel = await wave
        except Exception as error:
            raise await self._why(error) from None
        return parcel if parcel.carry is None else replace(parcel, carry=None)

    async def round(self, messages: Sequence[RoundMessage]) -> tuple[RoundReply, ...]:
        """As StagesPlane.round."""
        pairs = list(zip(self._stages, messages, strict=True))
        prompts = messages[0].prompts
        if sum(len(prompt.token_ids) for prompt in prompts) <= INLINE_TOKENS_MAX:
            calls = [stage.round.remote(message) for stage, message in pairs]
        else:
            shared = ray.put(prompts)
            calls = [
                stage.round.remote(replace(message, prompts=()), shared) for stage, message in pairs
            ]
        try:
            return all_replies(await asyncio.gather(*calls))
        except ray.exceptions.RayError as error:
            raise await self._why(error) from None

    async def stats(self) -> tuple[StageStats, ...]:
        """As StagesPlane.stats."""
        try:
            return tuple(await asyncio.gather(*(stage.stats.remote() for stage in self._stages)))
        except ray.exceptions.RayActorError as error:
            raise StageDiedError(first_line(error)) from None

    async def reset(self, stage: int | None) -> bool:
        """As StagesPlane.reset."""
        chosen = self._stages if stage is None else [self._stages[stage]]
        try:
            return all(await asyncio.gather(*(actor.reset.remote() for actor in chosen)))
        except ray.exceptions.RayActorError as error:
            raise StageDiedError(first_line(error)) from None

    async def stacks(self) -> str:
        """As StagesPlane.stacks."""
        calls = (_within(stage.stacks.remote(), index) for index, stage in enumerate(self._stages))
        return "\n".join(await asyncio.gather(*calls))

    async def wait_death(self) -> str:
        """As StagesPlane.wait_death: one call a stage that only ends with its process."""
        tasks = [
            asyncio.create_task(_await_death(stage, index))
            for index, stage in enumerate(self._stages)
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for task in tasks:
                task.cancel()

    async def end_stalled(self, launched: WaveNumber) -> str | None:
        """As StagesPlane.end_stalled."""
        index = stalled_stage(await asyncio.gather(*map(_progress, self._stages)), launched)
        if index is None:
            return None
        ray.kill(self._stages[index])
        return f"stage {index} held up the others and was ended"

    async def _why(self, error: Exception) -> Exception:
        """What is behind an error of Ray's: a stage's own exception, or which stage died. A graph
        that lost a stage fails in many ways, not all of them errors of Ray's kind."""
        if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, Exception):
            return error.cause
        try:
            return StageDiedError(await asyncio.wait_for(self.wait_death(), DEATH_NEWS_S_MAX))
        except TimeoutError:
            return EngineDeadError(f"{type(error).__name__}: {first_line(error)}")


def stalled_stage(finished: Sequence[WaveNumber | None], launched: WaveNumber) -> int | None:
    """Which stage the others wait for.

    Args:
        finished: the latest wave each stage has finished; None: it did not answer.
        launched: the latest wave that any of them got.

    Returns:
        The first silent stage; else the first of those that have finished least, if that is not
        all there was.
    """
    silent = [index for index, wave in enumerate(finished) if wave is None]
    if silent:
        return silent[0]
    waves = [wave for wave in finished if wave is not None]
    return waves.index(min(waves)) if min(waves) < launched else None


def first_line(error: Exception) -> str:
    """What an error says, without Ray's stacks."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


async def _progress(stage: StageHandle) -> WaveNumber | None:
    try:
        wave: WaveNumber = await asyncio.wait_for(stage.progress.remote(), PROGRESS_S_MAX)
    except (TimeoutError, ray.exceptions.RayError):
        return None
    return wave


async def _within(call: Any, index: int) -> str:
    try:
        return str(await asyncio.wait_for(call, STAGE_STACKS_S_MAX))
    except (TimeoutError, ray.exceptions.RayError) as error:
        return f"stage {index}: no answer ({type(error).__name__})"


async def _await_death(stage: StageHandle, index: int) -> str:
    try:
        await stage.live.remote()
    except ray.exceptions.RayError as error:
        return f"stage {index} died: {first_line(error)}"
    return f"stage {index} ended"
