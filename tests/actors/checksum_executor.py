"""A stage executor without a model: every result depends on all before it, through the cache.

Each "layer" writes one number a token into the token's slot of its block, then mixes it with the
sum over all slots of [0, position] as found through the block table. A wrong table, position,
order, token or layer gives another answer. `oracle` computes the same without blocks or waves.

Tokens >= FAIL_TOKEN make trouble: FAIL_TOKEN + s raises on stage s, each time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wavepp.actors.ports import Carry, StageExecutor, StageOutput
from wavepp.config import EngineConfig
from wavepp.control.work import GroupFacts, SpanOutput, SpanWork, StageFacts, StageWork
from wavepp.errors import ConfigError
from wavepp.requests import PositionLogprobs, PrefillResult, TokenLogprob
from wavepp.units import StageIndex

UInt64Array = npt.NDArray[np.uint64]

VOCAB = 1000
FAIL_TOKEN = 990
EOS_TOKEN = 7
MIX = np.uint64(0x9E3779B97F4A7C15)


def embed(tokens: npt.NDArray[np.integer], start: int) -> UInt64Array:
    positions = np.arange(start, start + len(tokens), dtype=np.uint64)
    return (tokens.astype(np.uint64) + np.uint64(1)) * MIX + positions * np.uint64(0x2545F491)


def layer_write(hidden: UInt64Array, layer: int) -> UInt64Array:
    return (hidden ^ (hidden >> np.uint64(29))) * (MIX + np.uint64(2 * layer))


def layer_read(written: UInt64Array, sums: UInt64Array) -> UInt64Array:
    return written * np.uint64(0xD1342543DE82EF95) + sums


def token_of(hidden: np.uint64) -> int:
    return int(hidden % np.uint64(FAIL_TOKEN))


def logprob_of(hidden: np.uint64, token: int) -> float:
    return -(int(hidden % np.uint64(4096)) + token) / 4096.0


@dataclass(frozen=True)
class Expected:
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_logprobs: tuple[float, ...]


def oracle(prompt: Sequence[int], *, layers: int, max_tokens: int = 1) -> Expected:
    tokens = list(prompt)
    produced: list[int] = []
    scores: tuple[float, ...] | None = None
    while True:
        hidden = embed(np.asarray(tokens), 0)
        for layer in range(layers):
            written = layer_write(hidden, layer)
            hidden = layer_read(written, np.cumsum(written))
        if scores is None:
            scores = tuple(
                logprob_of(state, token)
                for state, token in zip(hidden[:-1], tokens[1:], strict=True)
            )
        if len(produced) == max_tokens:
            return Expected(tuple(produced), "length", scores)
        produced.append(token_of(hidden[-1]))
        if produced[-1] == EOS_TOKEN:
            return Expected(tuple(produced), "stop", scores)
        tokens.append(produced[-1])


def assert_served(
    result: PrefillResult, prompt: Sequence[int], layers: int, max_tokens: int = 1
) -> None:
    expected = oracle(prompt, layers=layers, max_tokens=max_tokens)
    assert result.error is None
    assert result.token_ids == expected.token_ids
    assert result.finish_reason == expected.finish_reason
    assert result.num_prompt_tokens == len(prompt)
    if result.prompt_logprobs is not None:
        assert result.prompt_logprobs[0] is None
        scores = tuple(entry.chosen.logprob for entry in result.prompt_logprobs[1:])
        assert scores == expected.prompt_logprobs


class ChecksumExecutor:
    """One stage with as many layers as the partition says (one without)."""

    def __init__(
        self, config: EngineConfig, stage: int, *, units: int | None = None, wave_s: float = 0.0
    ) -> None:
        partition = config.layer_partition or (1,) * config.pipeline_parallel_size
        first = sum(partition[:stage])
        self._layers = range(first, first + partition[stage])
        self._block_size = config.block_size
        self._wave_s = wave_s
        self._is_last = stage == config.pipeline_parallel_size - 1
        blocks = units if units is not None else config.num_gpu_blocks_override or 64
        shape = (len(self._layers), blocks, config.block_size)
        self._cache: UInt64Array = np.zeros(shape, dtype=np.uint64)
        self.closed = False
        self._facts = StageFacts(
            stage=StageIndex(stage),
            layers=(first, first + partition[stage]),
            block_size=config.block_size,
            vocab_size=VOCAB,
            max_model_len=config.max_model_len or 1 << 20,
            groups=(GroupFacts(name="full", kind="attention", units=blocks, bytes_per_unit=8),),
            eos_token_ids=(EOS_TOKEN,),
        )

    @property
    def facts(self) -> StageFacts:
        return self._facts

    def forward(self, work: StageWork, carry: Carry | None) -> StageOutput:
        assert (carry is None) == (self._facts.stage == 0)
        if self._wave_s:
            time.sleep(self._wave_s)
        hidden = self._inputs(work, carry)
        total = sum(span.length for span in work.spans)
        assert len(hidden) == total, (len(hidden), total)
        offset = 0
        for span in work.spans:
            self._maybe_fail(span)
            rows = slice(offset, offset + span.length)
            hidden[rows] = self._span(span, hidden[rows])
            offset += span.length
        if not self._is_last:
            return StageOutput(carry={"hidden": hidden})
        return StageOutput(outputs=self._outputs(work, hidden))

    def close(self) -> None:
        self.closed = True

    def _inputs(self, work: StageWork, carry: Carry | None) -> UInt64Array:
        if carry is not None:
            return np.array(carry["hidden"], dtype=np.uint64)
        return np.concatenate([embed(span.token_ids, span.start) for span in work.spans])

    def _maybe_fail(self, span: SpanWork) -> None:
        if (span.token_ids == FAIL_TOKEN + int(self._facts.stage)).any():
            raise RuntimeError(f"token {FAIL_TOKEN + int(self._facts.stage)} can't be computed")

    def _span(self, span: SpanWork, hidden: UInt64Array) -> UInt64Array:
        table = span.block_tables["full"]
        end = span.start + span.length
        positions = np.arange(span.start, end)
        blocks, slots = table[positions // self._block_size], positions % self._block_size
        for index, layer in enumerate(self._layers):
            written = layer_write(hidden, layer)
            self._cache[index, blocks, slots] = written
            seen = self._cache[index, table].reshape(-1)[:end]
            hidden = layer_read(written, np.cumsum(seen)[span.start :])
        return hidden

    def _outputs(self, work: StageWork, hidden: UInt64Array) -> tuple[SpanOutput, ...]:
        outputs = []
        offset = 0
        for span in work.spans:
            rows = hidden[offset : offset + span.length]
            offset += span.length
            outputs.append(
                SpanOutput(
                    request_id=span.request_id,
                    token_id=token_of(rows[-1]) if span.sample else None,
                    logprobs=_score(rows[-1], token_of(rows[-1])) if span.sample else None,
                    prompt_logprobs=_scores(span, rows),
                )
            )
        return tuple(outputs)


def _score(hidden: np.uint64, token: int) -> PositionLogprobs:
    return PositionLogprobs(
        chosen=TokenLogprob(token_id=token, logprob=logprob_of(hidden, token), rank=1)
    )


def _scores(span: SpanWork, rows: UInt64Array) -> tuple[PositionLogprobs, ...]:
    if span.sampling.prompt_logprobs is None:
        return ()
    following = [int(token) for token in span.token_ids[1:]]
    if span.next_token_id is not None:
        following.append(span.next_token_id)
    return tuple(_score(row, token) for row, token in zip(rows, following, strict=False))


def checksum(config: EngineConfig, stage: int) -> StageExecutor:
    return ChecksumExecutor(config, stage)


def checksum_short_stage(config: EngineConfig, stage: int) -> StageExecutor:
    """Stage 1 has half the blocks of the others."""
    blocks = config.num_gpu_blocks_override or 64
    return ChecksumExecutor(config, stage, units=blocks // 2 if stage == 1 else blocks)


def checksum_20ms(config: EngineConfig, stage: int) -> StageExecutor:
    """Every wave takes 20 ms on every stage."""
    return ChecksumExecutor(config, stage, wave_s=0.02)


def checksum_100ms(config: EngineConfig, stage: int) -> StageExecutor:
    """Every wave takes 100 ms on every stage."""
    return ChecksumExecutor(config, stage, wave_s=0.1)


def refuses_to_build(config: EngineConfig, stage: int) -> StageExecutor:
    """Stage 1 can't be built."""
    if stage == 1:
        raise ConfigError(f"block_size {config.block_size} is not to the liking of stage 1")
    return ChecksumExecutor(config, stage)


def crashes_on_build(config: EngineConfig, stage: int) -> StageExecutor:
    """Stage 1 breaks down."""
    if stage == 1:
        raise ZeroDivisionError("stage 1 broke down")
    return ChecksumExecutor(config, stage)
