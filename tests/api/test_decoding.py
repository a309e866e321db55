"""Answers of more than one token: the same as transformers' own, streamed or not."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from wavepp import Engine, EngineConfig, RequestError
from wavepp.requests import PrefillResult

LENGTHS = (1, 7, 64, 65, 130, 200)


def config(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(
        **{"model": folder, "transport": "local", "threads_per_stage": 1, **options}
    )


def random_prompts(seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 512) for _ in range(length)] for length in LENGTHS]


@torch.inference_mode()
def generated(folder: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        answers.append(whole[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize(
    "options", [{}, {"pipeline_parallel_size": 3, "max_num_batched_tokens": 48, "block_size": 16}]
)
async def test_greedy_answers_are_those_of_transformers(
    tiny_llama: Path, options: dict[str, Any]
) -> None:
    prompts = random_prompts()
    expected = generated(tiny_llama, prompts, 24)
    async with Engine(config(tiny_llama, **options)) as engine:
        eos = engine.facts[-1].eos_token_ids
        for _ in range(2):  # the second time from the cache
            requests = [
                await engine.request(prompt, max_tokens=24, ignore_eos=True, logprobs=1)
                for prompt in prompts
            ]
            results = await engine.submit_all(requests)
            for result, answer in zip(results, expected, strict=True):
                # min_new_tokens forbids transformers the end, ignore_eos does not: they part there.
                same = next((i for i, t in enumerate(result.token_ids) if t in eos), 24)
                assert list(result.token_ids[:same]) == answer[:same]
                assert len(result.token_ids) == len(result.logprobs or ()) == 24
                assert result.finish_reason == "length"
        assert [result.num_cached_tokens > 0 for result in results] == [
            length > engine.config.block_size for length in LENGTHS
        ]
        stats = await engine.stats()
    assert stats.requests_running == stats.leases == 0
    assert all(stage.blocks_used == stage.escrows == 0 for stage in stats.stages)


async def answer(engine: Engine, prompt: Any, **options: Any) -> PrefillResult:
    return await engine.prefill(prompt, **{"max_tokens": 12, "ignore_eos": True, **options})


async def test_answers_end_where_they_are_told(tiny_llama: Path) -> None:
    async with Engine(config(tiny_llama)) as engine:
        whole = await answer(engine, [5, 6, 7])
        third = whole.token_ids[2]
        first_place = whole.token_ids.index(third)
        short = await answer(engine, [5, 6, 7], stop_token_ids=[third], prompt_logprobs=0)
    assert short.token_ids == whole.token_ids[: first_place + 1]
    assert (short.finish_reason, short.stop_reason) == ("stop", third)
    assert whole.stop_reason is None
    assert short.prompt_logprobs is not None
    assert len(short.prompt_logprobs) == 3


async def test_stop_strings_end_the_text_before_them(tiny_llama: Path) -> None:
    async with Engine(config(tiny_llama)) as engine:
        tokenizer = engine.tokenizer
        assert tokenizer is not None
        whole = await answer(engine, "Once upon a time", max_tokens=32, logprobs=0)
        text = await engine.detokenize(whole.token_ids)
        stop = text[len(text) // 2 :][:3]
        assert stop
        for more in ({}, {"prompt_logprobs": 0}):  # with and without an early end
            cut = await answer(
                engine, "Once upon a time", max_tokens=32, stop=["absent", stop], logprobs=0, **more
            )
            assert cut.text == text[: text.index(stop)]
            assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
            assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
            assert len(cut.logprobs or ()) == len(cut.token_ids)
            assert stop in await engine.detokenize(cut.token_ids)
        full = await answer(engine, "Once upon a time", max_tokens=32, stop="absent")
        assert (full.text, full.token_ids) == (text, whole.token_ids)
        with pytest.raises(RequestError, match="stop"):
            await answer(engine, "Once", stop=[""])


async def test_streams_tell_what_the_result_says(tiny_llama: Path) -> None:
    async with Engine(config(tiny_llama, pipeline_parallel_size=2)) as engine:
        plain = await answer(engine, "Hello there", logprobs=2)
        steps = [
            step
            async for step in engine.stream(
                "Hello there", max_tokens=12, ignore_eos=True, logprobs=2
            )
        ]
        text = await engine.detokenize(plain.token_ids)
    assert len(steps) > 1
    assert [step.result is None for step in steps] == [True] * (len(steps) - 1) + [False]
    result = steps[-1].result
    assert result is not None
    assert result.token_ids == plain.token_ids
    assert result.text == text
    assert tuple(token for step in steps for token in step.token_ids) == plain.token_ids
    assert "".join(step.text for step in steps) == text
    scores = [score for step in steps for score in step.logprobs or ()]
    assert [score.chosen.token_id for score in scores] == list(plain.token_ids)


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_short_answers_can_be_streamed(tiny_llama: Path, max_tokens: int) -> None:
    async with Engine(config(tiny_llama)) as engine:
        steps = [step async for step in engine.stream([5, 6], max_tokens=max_tokens)]
    (step,) = steps
    assert step.result is not None
    assert len(step.token_ids) == len(step.result.token_ids) == max_tokens


async def test_closing_a_stream_aborts_it(tiny_llama: Path) -> None:
    async with Engine(config(tiny_llama)) as engine:
        async with aclosing(
            engine.stream([5] * 100, max_tokens=2000, ignore_eos=True, request_id="gone")
        ) as steps:
            async for _ in steps:
                break
        assert await engine.abort("gone") is False
        while (await engine.stats()).stages[0].blocks_used:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        stats = await engine.stats()
    assert (stats.requests_running, stats.requests_waiting, stats.requests_finished) == (0, 0, 1)


async def test_refusals_of_streams_come_before_any_token(tiny_llama: Path) -> None:
    async with Engine(config(tiny_llama, max_model_len=100)) as engine:
        with pytest.raises(RequestError, match="max_model_len is 100"):
            async for _ in engine.stream([5] * 100, max_tokens=2):
                pass


async def test_sampled_answers_repeat_with_a_seed(tiny_llama: Path) -> None:
    async with Engine(config(tiny_llama)) as engine:
        drawn = [
            await answer(engine, [5, 6, 7], temperature=3.0, seed=seed) for seed in (1, 1, 2, 3)
        ]
        narrow = await answer(engine, [5, 6, 7], temperature=1.0, top_p=1e-9, seed=1)
        greedy = await answer(engine, [5, 6, 7])
    tokens = [result.token_ids for result in drawn]
    assert tokens[0] == tokens[1]
    assert len(set(tokens)) == 3
    assert narrow.token_ids == greedy.token_ids
