"""The admitted attempts on one stage: their prompts, positions and block tables.

Owns: positions, what a span is to compute, and what is published of it. May not: decide when, or
hold a block: the stage's cache does. A request is materialised lazily, in `prepare` of the first
wave that names it (paper, section on local materialization), and published after execution, never
before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from wavepp.cache.keys import make_prompt, split_keys
from wavepp.cache.store import StageCache
from wavepp.cache.types import Effect, Int32Array, Prompt, Refusal, SnapshotOrders
from wavepp.control.work import Sampling, SpanWork
from wavepp.planner.snapshots import SnapshotWants, place_snapshots
from wavepp.protocol.messages import PromptRecord, SpanPlan
from wavepp.units import RequestId, WaveNumber, ceil_div


@dataclass(frozen=True, slots=True)
class AttemptKey:
    """One attempt of one request."""

    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Asked:
    """What a request asks for, without the array its tokens came in."""

    prompt: Prompt
    max_tokens: int
    sampling: Sampling


def unpack(record: PromptRecord, block_size: int) -> Asked:
    """A payload as the stage keeps it. Copies the tokens: the record's may be shared memory."""
    prompt = make_prompt(
        record.token_ids,
        block_size,
        namespace=record.namespace,
        keys=split_keys(record.keys, len(record.token_ids) // block_size),
        room_tokens=max(record.max_tokens - 1, 0),
        reusable=record.prompt_logprobs is None,
    )
    sampling = Sampling(
        temperature=record.temperature,
        top_p=record.top_p,
        seed=record.seed,
        logprobs=record.logprobs,
        prompt_logprobs=record.prompt_logprobs,
    )
    return Asked(prompt=prompt, max_tokens=record.max_tokens, sampling=sampling)


@dataclass(slots=True, kw_only=True, eq=False)
class StageSequence:
    """One admitted attempt.

    Attributes:
        position: tokens reused and prepared so far.
        tables: per paged group, None until it is materialised.
        failure: a span of it was not computed here; what comes after is worth nothing.
        fence: it ended, and goes once this wave was executed.
    """

    key: AttemptKey
    asked: Asked
    position: int
    tables: Mapping[str, Int32Array] | None = None
    slot: int | None = None
    failure: str | None = None
    fence: WaveNumber | None = None


class SequenceTable:
    """All admitted attempts of one stage, over its cache."""

    def __init__(self, cache: StageCache) -> None:
        self._cache = cache
        self._sequences: dict[AttemptKey, StageSequence] = {}
        config = cache.config
        self._keeps_snapshots = config.enable_prefix_caching and any(
            not group.paged for group in config.groups
        )

    def __len__(self) -> int:
        return len(self._sequences)

    def get(self, key: AttemptKey) -> StageSequence | None:
        """The attempt, or None when it is not admitted here (any more)."""
        return self._sequences.get(key)

    def open(self, key: AttemptKey, asked: Asked, *, endpoint: int) -> None:
        """Admits an attempt whose first `endpoint` tokens are reused."""
        assert key not in self._sequences, key
        self._sequences[key] = StageSequence(key=key, asked=asked, position=endpoint)

    def extend(
        self, sequence: StageSequence, span: SpanPlan, *, junctions: tuple[int, ...]
    ) -> tuple[SpanWork, tuple[Effect, ...]] | Refusal:
        """Moves the position over the span, and says what is to be computed and copied before.

        Args:
            junctions: where snapshots of this request are worth keeping for others.

        Returns:
            a refusal where the request had not reserved what it needs; it is where it was.
        """
        assert span.start == sequence.position, (span, sequence.position)
        effects = self._materialize(sequence)
        if isinstance(effects, Refusal):
            return effects
        assert sequence.tables is not None, span
        end = span.start + span.length
        tokens, next_token_id = _tokens(sequence.asked.prompt, span)
        orders = self._orders(sequence, span, junctions)
        blocks = ceil_div(end, self._cache.config.block_size)
        sequence.position = end
        work = SpanWork(
            request_id=span.request_id,
            start=span.start,
            length=span.length,
            token_ids=tokens,
            block_tables={name: table[:blocks] for name, table in sequence.tables.items()},
            next_token_id=next_token_id,
            sample=span.final and sequence.asked.max_tokens > 0,
            sampling=sequence.asked.sampling,
            slot=sequence.slot,
            snapshots=orders.orders,
        )
        return work, (*effects, *orders.effects)

    def publish(self, work: SpanWork) -> None:
        """The span was computed here: its full blocks, and then its snapshots, may be reused."""
        self._cache.publish(work.request_id, work.start + work.length)
        for order in work.snapshots:
            self._cache.snapshot_taken(work.request_id, order.position)

    def close(self, key: AttemptKey) -> None:
        """Forgets the attempt; what it held is the caller's to release."""
        del self._sequences[key]

    def due(self, finished: WaveNumber) -> list[AttemptKey]:
        """Ended attempts whose fence is behind, in the order they were admitted."""
        return [
            key
            for key, sequence in self._sequences.items()
            if sequence.fence is not None and sequence.fence <= finished
        ]

    def check(self) -> None:
        """Asserts that every attempt holds something in the cache, and one at a time."""
        names = [key.request_id for key in self._sequences]
        assert len(set(names)) == len(names), names
        assert set(names) <= set(self._cache.held()), (names, self._cache.held())

    def _materialize(self, sequence: StageSequence) -> tuple[Effect, ...] | Refusal:
        """The first wave that names the request: it gets blocks of its own."""
        if sequence.tables is not None:
            return ()
        owned = self._cache.install(sequence.key.request_id)
        if isinstance(owned, Refusal):
            return owned
        assert owned.endpoint == sequence.position, (owned.endpoint, sequence.position)
        sequence.tables, sequence.slot = owned.block_tables, owned.slot
        return owned.effects

    def _orders(
        self, sequence: StageSequence, span: SpanPlan, junctions: tuple[int, ...]
    ) -> SnapshotOrders:
        """Snapshots of the coming span. A sequence that failed has nothing worth keeping."""
        if not self._keeps_snapshots or sequence.failure is not None:
            return SnapshotOrders()
        config, prompt = self._cache.config, sequence.asked.prompt
        full = len(prompt.keys) * config.block_size  # beyond it are tokens that nobody can share

        def places(wants: SnapshotWants) -> set[int]:
            found = place_snapshots(span.start, span.length, wants, block_size=config.block_size)
            return {at for at in found.positions(span.start, span.length) if at <= full}

        shared = places(SnapshotWants(exact=junctions))
        own = places(SnapshotWants(interval=config.snapshot_interval, exact=(prompt.tail,)))
        return self._cache.snapshot_orders(
            span.request_id, sorted(shared | own), junctions=sorted(shared)
        )


def _tokens(prompt: Prompt, span: SpanPlan) -> tuple[Int32Array, int | None]:
    """The span's tokens, and the prompt token after it."""
    end, count = span.start + span.length, prompt.num_tokens
    if not span.produced:
        assert end <= count, (span, count)
        following = int(prompt.tokens[end]) if end < count else None
        return prompt.tokens[span.start : end], following
    assert end - len(span.produced) >= count, (span, count)
    tokens = np.concatenate(
        [prompt.tokens[span.start :], np.asarray(span.produced, dtype=np.int32)]
    )
    assert len(tokens) == span.length, span
    return tokens, None
