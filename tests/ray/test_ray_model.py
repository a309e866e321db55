"""A real model on Ray: activations cross shared memory unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pipelines import assert_nothing_left

from wavepp.actors.factories import torch_executor
from wavepp.actors.local import LocalPipeline
from wavepp.actors.ports import EngineBackend
from wavepp.actors.ray.launch import RayPipeline
from wavepp.config import EngineConfig
from wavepp.models.tiny import make_tiny
from wavepp.requests import PrefillRequest, PrefillResult

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]


async def answers(pipeline: EngineBackend, prompts: list[list[int]]) -> list[PrefillResult]:
    await pipeline.start()
    try:
        results = []
        for index, prompt in enumerate(prompts):  # one at a time: equal waves on both sides
            asked = PrefillRequest(
                request_id=str(index),
                prompt_token_ids=tuple(prompt),
                logprobs=3,
                prompt_logprobs=0 if index % 3 == 0 else None,
            )
            results.append(await pipeline.submit(asked))
        await assert_nothing_left(pipeline)
        return results
    finally:
        await pipeline.close()


def scores(result: PrefillResult) -> list[float]:
    assert result.logprobs is not None
    entries = [*result.logprobs, *(entry for entry in result.prompt_logprobs or () if entry)]
    return [score.logprob for entry in entries for score in (entry.chosen, *entry.top)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_answers_on_ray_are_those_in_process(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = make_tiny("mistral_sliding", tmp_path / "model", dtype=dtype)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 500, size=n).tolist() for n in (1, 7, 64, 65, 130, 200, 31)]
    options: dict[str, Any] = {
        "model": str(folder),
        "pipeline_parallel_size": 2,
        "layer_partition": (3, 5),
        "block_size": 16,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
        "threads_per_stage": 1,
    }
    here = await answers(
        LocalPipeline(EngineConfig(transport="local", **options), torch_executor), prompts
    )
    there = await answers(
        RayPipeline(EngineConfig(transport="ray", **options), torch_executor), prompts
    )
    for one, other in zip(here, there, strict=True):
        assert one.error is None
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(scores(one), scores(other), rtol=0, atol=2e-5)
