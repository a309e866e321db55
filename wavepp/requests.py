"""What goes into an engine and what comes out: the public request and result types.

`PrefillRequest` comes from outside, so pydantic checks it. `PrefillResult` is made here, so it is a
plain dataclass. Both cross process borders; neither holds tensors. What can be said of a request
without a model is checked when it is made (`make_request`), the rest against the model's facts
(`check_request`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from wavepp.errors import RequestError
from wavepp.show import engine_sheet, result_sheet, results_sheet, stages_sheet
from wavepp.validation import first_problem

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

FinishReason = Literal["stop", "length", "abort", "error"]

SALT_CHARS_MAX = 1024
LOGPROBS_MAX = 20
STOPS_MAX = 16
STOP_CHARS_MAX = 1024
WAVE_SIZE_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Tokens of a wave: where counts of waves by their size are divided."""

StopString = Annotated[str, Field(min_length=1, max_length=STOP_CHARS_MAX)]


class PrefillRequest(BaseModel):
    """One prompt to prefill, as tokens. (Text is tokenised before a request is made.)"""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    request_id: str = Field(min_length=1, description="unique among the requests now in the engine")
    prompt_token_ids: tuple[int, ...] = Field(description="the prompt; at least one token")
    max_tokens: int = Field(
        default=1, ge=0, description="tokens to produce; 0 only fills the cache"
    )
    temperature: float = Field(default=0.0, ge=0.0, allow_inf_nan=False, description="0 is greedy")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="nucleus sampling mass")
    seed: int | None = Field(
        default=None, ge=-(2**63), lt=2**63, description="makes sampling repeatable"
    )
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=LOGPROBS_MAX,
        description="alternatives to report for each produced token",
    )
    prompt_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=LOGPROBS_MAX,
        description="alternatives to report for each prompt token",
    )
    stop: tuple[StopString, ...] = Field(
        default=(),
        max_length=STOPS_MAX,
        description="texts that end the answer before them; needs a tokenizer",
    )
    stop_token_ids: tuple[int, ...] = Field(
        default=(), description="tokens that end the answer, besides the model's own"
    )
    ignore_eos: bool = Field(
        default=False, description="go on after the model's end-of-sequence token"
    )
    cache_salt: str = Field(
        default="",
        max_length=SALT_CHARS_MAX,
        description="namespace: prefixes are shared only within one salt",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One token with its natural-log probability and its rank (1 is the likeliest)."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionLogprobs:
    """Log probabilities at one position.

    `chosen` is the token that stands, or was chosen, there. `top` has as many entries as were
    asked for, likeliest first, and may hold `chosen` again.
    """

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimings:
    """When things happened to a request, on the driver's monotonic clock; None: never."""

    queued_s: float
    hint_s: float | None = None
    admitted_s: float | None = None
    first_wave_s: float | None = None
    first_token_s: float | None = None
    done_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """The outcome of one request.

    Attributes:
        token_ids: the produced tokens; empty when max_tokens was 0 or the request did not finish.
        logprobs: one entry per produced token when `logprobs` was asked for, else None.
        prompt_logprobs: one entry per prompt token (None for the first, which nothing predicts),
            else None.
        finish_reason: stop (an end-of-sequence token, or what was asked for), length, abort or
            error.
        stop_reason: the stop string, or the token of `stop_token_ids`, that ended the answer.
        text: the answer as text, up to the stop string; None without a tokenizer, or when one token
            was asked for and no stop string.
        error: what went wrong, for finish_reason "error" only.
        num_cached_tokens: prompt tokens whose state was reused on every stage, not computed.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    timings: RequestTimings
    logprobs: tuple[PositionLogprobs, ...] | None = None
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    error: str | None = None
    stop_reason: str | int | None = None
    text: str | None = None
    kv_transfer_params: Mapping[str, Any] | None = None

    def __rich__(self) -> Table:
        """As rich draws it in a terminal."""
        return result_sheet(self).table()

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        return result_sheet(self).html()


class PrefillResults(list[PrefillResult]):
    """A list of results that rich and notebooks show as a table."""

    def __rich__(self) -> Table:
        """As rich draws it in a terminal."""
        return results_sheet(self).table()

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        return results_sheet(self).html()


@dataclass(frozen=True, slots=True, kw_only=True)
class Produced:
    """One token of an answer that is still being produced."""

    token_id: int
    logprobs: PositionLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Increment:
    """What a streamed answer grew by.

    Attributes:
        text: of these tokens, as far as it is certain; "" without a tokenizer.
        logprobs: one entry a token when they were asked for, else None.
        result: the whole outcome; in the last increment only.
    """

    token_ids: tuple[int, ...]
    text: str = ""
    logprobs: tuple[PositionLogprobs, ...] | None = None
    result: PrefillResult | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStats:
    """One stage: what its LOOP thread did since the engine started, and its cache now.

    Attributes:
        busy_s, wait_s (no_wave | activation | materialize | sending -> seconds): all time until
            its latest wave's end. idle_s: seconds since then. cpu_s: of its process.
        blocks_used: held by requests; the rest is free or cached and idle.
        blocks_cached: reusable, whether or not a request uses them; some are among blocks_used.
        snapshots_total, snapshots_filled: of recurrent state; they are counted as blocks too.
        leases, escrows: requests that hold one; escrow_blocks: what all escrows together promise.
        host_blocks_total, host_blocks_cached: the same on the host tier.
        evicted, offloaded, brought_back, victims_substituted: blocks, since the start.
        lock_hold_max_s: longest time somebody held the mutex of the cache.
        invariant_violations: times an idle stage was found holding something.
    """

    stage: int
    layers: tuple[int, int]
    busy_s: float
    wait_s: Mapping[str, float] = field(default_factory=dict)
    idle_s: float = 0.0
    waves: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    snapshots_total: int = 0
    snapshots_filled: int = 0
    host_blocks_total: int = 0
    host_blocks_cached: int = 0
    leases: int = 0
    escrows: int = 0
    escrow_blocks: int = 0
    evicted: int = 0
    offloaded: int = 0
    brought_back: int = 0
    victims_substituted: int = 0
    lock_hold_max_s: float = 0.0
    invariant_violations: int = 0
    pid: int = 0
    cpu_s: float = 0.0

    @property
    def cache_usage(self) -> float:
        """Share of the blocks that requests hold."""
        return self.blocks_used / self.blocks_total if self.blocks_total else 0.0

    def __rich__(self) -> Table:
        """As rich draws it in a terminal."""
        return stages_sheet([self]).table()

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        return stages_sheet([self]).html()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """One typed snapshot of a running engine.

    Attributes:
        prefix_queries, prefix_hits: prompt tokens of admitted requests, and those of them reused
            on every stage. A request that is admitted again counts again.
        endpoints_lowered: times the stages did not all get to the limit they were asked for and
            were told a lower one. lease_mismatches: votes in which stages' leases ended at unequal
            endpoints.
        capacity_refusals: times a stage had no room for a request, which then waited.
        deferred: times a request waited for a prefix that another one was computing.
        lease_age_s_max: age of the oldest lease that is not materialised yet.
        endpoint_lowered_tokens: tokens that candidates promised and the stages together lacked.
        wave_tokens: sizes of the latest waves, oldest first (bounded).
        wave_size_counts: all waves by the first of WAVE_SIZE_BOUNDS that is not below their size,
            and the larger ones; launched_tokens: of all of them.
        wave_budget: tokens that the planner allowed the latest wave.
        driver_cpu_s: CPU seconds of the driver's process (with `--transport local` everybody's).
        rolled_back: times an admitted request found no room on a stage, or its prefix gone
            (`reservation` lease or none).
        stage_restarts: stages that were replaced by new ones.
    """

    requests_waiting: int
    requests_running: int
    requests_finished: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    waves: int
    ring_depth: int
    ring_occupancy: int
    wall_s: float
    rounds: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    endpoints_lowered: int = 0
    lease_mismatches: int = 0
    capacity_refusals: int = 0
    deferred: int = 0
    leases: int = 0
    lease_age_s_max: float = 0.0
    stages: tuple[StageStats, ...] = ()
    endpoint_lowered_tokens: int = 0
    wave_tokens: tuple[int, ...] = ()
    wave_size_counts: tuple[int, ...] = (0,) * (len(WAVE_SIZE_BOUNDS) + 1)
    launched_tokens: int = 0
    wave_budget: int = 0
    driver_cpu_s: float = 0.0
    rolled_back: int = 0
    stage_restarts: int = 0

    @property
    def lock_hold_max_s(self) -> float:
        """Longest time that the mutex of any stage's cache was held."""
        return max((stage.lock_hold_max_s for stage in self.stages), default=0.0)

    @property
    def invariant_violations(self) -> int:
        """Times an idle stage was found holding something."""
        return sum(stage.invariant_violations for stage in self.stages)

    def __rich__(self) -> Group:
        """As rich draws it in a terminal."""
        from rich.console import Group

        return Group(engine_sheet(self).table(), stages_sheet(self.stages).table())

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        return engine_sheet(self).html() + stages_sheet(self.stages).html()


