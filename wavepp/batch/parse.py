"""From the bytes of one input line to what it asks, or to what is wrong with it.

Owns the forms of a line: OpenAI's batch lines and plain ones. Pure: no files, no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import xxhash

from wavepp.batch.schema import (
    BatchLine,
    ChatBody,
    CompletionBody,
    PlainBody,
    read_body,
)
from wavepp.engine import PrefillOptions
from wavepp.errors import RequestError
from wavepp.messages import plain_messages
from wavepp.validation import nearest, shown

COMPLETIONS_URL = "/v1/completions"
CHAT_URL = "/v1/chat/completions"
ANSWER_START = b'{"id": "'
LINE_BYTES_MAX = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation and what goes to the chat template with it."""

    messages: Sequence[Mapping[str, Any]]
    template_options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What one line asks: one answer with a choice for each prompt.

    Attributes:
        prompts: texts or token ids; empty for a chat.
        logprobs, prompt_logprobs: alternatives to show; the options may ask the engine for more.
        tokens_as_ids: write tokens in log probabilities as "token_id:17".
        return_token_ids: put token ids beside the text.
    """

    options: PrefillOptions
    model: str | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompts: tuple[str | tuple[int, ...], ...] = ()
    chat: Chat | None = None
    add_special_tokens: bool = True
    echo: bool = False
    tokens_as_ids: bool = False
    return_token_ids: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the input: its number (1 is the first), its id, and its question or its error.

    The id is made of number and content, so an answer can be matched with its line for sure.
    """

    number: int
    line_id: str
    custom_id: str | None = None
    question: Question | None = None
    error: RequestError | None = field(default=None, compare=False)


def line_id(number: int, raw: bytes) -> str:
    """The id of a line: the same for the same bytes at the same place."""
    return f"batch_req_{number}_{xxhash.xxh3_64_hexdigest(raw)}"


def answer_start(id_of_line: str) -> bytes:
    """How the output line with that id begins."""
    return ANSWER_START + f'{id_of_line}", '.encode()


def parse_line(number: int, raw: bytes) -> Line:
    """Reads one line; whatever is wrong with it becomes its error."""
    made = Line(number=number, line_id=line_id(number, raw))
    custom_id: str | None = None
    try:
        fields = _read_line(raw)
        if isinstance(fields.get("custom_id"), str):
            custom_id = fields["custom_id"]
        question = _read_question(fields)
    except RequestError as error:
        return Line(number=number, line_id=made.line_id, custom_id=custom_id, error=error)
    return Line(number=number, line_id=made.line_id, custom_id=custom_id, question=question)


def _read_line(raw: bytes) -> dict[str, Any]:
    if len(raw) > LINE_BYTES_MAX:
        raise RequestError(f"the line is longer than {LINE_BYTES_MAX} bytes", code="line_too_long")
    return read_json(raw)


def read_json(raw: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        RequestError: it is none.
    """
    try:
        loaded = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise RequestError(f"not UTF-8 at byte {error.start}", code="bad_json") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not JSON: {error}", code="bad_json") from None
    if not isinstance(loaded, dict):
        raise RequestError("expected a JSON object", code="bad_json")
    return loaded


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _read_question(fields: Mapping[str, Any]) -> Question:
    if not {"body", "url", "method"} & fields.keys():
        return read_plain(fields)
    line = read_body(BatchLine, fields, BatchLine)
    if line.method != "POST":
        raise RequestError(f"method: {line.method!r} is not POST", param="method")
    if line.url == COMPLETIONS_URL:
        return read_completion(line.body)
    if line.url == CHAT_URL:
        return read_chat(line.body)
    known = (COMPLETIONS_URL, CHAT_URL)
    raise RequestError(
        f"url: {shown(line.url)} is not one of {', '.join(known)}{nearest(line.url, known)}",
        param="url",
    )


def read_plain(fields: Mapping[str, Any]) -> Question:
    """What a plain line asks.

    Raises:
        RequestError: a field is unknown, unsupported or wrong.
    """
    body = read_body(PlainBody, fields, PlainBody)
    if (body.prompt is None) == (body.prompt_token_ids is None):
        raise RequestError("give one of prompt and prompt_token_ids", param="prompt")
    if body.prompt is None:
        prompts: tuple[str | tuple[int, ...], ...] = (
            _tokens(body.prompt_token_ids, "prompt_token_ids"),
        )
    else:
        prompts = _prompts(body.prompt)
    return _of_prompts(body, prompts, return_token_ids=body.return_token_ids is not False)


def read_completion(fields: Mapping[str, Any]) -> Question:
    """What the body of a completion request asks.

    Raises:
        RequestError: a field is unknown, unsupported or wrong.
    """
    body = read_body(CompletionBody, fields, CompletionBody)
    return _of_prompts(body, _prompts(body.prompt), return_token_ids=body.return_token_ids is True)


def _of_prompts(
    body: CompletionBody, prompts: tuple[str | tuple[int, ...], ...], *, return_token_ids: bool
) -> Question:
    return Question(
        options=body.options(),
        model=body.model,
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs,
        prompts=prompts,
        add_special_tokens=body.add_special_tokens,
        echo=bool(body.echo),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        return_token_ids=return_token_ids,
    )


def read_chat(fields: Mapping[str, Any]) -> Question:
    """What the body of a chat request asks.

    Raises:
        RequestError: a field is unknown, unsupported or wrong.
    """
    body = read_body(ChatBody, fields, ChatBody)
    messages = plain_messages(body.messages)
    options = body.options()
    return Question(
        options=options,
        model=body.model,
        logprobs=options.get("logprobs"),
        prompt_logprobs=body.prompt_logprobs,
        chat=Chat(messages=messages, template_options=body.template_options()),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        return_token_ids=body.return_token_ids is True,
    )


def _prompts(prompt: object) -> tuple[str | tuple[int, ...], ...]:
    """One prompt or several: text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return (prompt,)
    if not isinstance(prompt, list):
        raise RequestError(
            f"prompt: expected text, token ids or a list of those (got {shown(prompt)})",
            param="prompt",
        )
    if not prompt:
        raise RequestError("prompt is empty", code="empty_prompt", param="prompt")
    if all(isinstance(item, str) for item in prompt):
        return tuple(prompt)
    if all(isinstance(item, list) for item in prompt):
        return tuple(_tokens(item, "prompt") for item in prompt)
    return (_tokens(prompt, "prompt"),)


def _tokens(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise RequestError(f"{where}: expected token ids (got {shown(value)})", param=where)
    if not value:
        raise RequestError(f"{where} is empty", code="empty_prompt", param=where)
    for position, token in enumerate(value):
        if not isinstance(token, int) or isinstance(token, bool):
            raise RequestError(
                f"{where}[{position}]: expected a token id (got {shown(token)})", param=where
            )
    return tuple(value)
