"""The numbers in the answers agree with transformers' own forward on the same checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from wavepp.batch.runner import BatchRun, Tally
from wavepp.config import EngineConfig
from wavepp.engine import Engine
from wavepp.requests import EngineStats

TEXTS = ["The capital of France", "x", "In the beginning there was the prompt, " * 12]


class Silence:
    def update(self, tally: Tally, stats: EngineStats) -> None:
        pass

    def close(self) -> None:
        pass


async def test_tokens_and_logprobs_are_those_of_transformers(
    tiny_llama: Path, tmp_path: Path
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked = {"prompt": TEXTS, "logprobs": 5, "prompt_logprobs": 2, "return_token_ids": True}
    source.write_text(json.dumps(asked))
    config = EngineConfig(
        model=tiny_llama,
        transport="local",
        pipeline_parallel_size=3,
        block_size=16,
        max_num_batched_tokens=48,
        threads_per_stage=1,
    )
    async with Engine(config) as engine:
        await BatchRun(config, str(source), str(target)).run(engine, Silence())
    choices = json.loads(target.read_text())["response"]["body"]["choices"]
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    for text, choice in zip(TEXTS, choices, strict=True):
        ids = tokenizer.encode(text)
        with torch.inference_mode():
            expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        check_choice(choice, ids, expected, tokenizer)


def check_choice(choice: Any, ids: list[int], expected: torch.Tensor, tokenizer: Any) -> None:
    best = expected[-1].topk(5)
    assert choice["token_ids"] == [int(best.indices[0])]
    assert choice["text"] == tokenizer.decode([int(best.indices[0])], skip_special_tokens=True)
    assert choice["logprobs"]["token_logprobs"] == pytest.approx([float(best.values[0])], abs=2e-4)
    shown = list(choice["logprobs"]["top_logprobs"][0].values())
    assert shown == pytest.approx(best.values[: len(shown)].tolist(), abs=2e-4)
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert len(rest) == len(ids) - 1
    for place, entry in enumerate(rest):
        token = ids[place + 1]
        row = expected[place]
        assert entry[str(token)]["logprob"] == pytest.approx(float(row[token]), abs=2e-4)
        assert entry[str(token)]["rank"] == int((row > row[token]).sum()) + 1
        assert str(int(row.argmax())) in entry
