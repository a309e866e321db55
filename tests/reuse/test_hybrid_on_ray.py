"""Recurrent state on Ray: hits, and answers, are those of the same pipeline in one process."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from pipelines import assert_nothing_left, request

from wavepp.actors.factories import torch_executor
from wavepp.actors.local import LocalPipeline
from wavepp.actors.ports import EngineBackend
from wavepp.actors.ray.launch import RayPipeline
from wavepp.config import EngineConfig
from wavepp.models.tiny import make_tiny
from wavepp.requests import PrefillResult

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]

B = 64


async def answers(pipeline: EngineBackend, prompts: list[list[int]]) -> list[PrefillResult]:
    await pipeline.start()
    try:  # one at a time: equal waves on both sides
        results = [await pipeline.submit(request(prompt, logprobs=3)) for prompt in prompts]
        await assert_nothing_left(pipeline)
        return results
    finally:
        await pipeline.close()


async def test_states_on_ray_are_those_in_process(tmp_path: Path) -> None:
    """Kimi K3, cut inside a block of residuals."""
    folder = make_tiny("kimi_k3", tmp_path / "model")
    rng = random.Random(0)
    shared = [rng.randrange(5, 500) for _ in range(5 * B)]
    prompts = [
        [*shared[:at], *(rng.randrange(5, 500) for _ in range(own))]
        for at, own in ((320, 30), (320, 50), (192, 70), (192, 20), (64, 100), (320, 1))
    ]
    options: dict[str, Any] = {
        "model": str(folder),
        "pipeline_parallel_size": 2,
        "layer_partition": (4, 5),
        "block_size": B,
        "max_num_batched_tokens": 2 * B,
        "num_gpu_blocks_override": 40,
        "kv_offloading_size": 0.01,
        "max_num_seqs": 4,
        "threads_per_stage": 1,
    }
    here = await answers(
        LocalPipeline(EngineConfig(transport="local", **options), torch_executor), prompts
    )
    there = await answers(
        RayPipeline(EngineConfig(transport="ray", **options), torch_executor), prompts
    )
    hits = [result.num_cached_tokens for result in there]
    assert hits == [result.num_cached_tokens for result in here]
    assert hits == [0, 320, 0, 192, 0, 320]
    for one, other in zip(here, there, strict=True):
        assert one.error is None
        assert one.token_ids == other.token_ids
        assert one.logprobs is not None
        assert other.logprobs is not None
        numbers = [entry.logprob for entry in one.logprobs[0].top]
        assert [entry.logprob for entry in other.logprobs[0].top] == pytest.approx(
            numbers, abs=2e-5
        )
