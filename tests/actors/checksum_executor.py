"""A stage executor without a model: every result depends on all before it, through the cache.

Each "layer" writes one number a token into the token's slot of its block, then mixes it with the
sum over all slots of [0, position] as found through the block table. A wrong table, position,
order, token or layer gives another answer. `oracle` computes the same without blocks or waves.

A layer's kind is a letter: F keeps a number a token and sums all; S sums the last WINDOW only; R
keeps the running sum alone, in a working slot, saved in snapshots. F and R have the same oracle.

Tokens >= FAIL_TOKEN make trouble: FAIL_TOKEN + s raises on stage s, each time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wavepp.actors.ports import Carry, StageExecutor, StageOutput
from wavepp.cache.types import BringBack, Effect, Offload, RestoreSnapshot, ZeroSlot
from wavepp.config import EngineConfig
from wavepp.control.work import GroupFacts, GroupKind, SpanOutput, SpanWork, StageFacts, StageWork
from wavepp.errors import ConfigError
from wavepp.requests import PositionLogprobs, PrefillResult, TokenLogprob
from wavepp.units import StageIndex

UInt64Array = npt.NDArray[np.uint64]

VOCAB = 1000
FAIL_TOKEN = 990
EOS_TOKEN = 7
MIX = np.uint64(0x9E3779B97F4A7C15)
WINDOW = 11  # of S layers, in tokens
GROUPS = {"F": "full", "S": "slide", "R": "state"}
SNAPSHOTS = 8


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


def window_sums(written: UInt64Array) -> UInt64Array:
    """Sums over the last WINDOW of [.., position]."""
    sums = np.cumsum(written)
    sums[WINDOW:] -= sums[:-WINDOW].copy()
    return sums


def oracle(prompt: Sequence[int], *, layers: int, max_tokens: int = 1, kinds: str = "") -> Expected:
    tokens = list(prompt)
    produced: list[int] = []
    scores: tuple[float, ...] | None = None
    while True:
        hidden = embed(np.asarray(tokens), 0)
        for layer in range(layers):
            written = layer_write(hidden, layer)
            slides = kinds[layer : layer + 1] == "S"
            hidden = layer_read(written, window_sums(written) if slides else np.cumsum(written))
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
    result: PrefillResult,
    prompt: Sequence[int],
    layers: int,
    max_tokens: int = 1,
    *,
    kinds: str = "",
) -> None:
    expected = oracle(prompt, layers=layers, max_tokens=max_tokens, kinds=kinds)
    assert result.error is None
    assert result.token_ids == expected.token_ids
    assert result.finish_reason == expected.finish_reason
    assert result.num_prompt_tokens == len(prompt)
    if result.prompt_logprobs is not None:
        assert result.prompt_logprobs[0] is None
        scores = tuple(entry.chosen.logprob for entry in result.prompt_logprobs[1:])
        assert scores == expected.prompt_logprobs


class ChecksumExecutor:
    """One stage with as many layers as the partition says (one without).

    A host block counts as a GiB: `kv_offloading_size` says how many a group has on each stage.

    Args:
        kinds: one letter a layer of the whole model; all F without.
    """

    def __init__(
        self,
        config: EngineConfig,
        stage: int,
        *,
        units: int | None = None,
        wave_s: float = 0.0,
        kinds: str = "",
    ) -> None:
        partition = config.layer_partition or (1,) * config.pipeline_parallel_size
        first = sum(partition[:stage])
        self._layers = range(first, first + partition[stage])
        self._block_size = config.block_size
        self._wave_s = wave_s
        self._is_last = stage == config.pipeline_parallel_size - 1
        blocks = units if units is not None else config.num_gpu_blocks_override or 64
        self._kinds = kinds or "F" * sum(partition)
        host = int(config.kv_offloading_size or 0)
        used = sorted({GROUPS[self._kinds[layer]] for layer in self._layers})
        counts = {name: SNAPSHOTS if name == "state" else blocks for name in used}
        per_unit = {name: 1 if name == "state" else config.block_size for name in used}
        layers = len(self._layers)
        self._cache: dict[str, UInt64Array] = {
            name: np.zeros((layers, counts[name], per_unit[name]), dtype=np.uint64) for name in used
        }
        self._host: dict[str, UInt64Array] = {
            name: np.zeros((layers, host, per_unit[name]), dtype=np.uint64) for name in used
        }
        self._slots: UInt64Array = np.zeros((layers, config.max_num_seqs), dtype=np.uint64)
        self.closed = False
        self._facts = StageFacts(
            stage=StageIndex(stage),
            layers=(first, first + partition[stage]),
            block_size=config.block_size,
            vocab_size=VOCAB,
            max_model_len=config.max_model_len or 1 << 20,
            groups=tuple(_group(name, counts[name], host) for name in used),
            eos_token_ids=(EOS_TOKEN,),
        )

    @property
    def facts(self) -> StageFacts:
        return self._facts

    def materialize(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Offload(group=name, device=device, host=host):
                    self._host[name][:, host] = self._cache[name][:, device]
                case BringBack(group=name, host=host, device=device):
                    self._cache[name][:, device] = self._host[name][:, host]
                case RestoreSnapshot(group=name, snapshot=unit, slot=slot, from_host=from_host):
                    held = self._host if from_host else self._cache
                    self._slots[:, slot] = held[name][:, unit, 0]
                case ZeroSlot(slot=slot):
                    self._slots[:, slot] = 0
                case _:
                    raise TypeError(effect)

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
        for index, layer in enumerate(self._layers):
            written = layer_write(hidden, layer)
            if self._kinds[layer] == "R":
                hidden = layer_read(written, self._recurrent(index, span, written))
            else:
                hidden = layer_read(written, self._paged(index, span, written))
        return hidden

    def _paged(self, index: int, span: SpanWork, written: UInt64Array) -> UInt64Array:
        slides = self._kinds[self._layers[index]] == "S"
        name = "slide" if slides else "full"
        table, cache = span.block_tables[name], self._cache[name]
        end = span.start + span.length
        positions = np.arange(span.start, end)
        assert len(table) == -(-end // self._block_size), (len(table), end)
        cache[index, table[positions // self._block_size], positions % self._block_size] = written
        if not slides:
            return np.cumsum(cache[index, table].reshape(-1)[:end])[span.start :]
        first = max(span.start - WINDOW + 1, 0)
        seen = np.arange(first, end)
        blocks = table[seen // self._block_size]
        assert (blocks >= 0).all(), "a block inside the window is not there"
        sums = window_sums(cache[index, blocks, seen % self._block_size])
        return sums[span.start - first :]

    def _recurrent(self, index: int, span: SpanWork, written: UInt64Array) -> UInt64Array:
        assert span.slot is not None, span
        states = np.cumsum(written) + self._slots[index, span.slot]
        for order in span.snapshots:
            offset = order.position - span.start
            assert offset == span.length or offset % 64 == 0, (order, span)
            self._cache["state"][index, order.units["state"], 0] = states[offset - 1]
        self._slots[index, span.slot] = states[-1]
        return states

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


def _group(name: str, units: int, host_units: int) -> GroupFacts:
    kinds: Mapping[str, GroupKind] = {"full": "attention", "slide": "sliding", "state": "recurrent"}
    return GroupFacts(
        name=name,
        kind=kinds[name],
        units=units,
        bytes_per_unit=8,
        window=WINDOW if name == "slide" else None,
        host_units=host_units,
    )


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
