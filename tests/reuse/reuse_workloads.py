"""Small random workloads with shared prefixes, and what must be true after each of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from pipelines import assert_nothing_left, config_of, eventually, request

from wavepp.actors.local import LocalPipeline
from wavepp.actors.ports import EngineBackend, ExecutorFactory
from wavepp.control.stage import StageControl
from wavepp.requests import EngineStats, PrefillResult

DOCUMENTS = 3


@dataclass(frozen=True)
class Job:
    """One request: when it comes, and after how long its caller gives up, in seconds."""

    prompt: tuple[int, ...]
    salt: str = ""
    at_s: float = 0.0
    abort_s: float | None = None


def draw_jobs(
    rng: random.Random, documents: Sequence[Sequence[int]], *, count: int, own_max: int
) -> list[Job]:
    """Questions on documents: a part of one, then tokens of their own; some are given up."""
    jobs = []
    for _ in range(count):
        document = rng.choice(documents)
        shared = document[: rng.choice([len(document), rng.randint(0, len(document))])]
        own = [rng.randint(10, 500) for _ in range(rng.randint(1, own_max))]
        abort_s = rng.uniform(0.0, 0.05) if rng.random() < 0.15 else None
        salt = rng.choice(["", "", "", "tenant"])
        jobs.append(Job((*shared, *own), salt, rng.uniform(0.0, 0.02), abort_s))
    return jobs


def draw_documents(rng: random.Random, *, longest: int) -> list[list[int]]:
    """Texts that part at random places."""
    first = [rng.randint(10, 500) for _ in range(longest)]
    documents = [first]
    while len(documents) < DOCUMENTS:
        kept = rng.randint(0, longest // 2)
        documents.append([*first[:kept], *(rng.randint(10, 500) for _ in range(longest - kept))])
    return documents


async def run_jobs(
    pipeline: EngineBackend, jobs: Sequence[Job], **fields: Any
) -> list[PrefillResult]:
    """All jobs at once; results in their order."""

    async def run(job: Job) -> PrefillResult:
        await asyncio.sleep(job.at_s)
        wanted = request(job.prompt, cache_salt=job.salt, **fields)
        task = asyncio.create_task(pipeline.submit(wanted))
        if job.abort_s is not None:
            await asyncio.sleep(job.abort_s)
            await pipeline.abort(wanted.request_id)
        return await task

    return await asyncio.gather(*(run(job) for job in jobs))


def controls(pipeline: LocalPipeline) -> list[StageControl]:
    """The stages of a pipeline in this process."""
    return [stage.core.control for stage in pipeline._stages if stage.core is not None]


async def assert_conserved(pipeline: LocalPipeline) -> None:
    """Idle: free + cached = pool on every stage; no pin, lease, escrow, slot or fence is left."""
    await assert_nothing_left(pipeline)
    driver = pipeline._running().control

    async def is_idle() -> bool:
        return not driver.is_busy and all(control.is_idle for control in controls(pipeline))

    await eventually(is_idle)
    driver.check()
    for control in controls(pipeline):
        control.check()
        assert control.cache.leftovers() is None


async def check_rounds(
    pipeline: LocalPipeline,
    rounds: Sequence[Sequence[Job]],
    plain: Sequence[PrefillResult],
    assert_same_answer: Callable[[PrefillResult, PrefillResult], None],
) -> EngineStats:
    """Runs a pipeline that is not started: the pools are conserved after each round, and who was
    not aborted got the answer that is in `plain`."""
    await pipeline.start()
    try:
        results = []
        for jobs in rounds:
            results += await run_jobs(pipeline, jobs, logprobs=5)
            await assert_conserved(pipeline)
        stats = await pipeline.stats()
    finally:
        await pipeline.close()
    for result, expected in zip(results, plain, strict=True):
        if result.finish_reason != "abort":
            assert_same_answer(result, expected)
    return stats


@asynccontextmanager
async def local(factory: ExecutorFactory, **options: Any) -> AsyncIterator[LocalPipeline]:
    """A pipeline in this process; at the end nothing may be left."""
    pipeline = LocalPipeline(config_of(transport="local", **options), factory)
    await pipeline.start()
    try:
        yield pipeline
        await assert_conserved(pipeline)
    finally:
        await pipeline.close()
