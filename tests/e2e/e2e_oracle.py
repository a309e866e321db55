"""transformers as the judge: log probabilities of a real model in one plain forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from wavepp.requests import PositionLogprobs, PrefillResult

LOGPROB_TOLERANCE = 2e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far a result is from the judge: largest |difference| of a log probability, and tokens."""

    first: float
    prompt: float
    token_agrees: bool


class Oracle:
    """The model and tokenizer of a folder, in float32."""

    def __init__(self, folder: Path) -> None:
        loader: Any = AutoModelForCausalLM
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)  # type: ignore[no-untyped-call]
        self._model: Any = loader.from_pretrained(folder, dtype=torch.float32).eval()

    def chat_tokens(self, question: str) -> list[int]:
        """Token ids of a conversation with one question, ready for the answer."""
        messages = [{"role": "user", "content": question}]
        template = self.tokenizer.apply_chat_template
        ids = template(messages, add_generation_prompt=True, return_dict=False)
        return [int(token) for token in ids]

    def text_tokens(self, text: str) -> list[int]:
        """Token ids of a text as it stands."""
        return [int(token) for token in self.tokenizer(text).input_ids]

    def logprobs(self, tokens: Sequence[int], *, rows: int = 0) -> torch.Tensor:
        """float32 [T, vocabulary]: row t scores the token after position t; or the last rows."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([list(tokens)]), logits_to_keep=rows).logits[0]
        return logits.float().log_softmax(-1)

    def judge(self, tokens: Sequence[int], result: PrefillResult) -> Difference:
        """Compares a result that has logprobs, and prompt_logprobs if they were asked for."""
        assert result.error is None, result
        assert result.logprobs is not None, result
        expected = self.logprobs(tokens, rows=0 if result.prompt_logprobs is not None else 1)
        prompt = 0.0
        if result.prompt_logprobs is not None:
            assert len(result.prompt_logprobs) == len(tokens)
            assert result.prompt_logprobs[0] is None
            for row, position in zip(expected, result.prompt_logprobs[1:], strict=False):
                assert position is not None
                prompt = max(prompt, _difference(row, position))
            stands = [
                position.chosen.token_id for position in result.prompt_logprobs[1:] if position
            ]
            assert stands == list(tokens[1:])
        return Difference(
            first=_difference(expected[-1], result.logprobs[0]),
            prompt=prompt,
            token_agrees=result.token_ids == (int(expected[-1].argmax()),),
        )


def _difference(row: torch.Tensor, position: PositionLogprobs) -> float:
    scored = (position.chosen, *position.top)
    likeliest = sorted((token.logprob for token in position.top), reverse=True)
    assert [token.logprob for token in position.top] == likeliest
    if position.top:
        assert abs(float(row.max()) - position.top[0].logprob) <= LOGPROB_TOLERANCE
    return max(abs(float(row[token.token_id]) - token.logprob) for token in scored)
