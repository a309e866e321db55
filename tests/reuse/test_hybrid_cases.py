"""Reuse of recurrent state on real pipelines, case by case: prompts that part, stages that lack
a snapshot."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pipelines import request
from reuse_workloads import assert_conserved, controls, local
from watched_executor import WatchedExecutor

from wavepp.actors.executors import TorchExecutor
from wavepp.actors.factories import torch_executor
from wavepp.actors.local import LocalPipeline
from wavepp.cache.keys import make_prompt
from wavepp.cache.types import best_endpoint
from wavepp.config import EngineConfig
from wavepp.models.tiny import make_tiny
from wavepp.requests import PrefillResult

B = 64
FAMILIES = ("kimi_linear", "qwen3_5_text")
OPTIONS: dict[str, Any] = {
    "pipeline_parallel_size": 2,
    "layer_partition": (3, 5),  # the first stage has no attention
    "block_size": B,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 80,
    "max_num_seqs": 4,
    "threads_per_stage": 1,
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("hybrid-cases")
    return {family: make_tiny(family, base / family) for family in FAMILIES}


def engine(
    folder: Path, factory: Any = torch_executor, **options: Any
) -> AbstractAsyncContextManager[LocalPipeline]:
    return local(factory, **{**OPTIONS, **options, "model": str(folder)})


@asynccontextmanager
async def plain_engine(folder: Path) -> AsyncIterator[LocalPipeline]:
    """One stage that keeps nothing."""
    options = {"pipeline_parallel_size": 1, "layer_partition": (8,), "enable_prefix_caching": False}
    async with engine(folder, **options) as pipeline:
        yield pipeline


async def serve(pipeline: LocalPipeline, prompt: Sequence[int]) -> PrefillResult:
    result = await pipeline.submit(request(prompt, logprobs=5))
    assert result.error is None
    return result


def assert_same(result: PrefillResult, expected: PrefillResult) -> None:
    assert result.logprobs is not None
    assert expected.logprobs is not None
    assert result.token_ids == expected.token_ids
    ours, theirs = (
        [entry.logprob for entry in answer.logprobs[0].top] for answer in (result, expected)
    )
    assert ours == pytest.approx(theirs, abs=1e-4)


def drawn(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, 500) for _ in range(count)]


@pytest.mark.parametrize(("family", "budget"), [("kimi_linear", 128), ("qwen3_5_text", 1024)])
async def test_third_of_three_prompts_hits_where_the_first_two_part(
    folders: dict[str, Path], family: str, budget: int
) -> None:
    """They share 20 blocks: the second finds keys and values there but no state, and saves one."""
    rng = random.Random(family)
    shared = drawn(rng, 20 * B)
    prompts = [[*shared, *drawn(rng, own)] for own in (70, 130, 40)]
    async with (
        plain_engine(folders[family]) as plain,
        engine(folders[family], max_num_batched_tokens=budget) as pipeline,
    ):
        results = [await serve(pipeline, prompt) for prompt in prompts]
        assert [result.num_cached_tokens for result in results] == [0, 0, 20 * B]
        again = await serve(pipeline, prompts[1])
        assert again.num_cached_tokens == 22 * B
        assert_same(again, results[1])
        for prompt, result in zip(prompts, results, strict=True):
            assert_same(result, await serve(plain, prompt))


@pytest.mark.parametrize("lost", [0, 1])
async def test_stage_without_a_snapshot_decides(folders: dict[str, Path], lost: int) -> None:
    rng = random.Random(lost)
    shared = drawn(rng, 5 * B)
    prompts = [[*shared[:at], *drawn(rng, 45)] for at in (320, 320, 256, 100, 64)]
    async with (
        plain_engine(folders["kimi_linear"]) as plain,
        engine(folders["kimi_linear"], snapshot_interval=B) as pipeline,
    ):
        await serve(pipeline, prompts[0])
        hits = []
        for turn, prompt in enumerate(prompts):
            if turn == 2:
                assert await pipeline.reset_prefix_cache(lost) is True
            result = await serve(pipeline, prompt)
            assert_same(result, await serve(plain, prompt))
            hits.append(result.num_cached_tokens)
        assert hits == [320, 320, 0, 64, 64]  # the third left states for those after it


async def test_endpoint_is_the_best_that_all_stages_can_use(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages keep unequally many snapshots and blocks."""
    monkeypatch.setattr("wavepp.models.cache_pools.SNAPSHOT_TOKENS", 4 * B)
    blocks = (60, 16, 28)

    def factory(config: EngineConfig, stage: int) -> TorchExecutor:
        own = config.model_copy(update={"num_gpu_blocks_override": blocks[stage]})
        return TorchExecutor(own, stage)

    rng = random.Random(2)
    documents = [drawn(rng, 4 * B + 20) for _ in range(4)]
    options = {"pipeline_parallel_size": 3, "layer_partition": (3, 4, 1), "max_num_seqs": 2}
    lower = hits = 0
    async with (
        plain_engine(folders["kimi_linear"]) as plain,
        engine(folders["kimi_linear"], factory, snapshot_interval=B, **options) as pipeline,
    ):
        for _ in range(16):
            document = rng.choice(documents)
            prompt = [*document[: rng.choice([len(document), 2 * B])], *drawn(rng, 30)]
            await assert_conserved(pipeline)
            asked = make_prompt(prompt, B)
            votes = [control.cache.hint(asked).reuse for control in controls(pipeline)]
            expected = best_endpoint(votes, asked.reuse_cap)
            lower += expected < max(vote.highest(asked.reuse_cap) for vote in votes)
            result = await serve(pipeline, prompt)
            assert result.num_cached_tokens == expected
            hits += expected > 0
            assert_same(result, await serve(plain, prompt))
    assert lower > 2
    assert hits > 2


