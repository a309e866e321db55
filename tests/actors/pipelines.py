"""Helpers of the tests that run whole pipelines."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from wavepp.actors.local import LocalPipeline
from wavepp.actors.ports import EngineBackend, ExecutorFactory
from wavepp.config import EngineConfig
from wavepp.requests import PrefillRequest

STANDARD: dict[str, Any] = {
    "pipeline_parallel_size": 4,
    "block_size": 4,
    "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 40,
    "max_num_seqs": 8,
    "planner": "greedy",  # whose waves can be counted beforehand
}

names = (f"r{number}" for number in itertools.count())


def config_of(**options: Any) -> EngineConfig:
    return EngineConfig(**{"model": "checksum", **options})


def request(tokens: Sequence[int], **fields: Any) -> PrefillRequest:
    """A request as the engine would pass it on; nothing about it is checked here."""
    fields.setdefault("request_id", next(names))
    return PrefillRequest.model_construct(prompt_token_ids=tuple(tokens), **fields)


def random_prompts(seed: int, count: int, *, longest: int = 90) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, size=count)
    return [rng.integers(10, 980, size=length).tolist() for length in lengths]


async def eventually(condition: Any, *, limit_s: float = 10.0) -> None:
    """Waits until an async condition holds; a failure, not a hang, if it never does."""
    deadline = time.monotonic() + limit_s
    while not await condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        await asyncio.sleep(0.01)


async def assert_nothing_left(pipeline: EngineBackend) -> None:
    async def is_empty() -> bool:
        stats = await pipeline.stats()
        used = sum(stage.blocks_used for stage in stats.stages)
        return used == stats.ring_occupancy == stats.requests_running == stats.requests_waiting == 0

    await eventually(is_empty)


@asynccontextmanager
async def running(
    transport: str, factory: ExecutorFactory, **options: Any
) -> AsyncIterator[EngineBackend]:
    config = config_of(transport=transport, **options)
    pipeline: EngineBackend
    if transport == "local":
        pipeline = LocalPipeline(config, factory)
    else:
        from wavepp.actors.ray.launch import RayPipeline

        pipeline = RayPipeline(config, factory)
    await pipeline.start()
    try:
        yield pipeline
    finally:
        await pipeline.close()
