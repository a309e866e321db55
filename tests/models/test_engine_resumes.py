"""Every family in a running engine, cold and resumed at every block boundary by requests that share
a prefix: split unevenly, in waves of several sizes; log probabilities equal the oracle's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kimi_k3_reference import KimiK3
from model_oracle import oracle_logits, random_prompt

from wavepp import LLM
from wavepp.requests import PositionLogprobs, PrefillResult

BLOCK = 64
LENGTH = 270
SPLITS = [(8,), (3, 5), (1, 5, 2), (2, 1, 4, 1)]  # glm_moe_dsa: 3 and 7 share their choices
KIMI_K3_SPLITS = [(9,), (2, 7), (1, 3, 5), (4, 1, 3, 1)]  # blocks of residuals begin at 0, 3, 6
BUDGETS = [64, 128, 1024]
RECURRENT = ("kimi_linear", "kimi_k3", "qwen3_next", "qwen3_5_text")
OTHERS = (
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "minimax_m2",
    "qwen3_moe",
    "glm4_moe",
    "gemma3_text",
)
CASES = [
    *(
        (family, split, budget)
        for family in RECURRENT
        for split in (KIMI_K3_SPLITS if family == "kimi_k3" else SPLITS)
        for budget in BUDGETS
    ),
    *(
        (family, split, BUDGETS[(turn + index) % 3])
        for turn, family in enumerate(OTHERS)
        for index, split in enumerate(SPLITS)
    ),
]
Oracle = Callable[[str, list[int]], torch.Tensor]


def tolerance(family: str) -> float:
    return 1e-4 if family in RECURRENT else 2e-5


@pytest.fixture(scope="module")
def expected_logprobs(tiny_folder: Any, tiny_oracle: Any) -> Oracle:
    """(family, prompt) -> the oracle's log probabilities [length, vocab], computed once."""
    made: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def logprobs(family: str, prompt: list[int]) -> torch.Tensor:
        key = (family, tuple(prompt))
        if key not in made:
            if family == "kimi_k3":
                logits = KimiK3(tiny_folder(family))(prompt)
            else:
                logits = oracle_logits(tiny_oracle(family), prompt)
            made[key] = torch.log_softmax(logits, -1)
        return made[key]

    return logprobs


def check_scores(given: list[PositionLogprobs], expected: torch.Tensor, atol: float) -> None:
    """Scores of consecutive positions against rows of log probabilities."""
    entries = [[score.chosen, *score.top] for score in given]
    ours = torch.tensor([[entry.logprob for entry in row] for row in entries])
    tokens = torch.tensor([[entry.token_id for entry in row] for row in entries])
    torch.testing.assert_close(ours, expected.gather(1, tokens), atol=atol, rtol=0)


def check_first_token(result: PrefillResult, expected: torch.Tensor, atol: float) -> None:
    assert result.error is None
    assert result.logprobs is not None
    assert len(result.logprobs[0].top) == 5
    check_scores(list(result.logprobs), expected[-1:], atol)
    best = expected[-1].topk(5).values.tolist()
    assert [entry.logprob for entry in result.logprobs[0].top] == pytest.approx(best, abs=atol)


@pytest.mark.parametrize(("family", "split", "budget"), CASES)
def test_cold_and_resumed_at_every_block_boundary(
    tiny_folder: Any, expected_logprobs: Oracle, family: str, split: tuple[int, ...], budget: int
) -> None:
    rng = random.Random(family)
    first = random_prompt(rng, LENGTH)
    boundaries = range(BLOCK, LENGTH, BLOCK)
    resumed = [first[:at] + random_prompt(rng, 37) for at in boundaries]
    with LLM(
        model=tiny_folder(family),
        transport="local",
        pipeline_parallel_size=len(split),
        layer_partition=split,
        max_model_len=512,
        max_num_batched_tokens=budget,
        num_gpu_blocks_override=40,
        snapshot_interval=BLOCK,
        threads_per_stage=1,
        dtype="float32",
        skip_tokenizer_init=True,
    ) as llm:
        cold = llm.prefill(first, logprobs=5, prompt_logprobs=1)[0]
        warm = llm.prefill(resumed, logprobs=5)
    atol = tolerance(family)
    expected = expected_logprobs(family, first)
    check_first_token(cold, expected, atol)
    assert cold.prompt_logprobs is not None
    scores = [score for score in cold.prompt_logprobs if score is not None]
    assert [score.chosen.token_id for score in scores] == first[1:]
    check_scores(scores, expected[:-1], atol)
    for at, prompt, result in zip(boundaries, resumed, warm, strict=True):
        assert result.num_cached_tokens == at
        check_first_token(result, expected_logprobs(family, prompt), atol)
