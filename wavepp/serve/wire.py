"""Answers as the three endpoints write them: whole, or chunk by chunk.

Pure but for the tokenizer; runs on the tokenizer's thread. Whole answers of completions and chats
are the batch's; what is here are the chunks, and tokens in, tokens out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from wavepp.batch.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from wavepp.batch.responses import Answer, answer_body, token_naming, usage
from wavepp.requests import Increment, PrefillResult
from wavepp.serve.asked import Asked
from wavepp.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


def whole_body(
    asked: Asked, results: Sequence[PrefillResult], tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """The response object of an answer at its end."""
    answer = Answer(question=asked.question, requests=asked.requests, results=results)
    if asked.kind != "generate":
        return answer_body(asked.answer_id, answer, asked.naming, tokenizer)
    (result,), question = results, asked.question
    names = token_naming(question, tokenizer)
    body: dict[str, Any] = {
        "request_id": asked.answer_id,
        "choices": [
            {
                "index": 0,
                "token_ids": list(result.token_ids),
                "logprobs": None,
                "finish_reason": result.finish_reason,
            }
        ],
        "prompt_logprobs": None,
        "kv_transfer_params": result.kv_transfer_params,
        "usage": usage(results),
    }
    if question.logprobs is not None:
        scores = chat_logprobs(result.logprobs or (), question.logprobs, names)
        body["choices"][0]["logprobs"] = scores
    if question.prompt_logprobs is not None:
        positions = result.prompt_logprobs or ()
        body["prompt_logprobs"] = prompt_logprobs(positions, question.prompt_logprobs, names)
    return body


class Chunks:
    """The chunks of one streamed answer.

    With `echo` the prompt, and what is known of it, come in the choice's first chunk.
    """

    def __init__(self, asked: Asked, tokenizer: Tokenizer | None) -> None:
        self._asked = asked
        self._tokenizer = tokenizer
        self._names = token_naming(asked.question, tokenizer)
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}

    def chunk(self, index: int, step: Increment) -> bytes:
        """One event: what choice `index` grew by."""
        is_first = index not in self._begun
        self._begun.add(index)
        choice = self._choice(index, step, is_first=is_first)
        if self._asked.question.return_token_ids or self._tokenizer is None:
            choice["token_ids"] = list(step.token_ids)
        if step.result is not None:
            choice["finish_reason"] = step.result.finish_reason
            if step.result.stop_reason is not None:
                choice["stop_reason"] = step.result.stop_reason
        body = {**self._head(), "choices": [choice]}
        self._put_prompt_scores(body, choice, step)
        return event(body)

    def usage(self, results: Sequence[PrefillResult]) -> bytes:
        """The event that says what the answer took."""
        return event({**self._head(), "choices": [], "usage": usage(results)})

    @property
    def wants_usage(self) -> bool:
        """Whether the client asked for it."""
        return self._asked.stream is not None and self._asked.stream.include_usage

    def _head(self) -> dict[str, Any]:
        asked = self._asked
        if asked.kind == "generate":
            return {"request_id": asked.answer_id}
        chat = asked.kind == "chat"
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{asked.answer_id}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": asked.naming.created,
            "model": asked.naming.model,
        }

    def _choice(self, index: int, step: Increment, *, is_first: bool) -> dict[str, Any]:
        question = self._asked.question
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": None}
        if self._asked.kind == "completion":
            text = self._echo(index) + step.text if is_first and question.echo else step.text
            choice["text"] = text
            if question.logprobs is not None:
                choice["logprobs"] = self._completion_scores(index, step, question.logprobs)
            return choice
        if self._asked.kind == "chat":
            choice["delta"] = {"content": step.text}
            if is_first:
                choice["delta"] = {"role": "assistant", "content": step.text}
        else:
            choice["token_ids"] = list(step.token_ids)
        if question.logprobs is not None:
            choice["logprobs"] = chat_logprobs(step.logprobs or (), question.logprobs, self._names)
        return choice

    def _echo(self, index: int) -> str:
        prompt_ids = self._asked.requests[index].prompt_token_ids
        return "" if self._tokenizer is None else self._tokenizer.decode(prompt_ids)

    def _completion_scores(self, index: int, step: Increment, asked: int) -> dict[str, Any]:
        scores = completion_logprobs(step.logprobs or (), step.token_ids, asked, self._names)
        start = self._offsets.get(index, 0)
        self._offsets[index] = start + sum(len(token) for token in scores["tokens"])
        scores["text_offset"] = [start + offset for offset in scores["text_offset"]]
        return scores

    def _put_prompt_scores(
        self, body: dict[str, Any], choice: dict[str, Any], step: Increment
    ) -> None:
        """The prompt's log probabilities, which are known at the end only."""
        asked = self._asked.question.prompt_logprobs
        if asked is None or step.result is None:
            return
        positions = step.result.prompt_logprobs or ()
        scores = prompt_logprobs(positions, asked, self._names)
        place: dict[str, Any] = choice if self._asked.kind == "completion" else body
        place["prompt_logprobs"] = scores


def event(body: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + as_json(body) + b"\n\n"


def as_json(body: Mapping[str, Any]) -> bytes:
    """JSON as it goes out; a lone surrogate that came in by an escape goes out by one."""
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
