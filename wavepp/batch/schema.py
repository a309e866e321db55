"""The bodies of completion and chat requests, as OpenAI and vLLM spell them.

Owns which fields are known and what they may hold. A known field of theirs that this version can't
act on is accepted only where it asks for nothing (`stream: false`, `n: 1`), else refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from wavepp.engine import PrefillOptions
from wavepp.errors import RequestError
from wavepp.validation import first_problem, shown

Body = TypeVar("Body", bound=BaseModel)

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "stream_options": (),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0, 1),
    "use_beam_search": (False,),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "priority": (0,),
    "kv_transfer_params": (),
}
"""Field -> values that change nothing (null always does)."""

ENGINE_OPTIONS = (
    "max_tokens",
    "temperature",
    "top_p",
    "seed",
    "cache_salt",
    "prompt_logprobs",
    "stop",
    "stop_token_ids",
    "ignore_eos",
)


class CommonBody(BaseModel):
    """What completions and chat have in common."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    user: str | None = None
    cache_salt: str | None = None
    prompt_logprobs: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _take_one_stop(cls, value: object) -> object:
        """Takes one string as well as a list of them; the empty one asks for nothing."""
        if isinstance(value, str):
            return [value] if value else None
        return value

    def options(self) -> PrefillOptions:
        """The fields the engine acts on; what was not given is left to its defaults."""
        given = {name: getattr(self, name) for name in ENGINE_OPTIONS}
        return cast(PrefillOptions, {name: v for name, v in given.items() if v is not None})


class CompletionBody(CommonBody):
    """The body of `/v1/completions`."""

    prompt: Any
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool = True

    def options(self) -> PrefillOptions:
        """As the base class; `echo` with `logprobs` needs those of the prompt too."""
        options = super().options()
        if self.logprobs is not None:
            options["logprobs"] = self.logprobs
            if self.echo:
                asked = options.get("prompt_logprobs") or 0
                options["prompt_logprobs"] = max(self.logprobs, asked)
        return options


class PlainBody(CompletionBody):
    """A plain line: the fields of a completion at the top level, or token ids under their name."""

    prompt: Any = None
    prompt_token_ids: Any = None
    custom_id: str | None = None


class ChatBody(CommonBody):
    """The body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    def options(self) -> PrefillOptions:
        """As the base class, with chat's own way to ask for log probabilities."""
        options = super().options()
        if self.max_completion_tokens is not None:
            options["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            options["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        return options

    def template_options(self) -> dict[str, Any]:
        """What goes to the chat template besides the messages."""
        options = dict(self.chat_template_kwargs or {})
        options["add_generation_prompt"] = self.add_generation_prompt
        if self.continue_final_message:
            options["continue_final_message"] = True
            options["add_generation_prompt"] = False
        if self.tools:
            options["tools"] = self.tools
        return options


class BatchLine(BaseModel):
    """One line of an OpenAI batch file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    custom_id: str = Field(min_length=1)
    method: str = "POST"
    url: str
    body: dict[str, Any]


def read_body(kind: Callable[..., Body], fields: Mapping[str, Any], known: type[BaseModel]) -> Body:
    """Builds a body, having dropped the fields that ask for nothing.

    Raises:
        RequestError: an unknown field (the nearest known one is named), one that this version can't
            act on, or a value of the wrong type.
    """
    left: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in NEUTRAL:
            left[name] = value
        elif value is not None and not any(_same(value, allowed) for allowed in NEUTRAL[name]):
            raise RequestError(
                f"{name}: {shown(value)} is not supported in this version",
                code="unsupported",
                param=name,
            )
    try:
        return kind(**left)
    except ValidationError as error:
        message, param = first_problem(error, [*known.model_fields, *NEUTRAL])
        raise RequestError(message, param=param) from None


def _same(value: object, allowed: object) -> bool:
    """Equality that keeps true and 1 apart."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
