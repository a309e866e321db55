"""A real model, split over two stages, against a plain transformers forward in float32."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from e2e_oracle import LOGPROB_TOLERANCE, Oracle
from e2e_prompts import CHAT, LISTS_AND_CODE, SENTENCES

from wavepp import Engine, EngineConfig, PrefillResult
from wavepp.models import smollm2

FRANCE = "What is the capital of France?"
HANDBOOK = Path(__file__).parents[2] / "examples" / "handbook.md"
# Waves are shorter than the longest prompt and longer than most, so that chunks share them.
OPTIONS: dict[str, Any] = {
    "pipeline_parallel_size": 2,
    "dtype": "float32",
    "max_num_batched_tokens": 256,
    "block_size": 16,
    "threads_per_stage": 1,
}


@pytest.fixture(scope="module")
def oracle(smollm2_folder: Path) -> Oracle:
    return Oracle(smollm2_folder)


@pytest.fixture(scope="module")
def prompts(oracle: Oracle) -> list[list[int]]:
    chats = [oracle.chat_tokens(question) for question in (FRANCE, *CHAT)]
    texts = [oracle.text_tokens(text) for text in (*SENTENCES, *LISTS_AND_CODE)]
    assert len(chats) + len(texts) == 51
    return [*chats, *texts]


def run(
    config: EngineConfig, prompts: Sequence[Sequence[int]], **asked: Any
) -> list[PrefillResult]:
    """All prompts at once through one engine."""

    async def together() -> list[PrefillResult]:
        async with Engine(config) as engine:
            return await asyncio.gather(*(engine.prefill(prompt, **asked) for prompt in prompts))

    return asyncio.run(together())


def disagreements(
    oracle: Oracle, prompts: Sequence[Sequence[int]], results: Sequence[PrefillResult]
) -> list[str]:
    found = []
    for tokens, result in zip(prompts, results, strict=True):
        difference = oracle.judge(tokens, result)
        worst = max(difference.first, difference.prompt)
        if not difference.token_agrees or worst > LOGPROB_TOLERANCE:
            found.append(f"{oracle.tokenizer.decode(tokens)[-60:]!r}: {difference}")
    return found


def test_first_tokens_and_logprobs_agree(
    smollm2_folder: Path, oracle: Oracle, prompts: list[list[int]]
) -> None:
    config = EngineConfig(model=str(smollm2_folder), transport="local", **OPTIONS)
    results = run(config, prompts, logprobs=5)
    assert disagreements(oracle, prompts, results) == []


def test_prompt_logprobs_agree(
    smollm2_folder: Path, oracle: Oracle, prompts: list[list[int]]
) -> None:
    handbook = oracle.text_tokens(HANDBOOK.read_text())[:1100]
    config = EngineConfig(model=str(smollm2_folder), transport="local", **OPTIONS)
    asked = [*prompts, handbook]
    results = run(config, asked, logprobs=3, prompt_logprobs=3)
    assert disagreements(oracle, asked, results) == []


def test_repeated_document_agrees(smollm2_folder: Path, oracle: Oracle) -> None:
    """One long text under several questions, so that a reused prefix would have to be right."""
    document = HANDBOOK.read_text()[:4000]
    questions = ["Where is the float?", "Who reads the staff?", "What is it painted?"]
    prompts = [oracle.text_tokens(f"{document}\n\nQuestion: {q}\nAnswer:") for q in questions]
    config = EngineConfig(model=str(smollm2_folder), transport="local", **OPTIONS)
    results = run(config, [*prompts, *prompts], logprobs=5)
    assert disagreements(oracle, [*prompts, *prompts], results) == []


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_first_tokens_and_logprobs_agree_on_ray(
    smollm2_folder: Path, oracle: Oracle, prompts: list[list[int]]
) -> None:
    options = OPTIONS | {"num_cpus_per_stage": 0.5}
    config = EngineConfig(model=str(smollm2_folder), transport="ray", **options)
    results = run(config, prompts, logprobs=5)
    assert disagreements(oracle, prompts, results) == []


def test_capital_of_france_begins_an_answer(smollm2_folder: Path, oracle: Oracle) -> None:
    """The checkpoint is a real one: with examples before the question it says Paris."""
    shots = "Q: What is the capital of Spain?\nA: Madrid\nQ: What is the capital of France?\nA:"
    config = EngineConfig(model=str(smollm2_folder), transport="local", **OPTIONS)
    (result,) = run(config, [oracle.text_tokens(shots)])
    assert oracle.tokenizer.decode(result.token_ids).strip() == "Paris"


def test_half_made_checkpoint_does_not_count(smollm2_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in smollm2_folder.iterdir():
        (copy / path.name).symlink_to(path)
    assert smollm2.is_complete(copy)
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer.json").write_text("{}")
    assert not smollm2.is_complete(copy)
