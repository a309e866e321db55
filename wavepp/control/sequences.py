"""The admitted attempts on one stage: their tokens, position, and the units they hold.

Owns: block tables, positions, and the order in which things are given back. May not: decide when.
Units are taken lazily, in `prepare` of the wave that first needs them (paper: local
materialization). When stages keep prefixes, `open` starts at the endpoint with the leased blocks in
the table, and `close` publishes before it gives back (escrow before lease); the callers stay as
they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from wavepp.control.blocks import BlockPool
from wavepp.control.work import GroupFacts, Sampling, SpanWork
from wavepp.protocol.messages import Int32Array, PromptRecord, SpanPlan
from wavepp.units import RequestId, WaveNumber, ceil_div


@dataclass(frozen=True, slots=True)
class AttemptKey:
    """One attempt of one request."""

    request_id: RequestId
    attempt: int


@dataclass(slots=True, kw_only=True, eq=False)
class StageSequence:
    """One admitted attempt. `position`: tokens prepared so far. `fence`: goes once this wave was
    executed.
    """

    key: AttemptKey
    prompt: PromptRecord
    position: int
    tables: dict[str, Int32Array] = field(default_factory=dict)
    failure: str | None = None
    fence: WaveNumber | None = None


class SequenceTable:
    """All admitted attempts of one stage over one pool per cache group."""

    def __init__(self, groups: Sequence[GroupFacts], *, block_size: int) -> None:
        self._groups = tuple(groups)
        self._block_size = block_size
        self._sequences: dict[AttemptKey, StageSequence] = {}
        self.pools = {group.name: BlockPool(group.name, group.units) for group in groups}

    def __len__(self) -> int:
        return len(self._sequences)

    def get(self, key: AttemptKey) -> StageSequence | None:
        """The attempt, or None when it is not admitted here (any more)."""
        return self._sequences.get(key)

    def open(self, key: AttemptKey, prompt: PromptRecord, *, endpoint: int) -> None:
        """Admits an attempt whose first `endpoint` tokens are already there."""
        assert key not in self._sequences, key
        assert endpoint == 0, "prefixes are not kept yet"
        self._sequences[key] = StageSequence(key=key, prompt=prompt, position=endpoint)

    def extend(self, sequence: StageSequence, span: SpanPlan) -> SpanWork:
        """Moves the position over the span, takes the units it needs, and says what is to be
        computed.
        """
        assert span.start == sequence.position, (span, sequence.position)
        end = span.start + span.length
        tokens, next_token_id = self._tokens(sequence, span)
        tables: Mapping[str, Int32Array] = {
            group.name: self._cover(sequence, group, end) for group in self._groups
        }
        sequence.position = end
        prompt = sequence.prompt
        return SpanWork(
            request_id=span.request_id,
            start=span.start,
            length=span.length,
            token_ids=tokens,
            block_tables=tables,
            next_token_id=next_token_id,
            sample=span.final and prompt.max_tokens > 0,
            sampling=Sampling(
                temperature=prompt.temperature,
                top_p=prompt.top_p,
                seed=prompt.seed,
                logprobs=prompt.logprobs,
                prompt_logprobs=prompt.prompt_logprobs,
            ),
        )

    def close(self, key: AttemptKey) -> None:
        """Gives back everything the attempt holds."""
        sequence = self._sequences.pop(key)
        for group, table in sequence.tables.items():
            self.pools[group].give(table)

    def due(self, finished: WaveNumber) -> list[AttemptKey]:
        """Ended attempts whose fence is behind, in the order they were admitted."""
        return [
            key
            for key, sequence in self._sequences.items()
            if sequence.fence is not None and sequence.fence <= finished
        ]

    def check(self) -> None:
        """Asserts that what sequences hold is what pools miss."""
        for group in self._groups:
            pool = self.pools[group.name]
            pool.check()
            held = sum(len(seq.tables.get(group.name, ())) for seq in self._sequences.values())
            assert held + pool.free == pool.units, (group.name, held, pool.free, pool.units)

    def _tokens(self, sequence: StageSequence, span: SpanPlan) -> tuple[Int32Array, int | None]:
        """The span's tokens, and the prompt token after it."""
        prompt = sequence.prompt.token_ids
        end = span.start + span.length
        if not span.produced:
            assert end <= len(prompt), (span, len(prompt))
            following = int(prompt[end]) if end < len(prompt) else None
            return prompt[span.start : end], following
        assert end - len(span.produced) >= len(prompt), (span, len(prompt))
        head = prompt[span.start :] if span.start < len(prompt) else prompt[:0]
        tokens = np.concatenate([head, np.asarray(span.produced, dtype=np.int32)])
        assert len(tokens) == span.length, span
        return tokens, None

    def _cover(self, sequence: StageSequence, group: GroupFacts, end: int) -> Int32Array:
        """The group's table, grown to cover [0, end)."""
        needed = 1 if group.kind == "recurrent" else ceil_div(end, self._block_size)
        table = sequence.tables.get(group.name)
        held = 0 if table is None else len(table)
        if needed > held:
            taken = self.pools[group.name].take(needed - held)
            table = taken if table is None else np.concatenate([table, taken])
            sequence.tables[group.name] = table
        assert table is not None, group
        return table
