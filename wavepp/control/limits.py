"""What this engine can serve at all, and the refusals on arrival.

Owns: the numbers that come from the stages' facts and the configuration, and the check of one
request against them. May not: hold requests. A refusal is a value (a RequestError to hand to the
caller); the core never raises it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wavepp.control.facts import Arrival
from wavepp.control.options import DriverOptions, cache_groups
from wavepp.control.work import GroupFacts, StageFacts
from wavepp.errors import ConfigError, QueueFullError, RequestError
from wavepp.protocol.books import LeaderOptions
from wavepp.protocol.capacity import smallest_capacity
from wavepp.units import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class Smallest:
    """The smallest pool of one kind over all stages, and where it is."""

    units: int
    stage: int
    group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Numbers every request is held against.

    Attributes:
        blocks: smallest pool of blocks (attention and sliding groups); None: no stage has one.
            Recurrent groups refuse nobody: working slots are lanes, and snapshots elastic.
        oversized_over: a request that holds more tokens does not fit beside the headroom.
    """

    block_size: int
    vocab_size: int
    max_model_len: int
    blocks: Smallest | None
    oversized_over: int | None
    eos_token_ids: frozenset[int]

    def blocks_needed(self, num_tokens: int, max_tokens: int) -> int:
        """Blocks one request holds on each stage at its end. The last produced token is never
        computed.
        """
        if self.blocks is None:
            return 0
        return ceil_div(tokens_held(num_tokens, max_tokens), self.block_size)


def tokens_held(num_tokens: int, max_tokens: int) -> int:
    """Tokens whose state a request needs: the prompt, and each produced token but the last."""
    return num_tokens + max(max_tokens - 1, 0)


def build_limits(
    facts: Sequence[StageFacts], *, max_model_len: int | None, headroom_tokens: int = 0
) -> Limits:
    """Limits from what the stages told at start: the smallest counts.

    Args:
        headroom_tokens: 2PM, what admission leaves free.

    Raises:
        ConfigError: stages disagree on something that must be equal; both values are named.
    """
    assert facts, "a pipeline has at least one stage"
    for name in ("block_size", "vocab_size"):
        for stage in facts[1:]:
            here, there = getattr(facts[0], name), getattr(stage, name)
            if here != there:
                raise ConfigError(
                    f"{name}: stage {facts[0].stage} has {here}, stage {stage.stage} has {there}"
                )
    lengths = [stage.max_model_len for stage in facts]
    if max_model_len is not None:
        lengths.append(max_model_len)
    return Limits(
        block_size=facts[0].block_size,
        vocab_size=facts[0].vocab_size,
        max_model_len=min(lengths),
        blocks=_smallest(facts),
        oversized_over=smallest_capacity(
            [cache_groups(stage) for stage in facts],
            block_size=facts[0].block_size,
            headroom_tokens=headroom_tokens,
        ).oversized_over,
        eos_token_ids=frozenset(token for stage in facts for token in stage.eos_token_ids),
    )


def refusal(limits: Limits, arrival: Arrival) -> RequestError | None:
    """Why this request can never be served here, or None. Queue limits and live ids are apart."""
    tokens = arrival.token_ids
    num_tokens = len(tokens)
    if num_tokens == 0:
        return _refuse("the prompt is empty", "empty_prompt")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= limits.vocab_size:
        bad = low if low < 0 else high
        return _refuse(
            f"token id {bad} is outside the vocabulary [0, {limits.vocab_size})",
            "token_out_of_range",
        )
    held = tokens_held(num_tokens, arrival.max_tokens)
    if held > limits.max_model_len:
        return _refuse(
            f"the prompt has {num_tokens} tokens and max_tokens is {arrival.max_tokens}; "
            f"this model serves at most {limits.max_model_len}",
            "context_length_exceeded",
        )
    return _pool_refusal(limits, arrival)


def id_refusal(arrival: Arrival) -> RequestError:
    """Of a request whose id another one bears."""
    return RequestError(
        f"request_id {arrival.user_id!r} is in use by a request that has not finished",
        code="duplicate_request_id",
        param="request_id",
    )


def queue_refusal(
    options: DriverOptions, arrival: Arrival, waiting: int, tokens_waiting: int
) -> QueueFullError | None:
    """Why the queue, which holds so many requests and tokens, has no place for one more now."""
    requests_max, tokens_max = options.max_num_queued_reqs, options.max_num_queued_tokens
    if requests_max is not None and waiting >= requests_max:
        return QueueFullError(
            f"{waiting} requests wait; max_num_queued_reqs is {requests_max}", code="queue_full"
        )
    tokens = tokens_waiting + len(arrival.token_ids)
    if tokens_max is not None and waiting and tokens > tokens_max:
        return QueueFullError(
            f"{tokens} tokens would wait, max_num_queued_tokens is {tokens_max}",
            code="queue_full",
        )
    return None


def _pool_refusal(limits: Limits, arrival: Arrival) -> RequestError | None:
    needed = limits.blocks_needed(len(arrival.token_ids), arrival.max_tokens)
    if limits.blocks is not None and needed > limits.blocks.units:
        return _refuse(
            f"the request needs {needed} cache blocks of {limits.block_size} tokens; "
            f"stage {limits.blocks.stage} has {limits.blocks.units}",
            "larger_than_pool",
        )
    return None


def _refuse(message: str, code: str) -> RequestError:
    return RequestError(message, code=code, param="prompt")


def _smallest(facts: Sequence[StageFacts]) -> Smallest | None:
    pools: list[tuple[StageFacts, GroupFacts]] = [
        (stage, group) for stage in facts for group in stage.groups if group.kind != "recurrent"
    ]
    if not pools:
        return None
    stage, group = min(pools, key=lambda pool: pool[1].units)
    return Smallest(units=group.units, stage=stage.stage, group=group.name)


def leader_options(options: DriverOptions, limits: Limits, num_stages: int) -> LeaderOptions:
    """What the leader of so many stages decides by."""
    return LeaderOptions(
        num_stages=num_stages,
        block_size=limits.block_size,
        lanes_max=options.max_num_seqs,
        admission=options.admission,
        agreement=options.agreement,
        oversized_over=limits.oversized_over if options.reservation == "escrow" else None,
        defer_shared_prefix=options.defer_shared_prefix,
        defer_max_s=options.defer_max_s,
    )
