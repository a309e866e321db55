"""One request for tokens: from its body to a checked question, of whichever endpoint.

Owns: the three endpoints' bodies, and streaming's options, which batches do not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from wavepp.batch.parse import Question, read_chat, read_completion, read_plain
from wavepp.batch.responses import Naming
from wavepp.batch.schema import CommonBody
from wavepp.errors import RequestError
from wavepp.requests import PrefillRequest
from wavepp.validation import first_problem, nearest

Body = TypeVar("Body", bound=BaseModel)
Kind = Literal["completion", "chat", "generate"]
SAMPLING_FIELDS = (
    "max_tokens",
    "temperature",
    "top_p",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "stop",
    "stop_token_ids",
    "ignore_eos",
)


class StreamOptions(BaseModel):
    """What a streamed answer holds besides its tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Streaming(BaseModel):
    """Whether and how an answer is streamed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    stream: bool | None = None
    stream_options: StreamOptions | None = None


class GenerateBody(BaseModel):
    """The body of `/inference/v1/generate`: tokens in, tokens out."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    model: str | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    kv_transfer_params: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question as one endpoint took it.

    Attributes:
        answer_id: the name of the answer, as the client may name it too.
        requests: one a choice; empty until they are built.
        stream: None: one response at the end.
    """

    kind: Kind
    answer_id: str
    question: Question
    naming: Naming
    requests: Sequence[PrefillRequest] = ()
    stream: StreamOptions | None = None


def read_asked(kind: Kind, fields: Mapping[str, Any], *, answer_id: str, naming: Naming) -> Asked:
    """What a request's body asks.

    Raises:
        RequestError: a field is unknown, unsupported or wrong.
    """
    left = dict(fields)
    streaming = _streaming({name: left.pop(name, None) for name in Streaming.model_fields})
    question = READERS[kind](left)
    if streaming is not None and question.echo and question.logprobs is not None:
        raise RequestError(
            "echo with logprobs can't be streamed", code="unsupported", param="stream"
        )
    return Asked(kind=kind, answer_id=answer_id, question=question, naming=naming, stream=streaming)


def _streaming(fields: Mapping[str, Any]) -> StreamOptions | None:
    try:
        read = Streaming(**fields)
    except ValidationError as error:
        message, param = first_problem(error, StreamOptions.model_fields)
        raise RequestError(message, param=param) from None
    if not read.stream:
        if read.stream_options is not None:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        return None
    return read.stream_options or StreamOptions()


def _read_generate(fields: Mapping[str, Any]) -> Question:
    try:
        body = GenerateBody(**fields)
    except ValidationError as error:
        message, param = first_problem(error, GenerateBody.model_fields)
        raise RequestError(message, param=param) from None
    for name in body.sampling_params:
        if name not in SAMPLING_FIELDS and name in CommonBody.model_fields:
            raise RequestError(f"sampling_params: {name!r} does not belong there", param=name)
    if body.priority or body.kv_transfer_params:
        name = "priority" if body.priority else "kv_transfer_params"
        raise RequestError(f"{name}: not supported here", code="unsupported", param=name)
    prompt = {"prompt_token_ids": body.token_ids, "model": body.model}
    question = read_plain({**body.sampling_params, **prompt, "cache_salt": body.cache_salt})
    return replace(question, tokens_as_ids=True)


READERS: Mapping[Kind, Callable[[Mapping[str, Any]], Question]] = {
    "completion": read_completion,
    "chat": read_chat,
    "generate": _read_generate,
}


def read_fields(kind: type[Body], fields: Mapping[str, Any]) -> Body:
    """Builds one of the small bodies.

    Raises:
        RequestError: an unknown field, or a value of the wrong type.
    """
    for name in fields:
        if name not in kind.model_fields:
            raise RequestError(
                f"unknown field {name!r}{nearest(name, kind.model_fields)}", param=name
            )
    try:
        return kind(**fields)
    except ValidationError as error:
        message, param = first_problem(error, kind.model_fields)
        raise RequestError(message, param=param) from None
