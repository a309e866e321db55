"""Outputs with reuse equal outputs without it, whatever is shared, evicted, offloaded or given up,
and pools are conserved: 300 small workloads on real pipelines."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from checksum_executor import ChecksumExecutor, assert_served
from pipelines import config_of
from reuse_workloads import (
    Job,
    assert_conserved,
    check_rounds,
    draw_documents,
    draw_jobs,
    local,
    run_jobs,
)

from wavepp.actors.factories import torch_executor
from wavepp.actors.local import LocalPipeline
from wavepp.models.tiny import make_tiny
from wavepp.requests import PrefillResult

TOLERANCE = 2e-5

CHECKSUM_PIPELINES: dict[str, dict[str, Any]] = {
    "one stage": {"kinds": "FFFF", "layer_partition": (4,)},
    "one stage, hybrid": {"kinds": "RFSF", "layer_partition": (4,), "snapshot_interval": 8},
    "1+3": {"kinds": "FFFF", "layer_partition": (1, 3), "kv_offloading_size": 9.0},
    "3+1, windows": {"kinds": "FSFS", "layer_partition": (3, 1)},
    "2+1+1": {"kinds": "FFFF", "layer_partition": (2, 1, 1), "agreement": "stepwise"},
    "2+1+1, windows, host": {
        "kinds": "SFSF",
        "layer_partition": (2, 1, 1),
        "kv_offloading_size": 30.0,
    },
    "four stages": {"kinds": "FFFF", "layer_partition": (1, 1, 1, 1)},
    "four stages, one with attention": {
        "kinds": "RRRF",
        "layer_partition": (1, 1, 1, 1),
        "snapshot_interval": 4,
    },
    "1+2+1+2, hybrid, host": {
        "kinds": "FRSFRF",
        "layer_partition": (1, 2, 1, 2),
        "snapshot_interval": 8,
        "kv_offloading_size": 20.0,
    },
    "four stages, host, no deferral": {
        "kinds": "FFFF",
        "layer_partition": (1, 1, 1, 1),
        "kv_offloading_size": 12.0,
        "defer_shared_prefix": False,
    },
}
WORKLOADS_EACH = 24
FAMILIES = ("llama", "qwen3", "mistral_sliding", "qwen2")
MIXED_WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
}


@pytest.mark.parametrize("name", CHECKSUM_PIPELINES)
async def test_reuse_changes_no_answer_and_conserves_pools(name: str) -> None:
    options = dict(CHECKSUM_PIPELINES[name])
    kinds = options.pop("kinds")
    rng = random.Random(name)
    async with local(
        partial(ChecksumExecutor, kinds=kinds),
        pipeline_parallel_size=len(options["layer_partition"]),
        block_size=4,
        max_num_batched_tokens=16,
        num_gpu_blocks_override=26,
        max_num_seqs=4,
        **options,
    ) as pipeline:
        for _ in range(WORKLOADS_EACH):
            documents = draw_documents(rng, longest=56)
            jobs = draw_jobs(rng, documents, count=8, own_max=20)
            results = await run_jobs(pipeline, jobs)
            for job, result in zip(jobs, results, strict=True):
                check_checksum(job, result, kinds)
            await assert_conserved(pipeline)
        stats = await pipeline.stats()
        assert 0 < stats.prefix_hits < stats.prefix_queries
        assert min(stage.evicted for stage in stats.stages) > 0
        if "kv_offloading_size" in options:
            assert min(stage.offloaded for stage in stats.stages) > 0
        assert stats.invariant_violations == 0


def check_checksum(job: Job, result: PrefillResult, kinds: str) -> None:
    if result.finish_reason == "abort":
        assert job.abort_s is not None
        return
    assert_served(result, job.prompt, len(kinds), kinds=kinds)
    assert result.num_cached_tokens % 4 == 0
    assert result.num_cached_tokens < len(job.prompt)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("reuse")
    return {
        family: make_tiny(
            family, base / family, overrides=MIXED_WINDOWS if family == "qwen2" else None
        )
        for family in FAMILIES
    }


async def answers_without_reuse(folder: Path, jobs: list[Job]) -> list[PrefillResult]:
    config = config_of(transport="local", enable_prefix_caching=False, threads_per_stage=1)
    pipeline = LocalPipeline(config.model_copy(update={"model": str(folder)}), torch_executor)
    await pipeline.start()
    try:
        return await run_jobs(pipeline, [Job(job.prompt) for job in jobs], logprobs=5)
    finally:
        await pipeline.close()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("partition", "host_gib"),
    [((8,), None), ((1, 7), 0.01), ((3, 1, 4), None), ((2, 2, 3, 1), 0.01)],
)
async def test_row_d7_reuse_and_uneven_splits_change_no_logprob(
    folders: dict[str, Path], family: str, partition: tuple[int, ...], host_gib: float | None
) -> None:
    rng = random.Random(f"{family} {partition}")
    rounds = [
        draw_jobs(rng, draw_documents(rng, longest=90), count=5, own_max=30) for _ in range(5)
    ]
    plain = await answers_without_reuse(folders[family], [job for jobs in rounds for job in jobs])
    config = config_of(
        transport="local",
        pipeline_parallel_size=len(partition),
        layer_partition=partition,
        block_size=8,
        max_num_batched_tokens=48,
        num_gpu_blocks_override=26,
        max_num_seqs=3,
        kv_offloading_size=host_gib,
        threads_per_stage=1,
    )
    pipeline = LocalPipeline(
        config.model_copy(update={"model": str(folders[family])}), torch_executor
    )
    stats = await check_rounds(pipeline, rounds, plain, assert_same_answer)
    assert stats.prefix_hits > 0
    assert min(stage.evicted for stage in stats.stages) > 0
    assert all((stage.offloaded > 0) == (host_gib is not None) for stage in stats.stages)


def assert_same_answer(result: PrefillResult, expected: PrefillResult) -> None:
    assert result.error is None
    assert result.token_ids == expected.token_ids
    assert expected.num_cached_tokens == 0
    assert result.logprobs is not None
    assert expected.logprobs is not None
    ours, theirs = result.logprobs[0].top, expected.logprobs[0].top
    assert [entry.token_id for entry in ours] == [entry.token_id for entry in theirs]
    numbers = [entry.logprob for entry in theirs]
    assert [entry.logprob for entry in ours] == pytest.approx(numbers, abs=TOLERANCE)
