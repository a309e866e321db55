"""A stage's process dies and another takes its place: no request is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest
from checksum_executor import assert_served, checksum_20ms
from pipelines import STANDARD, assert_nothing_left, eventually, random_prompts, request, running

from wavepp.actors.ports import EngineBackend

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(300)]

OPTIONS: dict[str, Any] = {**STANDARD, "pipeline_parallel_size": 3, "max_request_retries": 1}


async def stage_pids(pipeline: EngineBackend) -> list[int]:
    return [stage.pid for stage in (await pipeline.stats()).stages]


async def test_x() -> None:
    async with running("ray", checksum_20ms, **OPTIONS) as pipeline:
        for victim in (1, 0, 2):
            pids = await stage_pids(pipeline)
            prompts = random_prompts(victim, 30)
            tasks = [asyncio.create_task(pipeline.submit(request(p, max_tokens=i % 4))) for i, p in enumerate(prompts)]
            await asyncio.sleep(0.5)
            print((await pipeline.stats()).ring_occupancy)
            t = time.monotonic()
            os.kill(pids[victim], signal.SIGKILL)
            results = await asyncio.gather(*tasks)
            print("took", time.monotonic() - t)
            for i, (r, p) in enumerate(zip(results, prompts)):
                assert_served(r, p, 3, i % 4)
            await assert_nothing_left(pipeline)
            after = await stage_pids(pipeline)
            print(pids, after, (await pipeline.stats()).stage_restarts)
