"""A stage's process dies and another takes its place: no request is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from checksum_executor import assert_served, checksum, checksum_20ms
from leftovers import assert_nothing_new, leftovers, stage_pids
from pipelines import (
    STANDARD,
    assert_nothing_left,
    config_of,
    eventually,
    random_prompts,
    request,
    running,
)
from ray_executors import builds_once

from wavepp.actors.ports import EngineBackend
from wavepp.errors import EngineDeadError

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

STAGES = 3
OPTIONS: dict[str, Any] = {
    **STANDARD,
    "pipeline_parallel_size": STAGES,
    "num_gpu_blocks_override": 100,
    "max_request_retries": 1,
}
TWO_STAGES: dict[str, Any] = {**STANDARD, "pipeline_parallel_size": 2}
PATIENCE_S = 60.0
LONG = [10] * 40
LONG_TOKENS = 90
"""Each takes three waves' time one after the other, 20 ms a wave."""


def run_apart(work: Coroutine[Any, Any, Any]) -> None:
    with ThreadPoolExecutor(max_workers=1) as thread:
        thread.submit(asyncio.run, work).result()


@pytest.fixture(scope="module")
def pipeline(ray_session: Any) -> Iterator[EngineBackend]:
    """One for all deaths; closed while a stage is replaced, it leaves nothing of any epoch."""
    from wavepp.actors.ray.launch import RayPipeline

    before = leftovers()
    pipeline = RayPipeline(config_of(transport="ray", **OPTIONS), checksum_20ms)
    run_apart(pipeline.start())
    yield pipeline
    run_apart(close_while_a_stage_is_replaced(pipeline))
    assert_nothing_new(before)


async def close_while_a_stage_is_replaced(pipeline: EngineBackend) -> None:
    tasks = [asyncio.create_task(pipeline.submit(request(LONG, max_tokens=20))) for _ in range(4)]
    await eventually(lambda: is_computing(pipeline), limit_s=PATIENCE_S)
    victim = psutil.Process((await stage_pids(pipeline))[1])
    victim.kill()
    victim.wait()
    await asyncio.sleep(0.5)
    await pipeline.close()
    reasons = {result.finish_reason for result in await asyncio.gather(*tasks)}
    assert "abort" in reasons
    assert reasons <= {"abort", "length", "stop"}


async def restarts(pipeline: EngineBackend) -> int:
    return (await pipeline.stats()).stage_restarts


async def assert_restarted(pipeline: EngineBackend, count: int) -> None:
    async def is_so() -> bool:
        return await restarts(pipeline) == count

    await eventually(is_so, limit_s=PATIENCE_S)


async def is_computing(pipeline: EngineBackend) -> bool:
    return (await pipeline.stats()).ring_occupancy > 1


async def tokens_told(pipeline: EngineBackend, name: str) -> list[int]:
    told: list[int] = []
    while more := await pipeline.more(name, len(told)):
        told += [produced.token_id for produced in more]
    return told


@pytest.mark.parametrize("victim", range(STAGES))
async def test_stage_that_dies_costs_time_and_no_answers(
    pipeline: EngineBackend, victim: int
) -> None:
    pids, count = await stage_pids(pipeline), await restarts(pipeline)
    prompts = random_prompts(victim, 24, longest=60)
    tasks = [
        asyncio.create_task(pipeline.submit(request(prompt, max_tokens=index % 4)))
        for index, prompt in enumerate(prompts)
    ]
    name = f"streamed {victim}"
    streamed = request(prompts[0], request_id=name, max_tokens=6)
    running_on = asyncio.create_task(pipeline.submit(streamed, stream=True))
    await asyncio.sleep(0)
    telling = asyncio.create_task(tokens_told(pipeline, name))
    await eventually(lambda: is_computing(pipeline), limit_s=PATIENCE_S)
    os.kill(pids[victim], signal.SIGKILL)
    tasks.append(asyncio.create_task(pipeline.submit(request([5] * 30, max_tokens=1))))
    await pipeline.check_health()
    results = await asyncio.gather(*tasks)
    for index, (result, prompt) in enumerate(zip(results, [*prompts, [5] * 30], strict=True)):
        assert_served(result, prompt, STAGES, index % 4 if index < len(prompts) else 1)
    told, result = await telling, await running_on
    assert_served(result, prompts[0], STAGES, 6)
    assert told == list(result.token_ids[:-1])  # the last one is told with the result
    after = await stage_pids(pipeline)
    assert [old == new for old, new in zip(pids, after, strict=True)] == [
        stage != victim for stage in range(STAGES)
    ]
    assert await restarts(pipeline) == count + 1
    await assert_nothing_left(pipeline)


async def test_who_is_computed_at_too_many_deaths_is_told_so(pipeline: EngineBackend) -> None:
    """The first time two stages die at once."""
    count = await restarts(pipeline)
    long = asyncio.create_task(pipeline.submit(request(LONG, max_tokens=LONG_TOKENS)))

    async def is_running() -> bool:
        stats = await pipeline.stats()
        return stats.requests_running > 0 and stats.ring_occupancy > 0

    for victims in ((0, 2), (1,)):
        await eventually(is_running, limit_s=PATIENCE_S)
        pids = await stage_pids(pipeline)
        for victim in victims:
            os.kill(pids[victim], signal.SIGKILL)
        other = asyncio.create_task(pipeline.submit(request([6] * 20)))
        count += len(victims)
        await assert_restarted(pipeline, count)
        assert_served(await other, [6] * 20, STAGES)
    result = await long
    assert result.finish_reason == "error"
    assert result.error is not None
    assert "stage 1 died" in result.error
    assert "each of the 2 times" in result.error
    assert await pipeline.reset_prefix_cache() is True
    assert_served(await pipeline.submit(request([7] * 20)), [7] * 20, STAGES)
    await assert_nothing_left(pipeline)


@pytest.fixture
def nothing_is_left(ray_session: Any) -> Iterator[None]:
    before = leftovers()
    yield
    assert_nothing_new(before)


@pytest.mark.usefixtures("nothing_is_left")
async def test_a_stage_that_can_not_be_replaced_ends_the_engine(tmp_path: Path) -> None:
    async with running("ray", builds_once, **TWO_STAGES, model=tmp_path) as pipeline:
        os.kill((await stage_pids(pipeline))[1], signal.SIGKILL)

        async def is_dead() -> bool:
            try:
                await pipeline.check_health()
            except EngineDeadError:
                return True
            return False

        await eventually(is_dead, limit_s=PATIENCE_S)
        with pytest.raises(EngineDeadError, match="could not be replaced: there is one already"):
            await pipeline.submit(request([5]))


@pytest.mark.usefixtures("nothing_is_left")
async def test_a_stopped_stage_is_replaced_when_work_waits() -> None:
    async with running("ray", checksum, **TWO_STAGES, watchdog_s=2.0) as pipeline:
        pid = (await stage_pids(pipeline))[1]
        os.kill(pid, signal.SIGSTOP)
        assert_served(await pipeline.submit(request([5])), [5], 2)
        assert await restarts(pipeline) == 1
        assert not psutil.pid_exists(pid)
