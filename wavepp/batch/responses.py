"""Results as OpenAI response objects, and as the lines of a batch's output.

Pure but for the tokenizer it is handed; runs on the tokenizer's thread.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wavepp.batch.logprobs import (
    TokenText,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from wavepp.batch.parse import Line, Question
from wavepp.errors import QueueFullError, RequestError
from wavepp.requests import PrefillRequest, PrefillResult
from wavepp.tokenizer import Tokenizer

BAD_REQUEST, NOT_FOUND, CLOSED, FAILED, BUSY = 400, 404, 499, 500, 503
SERVER_CODES = ("error", "abort", "queue_full", "engine_dead", "internal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A question with what came of it: one request and one result a choice."""

    question: Question
    requests: Sequence[PrefillRequest]
    results: Sequence[PrefillResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """What goes into every response of a run: the model's name and when the batch was made."""

    model: str
    created: int


def answer_line(line: Line, answer: Answer, naming: Naming, tokenizer: Tokenizer | None) -> bytes:
    """The output line of a question that was answered, or that failed while it ran."""
    failure = failure_of(answer.results)
    if failure is not None:
        return _record(line, *failure)
    return _record(line, 200, answer_body(line.line_id, answer, naming, tokenizer))


def answer_body(
    answer_id: str, answer: Answer, naming: Naming, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """The response object of a question that was answered."""
    body = _chat_body if answer.question.chat is not None else _completion_body
    return body(answer_id, answer, naming, tokenizer)


def failure_of(results: Sequence[PrefillResult]) -> tuple[int, dict[str, Any]] | None:
    """Status and error object when a request failed while it ran, or was aborted."""
    failed = next((r for r in results if r.finish_reason in ("error", "abort")), None)
    if failed is None:
        return None
    message = failed.error or f"the request ended with {failed.finish_reason!r}"
    status = FAILED if failed.finish_reason == "error" else CLOSED
    return status, error_body(message, code=failed.finish_reason)


def error_line(line: Line, error: RequestError) -> bytes:
    """The output line of a question that can't be served."""
    body = error_body(error.message, code=error.code, param=error.param)
    return _record(line, status_of(error), body)


def status_of(error: RequestError) -> int:
    """The HTTP status of a refusal."""
    if error.code == "model_not_found":
        return NOT_FOUND
    return BUSY if isinstance(error, QueueFullError) else BAD_REQUEST


def error_body(message: str, *, code: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = "server_error" if code in SERVER_CODES else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def token_naming(question: Question, tokenizer: Tokenizer | None) -> TokenText:
    """How this question's log probabilities call a token."""
    if tokenizer is None or question.tokens_as_ids:
        return lambda token_id: f"token_id:{token_id}"
    return tokenizer.token_text


def _record(line: Line, status: int, body: dict[str, Any]) -> bytes:
    record = {
        "id": line.line_id,
        "custom_id": line.custom_id,
        "response": {"status_code": status, "request_id": line.line_id, "body": body},
        "error": body.get("error"),
    }
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate came in by an escape and goes out by one
        return json.dumps(record, allow_nan=False).encode() + b"\n"


def _completion_body(
    answer_id: str, answer: Answer, naming: Naming, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    choices = [_completion_choice(index, answer, tokenizer) for index in range(len(answer.results))]
    return {
        "id": f"cmpl-{answer_id}",
        "object": "text_completion",
        "created": naming.created,
        "model": naming.model,
        "choices": choices,
        "usage": usage(answer.results),
    }


def _completion_choice(index: int, answer: Answer, tokenizer: Tokenizer | None) -> dict[str, Any]:
    question, result = answer.question, answer.results[index]
    prompt_ids = answer.requests[index].prompt_token_ids
    shown_ids = (*prompt_ids, *result.token_ids) if question.echo else result.token_ids
    names = token_naming(question, tokenizer)
    choice: dict[str, Any] = {
        "index": index,
        "text": _text(result, tokenizer, prompt_ids if question.echo else ()),
        "logprobs": None,
        "finish_reason": result.finish_reason,
    }
    if question.logprobs is not None:
        before = result.prompt_logprobs if question.echo else None
        positions = (*(before or ()), *(result.logprobs or ()))
        choice["logprobs"] = completion_logprobs(positions, shown_ids, question.logprobs, names)
    return choice | _vllm_fields(index, answer, names, tokenizer)


def _vllm_fields(
    index: int, answer: Answer, names: TokenText, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """prompt_logprobs and token ids, where vLLM puts them; only what was asked for."""
    question, result = answer.question, answer.results[index]
    fields: dict[str, Any] = {}
    if question.prompt_logprobs is not None:
        positions = result.prompt_logprobs or ()
        fields["prompt_logprobs"] = prompt_logprobs(positions, question.prompt_logprobs, names)
    if question.return_token_ids or tokenizer is None:
        fields["token_ids"] = list(result.token_ids)
    if result.stop_reason is not None:
        fields["stop_reason"] = result.stop_reason
    return fields


def _text(
    result: PrefillResult, tokenizer: Tokenizer | None, prompt_ids: Sequence[int] = ()
) -> str:
    """The answer's text, behind that of the prompt when it is to be repeated."""
    if tokenizer is None:
        return ""
    if result.text is None:
        return tokenizer.decode((*prompt_ids, *result.token_ids))
    return (tokenizer.decode(prompt_ids) if prompt_ids else "") + result.text


def _chat_body(
    answer_id: str, answer: Answer, naming: Naming, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    assert tokenizer is not None, "a chat was tokenised"
    result, names = answer.results[0], token_naming(answer.question, tokenizer)
    fields = _vllm_fields(0, answer, names, tokenizer)
    body: dict[str, Any] = {
        "id": f"chatcmpl-{answer_id}",
        "object": "chat.completion",
        "created": naming.created,
        "model": naming.model,
    }
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": _text(result, tokenizer)},
        "logprobs": None,
        "finish_reason": result.finish_reason,
    }
    if answer.question.logprobs is not None:
        positions = result.logprobs or ()
        choice["logprobs"] = chat_logprobs(positions, answer.question.logprobs, names)
    choice |= {name: fields[name] for name in ("token_ids", "stop_reason") if name in fields}
    body["choices"] = [choice]
    body["usage"] = usage(answer.results)
    if "prompt_logprobs" in fields:
        body["prompt_logprobs"] = fields["prompt_logprobs"]
    return body


def usage(results: Sequence[PrefillResult]) -> dict[str, Any]:
    """OpenAI's usage object of an answer's results together."""
    prompt = sum(result.num_prompt_tokens for result in results)
    produced = sum(len(result.token_ids) for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": produced,
        "total_tokens": prompt + produced,
        "prompt_tokens_details": {
            "cached_tokens": sum(result.num_cached_tokens for result in results)
        },
    }
