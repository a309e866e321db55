"""Models with recurrent layers: answers with reuse equal answers without, whatever is shared,
evicted, offloaded or given up; snapshots are bit-equal where they are restored."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from pipelines import config_of
from reuse_workloads import Job, check_rounds, draw_documents, draw_jobs, run_jobs
from watched_executor import WatchedExecutor

from wavepp.actors.executors import TorchExecutor
from wavepp.actors.local import LocalPipeline
from wavepp.config import EngineConfig
from wavepp.models.tiny import make_tiny
from wavepp.requests import PrefillResult

TOLERANCE = 1e-4
BLOCK = 64
ROUNDS = 3
PIPELINES: list[tuple[str, dict[str, Any]]] = [
    ("kimi_linear", {"layer_partition": (3, 5), "snapshot_interval": BLOCK}),
    ("kimi_linear", {"layer_partition": (4, 3, 1), "kv_offloading_size": 0.01}),
    ("kimi_k3", {"layer_partition": (4, 5), "kv_offloading_size": 0.01}),
    ("qwen3_next", {"layer_partition": (8,), "kv_offloading_size": 0.01}),
    ("qwen3_next", {"layer_partition": (1, 2, 5), "agreement": "stepwise"}),
    (
        "qwen3_5_text",
        {
            "layer_partition": (2, 3, 2, 1),
            "snapshot_interval": 2 * BLOCK,
            "kv_offloading_size": 0.02,
        },
    ),
]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("hybrid")
    return {family: make_tiny(family, base / family) for family, _ in PIPELINES}


@pytest.fixture(autouse=True)
def _many_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot for every four blocks, since the pools are small."""
    monkeypatch.setattr("wavepp.models.cache_pools.SNAPSHOT_TOKENS", 4 * BLOCK)


def config_for(folder: Path, options: dict[str, Any]) -> EngineConfig:
    stages = len(options["layer_partition"])
    config = config_of(
        transport="local",
        pipeline_parallel_size=stages,
        block_size=BLOCK,
        threads_per_stage=1,
        **options,
    )
    return config.model_copy(update={"model": str(folder)})


async def answers_without_reuse(folder: Path, jobs: list[Job]) -> list[PrefillResult]:
    config = config_for(folder, {"layer_partition": (9 if folder.name == "kimi_k3" else 8,)})
    pipeline = LocalPipeline(
        config.model_copy(update={"enable_prefix_caching": False}), TorchExecutor
    )
    await pipeline.start()
    try:
        return await run_jobs(pipeline, [Job(job.prompt) for job in jobs], logprobs=5)
    finally:
        await pipeline.close()


@pytest.mark.parametrize(("family", "options"), PIPELINES)
async def test_reuse_changes_no_logprob(
    folders: dict[str, Path], family: str, options: dict[str, Any]
) -> None:
    rng = random.Random(f"{family} {options}")
    documents = draw_documents(rng, longest=5 * BLOCK + 30)
    rounds = [draw_jobs(rng, documents, count=5, own_max=70) for _ in range(ROUNDS)]
    plain = await answers_without_reuse(folders[family], [job for jobs in rounds for job in jobs])
    made: list[WatchedExecutor] = []

    def executor(config: EngineConfig, stage: int) -> WatchedExecutor:
        made.append(WatchedExecutor(config, stage))
        return made[-1]

    small = {"max_num_batched_tokens": 2 * BLOCK, "num_gpu_blocks_override": 20, "max_num_seqs": 3}
    pipeline = LocalPipeline(config_for(folders[family], {**small, **options}), executor)
    stats = await check_rounds(pipeline, rounds, plain, assert_same_answer)
    assert stats.prefix_hits > 0
    assert stats.invariant_violations == 0
    for stage, watched in zip(stats.stages, sorted(made, key=lambda e: e.facts.stage), strict=True):
        recurrent = any(group.kind == "recurrent" for group in watched.facts.groups)
        assert stage.evicted > 0
        assert (stage.offloaded > 0) == ("kv_offloading_size" in options)
        assert not recurrent or watched.counts["saved"] > 0
        assert not recurrent or watched.counts["restored"] + watched.counts["host"] > 0


def assert_same_answer(result: PrefillResult, expected: PrefillResult) -> None:
    assert result.error is None
    assert result.token_ids == expected.token_ids
    assert expected.num_cached_tokens == 0
    assert result.num_cached_tokens % BLOCK == 0
    assert result.logprobs is not None
    assert expected.logprobs is not None
    ours = [entry.logprob for entry in result.logprobs[0].top]
    theirs = [entry.logprob for entry in expected.logprobs[0].top]
    assert ours == pytest.approx(theirs, abs=TOLERANCE)
