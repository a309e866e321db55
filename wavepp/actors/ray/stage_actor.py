"""StageActor: a StageCore in a process of its own.

Async methods are the mailbox (WAVE: the actor's event loop); `prepare` and `forward` are bound into
the compiled graph, which calls them from a thread of its own (LOOP).
"""

from __future__ import annotations

import asyncio
import importlib
from dataclasses import replace
from typing import Any, cast

import numpy as np
import ray

from wavepp.actors.ports import Carry, ExecutorFactory, Parcel, StageExecutor
from wavepp.actors.ray.semaphores import mapped_semaphores, unlink_semaphores
from wavepp.actors.stage import Prepared, StageCore, cache_options
from wavepp.config import EngineConfig
from wavepp.control.work import StageFacts
from wavepp.errors import WavePPError
from wavepp.protocol.messages import NO_WAVE, PromptRecord, RoundMessage, RoundReply, WaveSchedule
from wavepp.requests import StageStats
from wavepp.units import WaveNumber


class StageActor:
    """One stage of a pipeline on Ray; wrapped by `ray.remote` below."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._core: StageCore | None = None
        self._tensors_travel_apart = False

    async def build(
        self, config: EngineConfig, factory: str, epoch: int
    ) -> StageFacts | WavePPError:
        """Builds the executor named "module:name"; an error meant for the user is a value."""
        try:
            executor: StageExecutor = await asyncio.to_thread(
                _build_executor, config, factory, self._stage
            )
        except WavePPError as error:
            return error
        try:
            self._core = StageCore(executor, cache_options(config), epoch=epoch)
        except WavePPError as error:
            executor.close()
            return error
        self._tensors_travel_apart = config.device == "cuda"
        return self._core.facts

    async def begin(self, epoch: int) -> StageFacts:
        """Begins an epoch with the weights that are here and nothing cached. No graph runs now."""
        self._core = self._running().successor(epoch)
        return self._core.facts

    async def progress(self) -> WaveNumber:
        """The latest wave of this epoch that this stage has finished."""
        return self._running().control.finished_wave

    async def round(
        self, message: RoundMessage, prompts: tuple[PromptRecord, ...] | None = None
    ) -> RoundReply | None:
        """One round; None: it is of an epoch that is over. Large prompts come apart, through the
        object store, once for all stages."""
        if prompts is not None:
            message = replace(message, prompts=prompts)
        return await self._running().round(message)

    async def stats(self) -> StageStats:
        """One snapshot."""
        return await self._running().stats()

    async def reset(self) -> bool:
        """Drops what is cached and not in use; True: all of it."""
        return await self._running().reset()

    async def stacks(self) -> str:
        """What this stage's threads are doing."""
        return f"stage {self._stage}: {await self._running().stacks()}"

    async def live(self) -> None:
        """Never returns: a call to it fails when this process dies, without anybody asking."""
        await asyncio.Event().wait()

    async def semaphores(self) -> frozenset[str]:
        """The channel semaphores this process has open."""
        return mapped_semaphores()

    async def close(self) -> None:
        """Gives back what the executor holds, after the graph is gone."""
        if self._core is not None:
            self._core.executor.close()
        unlink_semaphores(mapped_semaphores())

    def prepare(self, schedule: WaveSchedule | None) -> Prepared | None:
        """LOOP: first step of a wave; None is the pass that warms the graph up."""
        return None if schedule is None else self._running().prepare(schedule)

    def forward(self, prepared: Prepared | None, parcel: Parcel | None = None) -> Parcel:
        """LOOP: second step of a wave."""
        if prepared is None:
            return Parcel(wave=NO_WAVE)
        if parcel is not None and parcel.carry is not None:
            parcel = replace(parcel, carry=from_wire(parcel.carry))
        after = self._running().forward(prepared, parcel)
        if after.carry is None or self._tensors_travel_apart:
            return after
        return replace(after, carry=to_wire(after.carry))

    def _running(self) -> StageCore:
        assert self._core is not None, f"stage {self._stage} is not built"
        return self._core


def _build_executor(config: EngineConfig, factory: str, stage: int) -> StageExecutor:
    # The loop of a compiled graph imports torch at its first step: not in the first wave's time.
    importlib.import_module("torch")
    return find_factory(factory)(config, stage)


def find_factory(name: str) -> ExecutorFactory:
    """The executor factory called "module:name"."""
    module, _, attribute = name.partition(":")
    return cast(ExecutorFactory, getattr(importlib.import_module(module), attribute))


def factory_name(factory: ExecutorFactory) -> str:
    """The name `find_factory` finds it by."""
    name = f"{factory.__module__}:{factory.__qualname__}"
    assert "<" not in name, f"{name} can't be imported by another process"
    return name


def to_wire(carry: Carry) -> Carry:
    """The carry as numpy arrays, which cross shared memory as plain buffers."""
    if all(isinstance(value, np.ndarray) for value in carry.values()):
        return carry
    from wavepp.actors.carry import pack_carry  # only executors with torch need torch here

    return pack_carry(carry)


def from_wire(carry: Carry) -> Carry:
    """What `to_wire` was given; its buffers are the channel's and read-only."""
    if all(isinstance(value, np.ndarray) for value in carry.values()):
        return carry
    from wavepp.actors.carry import unpack_carry

    return unpack_carry(carry)


StageHandle = Any  # a handle to a ray.remote(StageActor)
RemoteStageActor = ray.remote(StageActor)
