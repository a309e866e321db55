"""Whole pipelines on emulated devices: answers, device times, where the time went."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wavepp import Engine, EngineConfig
from wavepp.emulated.prompt_digest import digest_of, token_of
from wavepp.requests import EngineStats, PrefillResult

B = 16
Spans = dict[int, list[tuple[float, float]]]


def config(**options: Any) -> EngineConfig:
    named = {"device": "emulated", "transport": "local", "block_size": B, **options}
    return EngineConfig(**named)


def draw(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 30_000, size=length).tolist()


async def answers(engine: Engine, prompts: list[list[int]]) -> list[PrefillResult]:
    return list(await asyncio.gather(*(engine.prefill(prompt) for prompt in prompts)))


def device_spans(trace: Path) -> Spans:
    """Stage -> when its device was busy, wave by wave."""
    spans: Spans = {}
    for line in trace.read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "wave":
            report = record["value"]["report"]
            stage = report["ack"]["stage"]
            spans.setdefault(stage, []).append((report["forward_from_s"], report["done_s"]))
    return {stage: sorted(found) for stage, found in spans.items()}


async def test_first_token_is_a_hash_of_the_whole_prompt_however_it_was_reused() -> None:
    prompts = [draw(1, 200), draw(1, 200)[:150] + draw(2, 77), draw(3, 31), draw(1, 200)]
    options = {"pipeline_parallel_size": 3, "max_num_batched_tokens": 48, "time_scale": 0.01}
    async with Engine(config(cost_model="uniform", **options)) as engine:
        results = await answers(engine, prompts)
        results += await answers(engine, prompts)
    for prompt, result in zip(prompts * 2, results, strict=True):
        assert result.token_ids == (token_of(digest_of(prompt), 32000),)
    assert results[4].num_cached_tokens == 192


async def test_recurrent_layers_are_snapshots_and_slots() -> None:
    prompts = [draw(1, 1500), draw(1, 1500)[:1000] + draw(2, 300), draw(3, 200)]
    options = {"pipeline_parallel_size": 8, "max_num_batched_tokens": 256, "time_scale": 0.001}
    async with Engine(
        config(cost_model="b300-kimi-k3", block_size=64, num_gpu_blocks_override=200, **options)
    ) as engine:
        results = await answers(engine, prompts)
        results += await answers(engine, prompts)
        stats = await engine.stats()
    for prompt, result in zip(prompts * 2, results, strict=True):
        assert result.token_ids == (token_of(digest_of(prompt), 163840),)
    assert [result.num_cached_tokens for result in results[3:]] == [1472, 1280, 192]
    assert stats.invariant_violations == 0


async def test_log_probabilities_are_refused_and_others_go_on() -> None:
    options = {"pipeline_parallel_size": 2, "time_scale": 0.01}
    async with Engine(config(cost_model="uniform", **options)) as engine:
        refused = await engine.prefill(draw(1, 40), logprobs=2)
        served = await engine.prefill(draw(1, 40))
    assert refused.finish_reason == "error"
    assert refused.error is not None
    assert "computes no logits" in refused.error
    assert served.finish_reason == "length"


@pytest.mark.alone
async def test_one_cold_prompt_of_eight_chunks_leaves_four_stages_no_idler_than_it_must(
    tmp_path: Path,
) -> None:
    """By the devices' own times: (P-1) / (8+P-1) of them is the fill and drain of the pipeline."""
    stages, chunks, tokens = 4, 8, 3200
    trace = tmp_path / "trace.jsonl"
    options = {"pipeline_parallel_size": stages, "max_num_batched_tokens": tokens}
    named = {"cost_model": "uniform", "planner": "static", "trace": trace}
    async with Engine(config(**named, **options)) as engine:
        await engine.prefill(draw(1, chunks * tokens))
    spans = device_spans(trace)
    assert [len(spans[stage]) for stage in range(stages)] == [chunks] * stages
    whole_s = spans[stages - 1][-1][1] - spans[0][0][0]
    busy_s = sum(done - begin for found in spans.values() for begin, done in found)
    assert busy_s == pytest.approx(stages * chunks * tokens * 16 / stages * 5e-6)
    idle = 1 - busy_s / (stages * whole_s)
    assert (stages - 1) / (chunks + stages - 1) - 1e-6 <= idle
    assert idle <= (stages - 1) / (chunks + stages - 1) + 0.05


@pytest.mark.alone
async def test_every_moment_of_a_stage_is_accounted_for() -> None:
    options = {"pipeline_parallel_size": 2, "max_num_batched_tokens": 64, "time_scale": 0.1}
    async with Engine(config(cost_model="h200-dense-8b", **options)) as engine:
        before = await engine.stats()
        await answers(engine, [draw(seed, 300) for seed in range(4)])
        after = await engine.stats()
    for stage in range(2):
        spent_s = accounted_s(after, stage) - accounted_s(before, stage)
        assert spent_s == pytest.approx(after.wall_s - before.wall_s, abs=0.02)


def accounted_s(stats: EngineStats, stage: int) -> float:
    found = stats.stages[stage]
    return found.busy_s + sum(found.wait_s.values()) + found.idle_s


@pytest.mark.ray
async def test_emulated_stages_run_on_ray(ray_session: Any) -> None:
    prompts = [draw(1, 200), draw(1, 200)[:150] + draw(2, 77)]
    options = {"pipeline_parallel_size": 2, "max_num_batched_tokens": 64, "time_scale": 0.01}
    async with Engine(config(cost_model="uniform", **options | {"transport": "ray"})) as engine:
        results = await answers(engine, prompts)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == (token_of(digest_of(prompt), 32000),)
