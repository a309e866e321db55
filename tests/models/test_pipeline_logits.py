"""Logits of a split model over a paged cache equal a plain forward of transformers."""

from __future__ import annotations

import random

import pytest
import torch
from model_oracle import BarePipeline, oracle_logits, random_prompt

TOLERANCE = 2e-5
DENSE = ("llama", "mistral", "mistral_sliding", "qwen2", "qwen3")
SPLITS = [(8,), (4, 4), (1, 7), (3, 3, 2), (1, 6, 1), (2, 2, 2, 2), (1, 3, 3, 1)]
LENGTHS = (1, 2, 17, 48, 64, 131, 333, 700)


@pytest.mark.parametrize("budget", [16, 64, 1000])
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("family", DENSE)
def test_pipeline_equals_transformers(tiny_folder, expected_logits, family, split, budget):
    rng = random.Random(f"{family}{split}{budget}")
    pipeline = BarePipeline(tiny_folder(family), split, seed=budget)
    drawn = random.Random(family)
    prompts = [random_prompt(drawn, length) for length in LENGTHS]
    if budget == 16:  # 700 more tokens are 44 more waves like the others
        prompts.pop()
    sequences = [pipeline.sequence(prompt) for prompt in rng.sample(prompts, len(prompts))]
    pipeline.prefill(sequences, budget, rng)
    for sequence in sequences:
        expected = expected_logits(family, sequence.token_ids)
        torch.testing.assert_close(sequence.all_logits(), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["qwen3", "mistral_sliding"])
def test_prefix_resumes_at_every_block_boundary(tiny_folder, tiny_oracle, family):
    rng = random.Random(3)
    pipeline = BarePipeline(tiny_folder(family), (3, 5), blocks=400)
    first = pipeline.sequence(random_prompt(rng, 200))
    pipeline.prefill([first], 77, rng)
    for at in range(0, 193, 16):
        prompt = first.token_ids[:at] + random_prompt(rng, 230 - at)
        second = pipeline.sequence(prompt, like=first, at=at)
        pipeline.prefill([second], 64, rng)
        expected = oracle_logits(tiny_oracle(family), prompt)[at:]
        torch.testing.assert_close(second.all_logits(), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", DENSE)
def test_many_short_spans_share_waves(tiny_folder, tiny_oracle, family):
    """Spans of one token, of equal and of unequal lengths, with prefixes of any length, at once."""
    rng = random.Random(11)
    pipeline = BarePipeline(tiny_folder(family), (5, 3))
    sequences = [pipeline.sequence(random_prompt(rng, 60 + 3 * (i % 5))) for i in range(20)]
    pipeline.run([(s, 1 + 5 * (i % 7)) for i, s in enumerate(sequences)])
    while any(s.remaining for s in sequences):
        some = [s for s in sequences if s.remaining]
        pipeline.run([(s, min(s.remaining, rng.choice([1, 1, 8, 9]))) for s in some])
    for sequence in sequences:
        expected = oracle_logits(tiny_oracle(family), sequence.token_ids)
        torch.testing.assert_close(sequence.all_logits(), expected, atol=TOLERANCE, rtol=0)


def test_bfloat16_stays_near_float32(tiny_folder, tiny_oracle):
    """The native bf16 path: off by rounding, not by more."""
    rng = random.Random(5)
    pipeline = BarePipeline(tiny_folder("llama"), (4, 4), dtype=torch.bfloat16)
    sequences = [pipeline.sequence(random_prompt(rng, length)) for length in (3, 90, 300)]
    pipeline.prefill(sequences, 64, rng)
    for sequence in sequences:
        expected = oracle_logits(tiny_oracle("llama"), sequence.token_ids)
        error = (sequence.all_logits() - expected).abs()
        assert error.mean() < 0.02
        assert error.max() < 0.3


def test_float16_stays_near_float32(tiny_folder, tiny_oracle):
    rng = random.Random(6)
    pipeline = BarePipeline(tiny_folder("qwen3"), (4, 4), dtype=torch.float16)
    sequences = [pipeline.sequence(random_prompt(rng, length)) for length in (3, 150)]
    pipeline.prefill(sequences, 64, rng)
    for sequence in sequences:
        expected = oracle_logits(tiny_oracle("qwen3"), sequence.token_ids)
        assert (sequence.all_logits() - expected).abs().max() < 0.05
