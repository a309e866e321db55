"""Running pipelines on both transports for the same tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from checksum_executor import checksum
from pipelines import STANDARD, assert_nothing_left, config_of

from wavepp.actors.local import LocalPipeline
from wavepp.actors.ports import EngineBackend


def run_apart(work: Coroutine[Any, Any, Any]) -> None:
    """Runs to the end on a loop of its own, whether or not this thread runs one."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        thread.submit(asyncio.run, work).result()


@pytest.fixture(scope="session")
def ray_pipeline(ray_session: Any) -> Iterator[EngineBackend]:
    """One pipeline on Ray for all tests that need nothing special: starting four stages takes
    seconds."""
    from wavepp.actors.ray.launch import RayPipeline

    pipeline = RayPipeline(config_of(transport="ray", **STANDARD), checksum)
    run_apart(pipeline.start())
    yield pipeline
    run_apart(pipeline.close())


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.ray)])
async def pipeline(request: pytest.FixtureRequest) -> AsyncIterator[EngineBackend]:
    """A standard pipeline; at the end of the test nothing of its requests may be left."""
    if request.param == "ray":
        shared: EngineBackend = request.getfixturevalue("ray_pipeline")
        yield shared
        await assert_nothing_left(shared)
        return
    local = LocalPipeline(config_of(transport="local", **STANDARD), checksum)
    await local.start()
    yield local
    await assert_nothing_left(local)
    await local.close()
