"""Reuse on Ray: the same workloads and the cases that depend on the transport."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from checksum_executor import assert_served, checksum
from pipelines import assert_nothing_left, request, running
from reuse_workloads import draw_documents, draw_jobs, run_jobs

from wavepp.actors.ports import EngineBackend

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]

OPTIONS: dict[str, Any] = {
    "pipeline_parallel_size": 3,
    "layer_partition": (1, 2, 1),
    "block_size": 4,
    "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 26,
    "max_num_seqs": 4,
    "kv_offloading_size": 12.0,
}


@pytest.fixture
async def three_stages() -> AsyncIterator[EngineBackend]:
    async with running("ray", checksum, **OPTIONS) as pipeline:
        yield pipeline
        await assert_nothing_left(pipeline)
        stats = await pipeline.stats()
        assert stats.invariant_violations == stats.leases == 0
        assert all(s.leases == s.escrows == s.escrow_blocks == 0 for s in stats.stages)


async def test_reuse_changes_no_answer(three_stages: EngineBackend) -> None:
    rng = random.Random(1)
    for _ in range(20):
        jobs = draw_jobs(rng, draw_documents(rng, longest=56), count=8, own_max=20)
        for job, result in zip(jobs, await run_jobs(three_stages, jobs), strict=True):
            if result.finish_reason != "abort":
                assert_served(result, job.prompt, 4)
        await assert_nothing_left(three_stages)
    stats = await three_stages.stats()
    assert 0 < stats.prefix_hits < stats.prefix_queries
    assert min(stage.evicted for stage in stats.stages) > 0
    assert min(stage.offloaded for stage in stats.stages) > 0


async def test_same_prompt_right_after_the_reply_hits(three_stages: EngineBackend) -> None:
    for length in (8, 33, 90):
        prompt = [(7 * i + length) % 900 + 10 for i in range(length)]
        for cached in (0, 4 * ((length - 1) // 4)):
            result = await three_stages.submit(request(prompt))
            assert_served(result, prompt, 4)
            assert result.num_cached_tokens == cached


async def test_one_stage_that_lost_its_cache_decides(three_stages: EngineBackend) -> None:
    prompt = list(range(10, 60))
    hits = []
    for lost in (None, None, 1, None):
        if lost is not None:
            assert await three_stages.reset_prefix_cache(lost) is True
        result = await three_stages.submit(request(prompt))
        assert_served(result, prompt, 4)
        hits.append(result.num_cached_tokens)
    assert hits == [0, 48, 0, 48]


async def test_large_prompts_travel_apart_and_are_right(three_stages: EngineBackend) -> None:
    """More tokens in a round than go inline: through the object store."""
    async with running(
        "ray",
        checksum,
        **{**OPTIONS, "num_gpu_blocks_override": 8000, "max_num_batched_tokens": 4096},
    ) as pipeline:
        prompt = [(7 * i) % 900 + 10 for i in range(20_000)]
        first = await pipeline.submit(request(prompt))
        again = await pipeline.submit(request(prompt))
    assert_served(first, prompt, 4)
    assert_served(again, prompt, 4)
    assert again.num_cached_tokens == 19_996