async def test_given_up_half_way_leaves_states_that_are_right(folders: dict[str, Path]) -> None:
    """Chunks of the first are on their way through the stages when it ends; what it published is
    used by the next."""
    rng = random.Random(5)
    first = drawn(rng, 1200)
    async with (
        plain_engine(folders["kimi_linear"]) as plain,
        engine(
            folders["kimi_linear"],
            max_num_batched_tokens=64,
            snapshot_interval=B,
            kv_offloading_size=0.01,
        ) as pipeline,
    ):
        task = asyncio.create_task(pipeline.submit(request(first, request_id="given up")))
        while (await pipeline.stats()).stages[1].waves < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await pipeline.abort("given up")
        assert (await task).finish_reason == "abort"
        prompt = [*first[:600], *drawn(rng, 40)]
        result = await serve(pipeline, prompt)
        assert 4 * B <= result.num_cached_tokens < 600
        assert_same(result, await serve(plain, prompt))


async def test_states_come_back_from_the_host(folders: dict[str, Path]) -> None:
    """Three prompts in turn, where the device has room for the states of two."""
    rng = random.Random(6)
    prompts = [drawn(rng, 3 * B + 9) for _ in range(3)]
    made: list[WatchedExecutor] = []

    def factory(config: EngineConfig, stage: int) -> WatchedExecutor:
        made.append(WatchedExecutor(config, stage))
        return made[-1]

    options = {"max_num_seqs": 2, "num_gpu_blocks_override": 9, "kv_offloading_size": 0.02}
    async with (
        plain_engine(folders["kimi_linear"]) as plain,
        engine(folders["kimi_linear"], factory, **options) as pipeline,
    ):
        for prompt in prompts:
            await serve(pipeline, prompt)
        for prompt in prompts:
            result = await serve(pipeline, prompt)
            assert result.num_cached_tokens == 3 * B
            assert_same(result, await serve(plain, prompt))
        stats = await pipeline.stats()
    assert all(stage.offloaded > 0 for stage in stats.stages)
    assert all(0 < stage.snapshots_filled <= stage.snapshots_total for stage in stats.stages)
    assert stats.stages[1].brought_back > 0
    assert all(watched.counts["host"] > 0 for watched in made)