def make_request(**fields: Any) -> PrefillRequest:
    """A request whose fields are right in themselves.

    `prompt_token_ids` may be any sequence of ints (numpy's too), or an array with `tolist()`.

    Raises:
        RequestError: an empty prompt, an unknown field (the nearest known one is named), or a value
            of the wrong type or out of range.
    """
    tokens: Any = fields.get("prompt_token_ids")
    if hasattr(tokens, "tolist"):
        tokens = tokens.tolist()
    if isinstance(tokens, Sequence) and not isinstance(tokens, str | bytes):
        tokens = tuple(t.item() if getattr(t, "shape", None) == () else t for t in tokens)
    lists = {
        name: (value,) if isinstance(value, str) else tuple(value)
        for name in ("stop", "stop_token_ids")
        if isinstance(value := fields.get(name), str | list)
    }
    try:
        request = PrefillRequest(**{**fields, **lists, "prompt_token_ids": tokens})
    except ValidationError as error:
        message, param = first_problem(error, PrefillRequest.model_fields)
        raise RequestError(message, param=param) from None
    if not request.prompt_token_ids:
        raise RequestError(
            "prompt is empty: give at least one token", code="empty_prompt", param="prompt"
        )
    return request


def check_request(request: PrefillRequest, *, vocab_size: int, max_model_len: int) -> None:
    """Checks a request against the model's facts.

    Raises:
        RequestError: prompt and answer are too long together, or the prompt holds a token outside
            the vocabulary.
    """
    tokens = request.prompt_token_ids
    if len(tokens) > max_model_len:
        raise RequestError(
            f"the prompt has {len(tokens)} tokens, max_model_len is {max_model_len}",
            code="prompt_too_long",
            param="prompt",
        )
    if len(tokens) + request.max_tokens - 1 > max_model_len:
        raise RequestError(
            f"the prompt has {len(tokens)} tokens and max_tokens is {request.max_tokens}; "
            f"max_model_len is {max_model_len}",
            code="context_length_exceeded",
            param="max_tokens",
        )
    low, high = min(tokens), max(tokens)
    if low < 0 or high >= vocab_size:
        raise RequestError(
            f"token id {low if low < 0 else high} is outside the vocabulary of {vocab_size} tokens",
            code="bad_token",
            param="prompt",
        )
