"""TorchExecutor: computes the spans of a wave on one stage, with torch.

Owns the stage's weights and cache pools. Block ids are given by the control; nothing here decides
what is cached. The only place where models meet the runtime. (The cuda device is written for, not
run on a GPU.)
"""

from __future__ import annotations

import math
import os
import random
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import psutil
import torch
import xxhash
from torch import Tensor

from wavepp.actors.ports import Carry, StageOutput
from wavepp.cache.types import BringBack, Effect, Offload, RestoreSnapshot, ZeroSlot
from wavepp.config import EngineConfig
from wavepp.control.work import GroupFacts, SpanOutput, SpanWork, StageFacts, StageWork
from wavepp.errors import ConfigError
from wavepp.kernels.recurrent_plan import CHUNK
from wavepp.kernels.select import compute_dtype, select_ops
from wavepp.kernels.wave import Span, build_wave
from wavepp.models.cache_pools import CachePools, group_units
from wavepp.models.config import read_model_spec
from wavepp.models.loader import CheckpointReader, DummyWeights
from wavepp.models.partition import stage_layers
from wavepp.models.sampling import (
    ScoredRows,
    finite_rows,
    greedy_tokens,
    sample_token,
    score_rows,
)
from wavepp.models.spec import ModelSpec
from wavepp.models.stage import TORCH_DTYPES, Activations, StageModel
from wavepp.requests import PositionLogprobs, TokenLogprob
from wavepp.units import StageIndex

NOT_FINITE = (
    "the logits are not finite numbers: the weights are damaged, or dtype is too narrow for them"
)
WIDENED_MEMORY_SHARE = 0.5  # of free memory that weights widened to float32 may take


class TorchExecutor:
    """One stage: weights, cache pools and forward. See StageExecutor for the contract."""

    def __init__(self, config: EngineConfig, stage: int) -> None:
        spec = read_model_spec(config.model, config.dtype)
        _check_block_size(config, spec)
        max_model_len = config.model_len(
            spec.max_model_len,
            f"the model has only {spec.max_model_len} positions (max_position_embeddings)",
        )
        lo, hi = stage_layers(spec, config.pipeline_parallel_size, config.layer_partition)[stage]
        self._device = _device(config)
        self._threads = config.threads_per_stage or _default_threads(config.pipeline_parallel_size)
        self._threads_set_on: int | None = None
        self._block_size = config.block_size
        self._model = _load(config, spec, (lo, hi), self._device)
        self._groups = self._model.wave_groups
        groups = _group_facts(config, spec, (lo, hi), max_model_len)
        self._pools = CachePools(
            spec,
            (lo, hi),
            units={group.name: group.units for group in groups},
            host_units={group.name: group.host_units for group in groups},
            block_size=config.block_size,
            device=self._device,
            working_slots=config.max_num_seqs,
        )
        self._outputs = _OutputMaker(self._model, config.seed) if self._model.is_last else None
        self._facts = StageFacts(
            stage=StageIndex(stage),
            layers=(lo, hi),
            block_size=config.block_size,
            vocab_size=spec.vocab_size,
            max_model_len=max_model_len,
            groups=groups,
            eos_token_ids=spec.eos_token_ids,
            weight_bytes=self._model.weight_bytes,
        )

    @property
    def facts(self) -> StageFacts:
        """Topology and capacity of this stage; constant."""
        return self._facts

    @torch.inference_mode()
    def materialize(self, effects: Sequence[Effect]) -> None:
        """Moves blocks and snapshots between device, host and working slots, in this order."""
        self._set_threads()
        for effect in effects:
            match effect:
                case Offload(group=group, device=device, host=host):
                    self._pools.offload(group, device, host)
                case BringBack(group=group, host=host, device=device):
                    self._pools.bring_back(group, host, device)
                case RestoreSnapshot(group=group, snapshot=unit, slot=slot, from_host=from_host):
                    self._pools.restore(group, unit, slot, from_host=from_host)
                case ZeroSlot():
                    pass  # a span from position 0 reads no slot
                case _:
                    raise TypeError(effect)

    @torch.inference_mode()
    def forward(self, work: StageWork, carry: Carry | None) -> StageOutput:
        """Computes one wave. The carry is read, never written to."""
        if not work.spans:
            return StageOutput(carry=carry)
        self._set_threads()
        spans = [self._place(span) for span in work.spans]
        wave = build_wave(spans, self._groups, self._block_size, self._device)
        activations = self._model.forward(self._enter(work.spans, carry), wave, self._pools.layers)
        if self._outputs is None:
            return StageOutput(carry=self._model.send(activations))
        return StageOutput(outputs=self._outputs.make(work.spans, activations["hidden"]))

    def close(self) -> None:
        """Gives weights and pools back."""
        del self._model, self._pools, self._outputs

    def _place(self, span: SpanWork) -> Span:
        """A span with the places of its cache: blocks, working slot, snapshots to write."""
        orders = [(order.position, order.units) for order in span.snapshots]
        return Span(
            start=span.start,
            length=span.length,
            tables=span.block_tables,
            states=self._pools.span_states(span.start, span.slot, orders),
        )

    def _enter(self, spans: Sequence[SpanWork], carry: Carry | None) -> Activations:
        """What this stage starts from, its own to overwrite."""
        if self._model.is_first:
            token_ids = np.concatenate([span.token_ids for span in spans])
            return self._model.embed(torch.from_numpy(token_ids).to(self._device))
        assert carry is not None, "a stage after the first needs a carry"
        return self._model.receive(carry)

    def _set_threads(self) -> None:
        """Sets torch's thread count for the thread that computes, once: it is kept per thread."""
        here = threading.get_ident()
        if self._device.type == "cpu" and self._threads_set_on != here:
            torch.set_num_threads(self._threads)
            self._threads_set_on = here


def _check_block_size(config: EngineConfig, spec: ModelSpec) -> None:
    """Snapshots lie on block boundaries, and the delta rule is exact where its chunks end."""
    recurrent = any(group.kind == "recurrent" for group in spec.groups)
    if recurrent and config.block_size % CHUNK:
        raise ConfigError(
            f"block_size {config.block_size}: recurrent layers (model_type {spec.family!r}) need a "
            f"multiple of {CHUNK}"
        )


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("device cuda: torch finds no CUDA device here")
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _default_threads(stages: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // stages)


def _group_facts(
    config: EngineConfig, spec: ModelSpec, layers: tuple[int, int], max_model_len: int
) -> tuple[GroupFacts, ...]:
    sizes = group_units(config, spec, layers, max_model_len)
    return tuple(
        GroupFacts(
            name=group.name,
            kind=group.kind,
            units=sizes[group.name].units,
            bytes_per_unit=sizes[group.name].bytes_per_unit,
            window=group.window,
            host_units=sizes[group.name].host_units,
        )
        for group in spec.groups_in(*layers)
    )


def _load(
    config: EngineConfig, spec: ModelSpec, layers: tuple[int, int], device: torch.device
) -> StageModel:
    lo, hi = layers
    recurrent = any(group.kind == "recurrent" for group in spec.groups_in(lo, hi))
    ops = select_ops(device, recurrent=recurrent)
    dtype = compute_dtype(TORCH_DTYPES[spec.dtype], device)
    widened = spec.parameters_in(lo, hi) * dtype.itemsize
    if widened > WIDENED_MEMORY_SHARE * psutil.virtual_memory().available:
        dtype = TORCH_DTYPES[spec.dtype]
    if config.load_format == "dummy":
        return StageModel(spec, lo, hi, DummyWeights(config.seed, dtype, device), ops)
    with CheckpointReader(config.model, dtype, device) as weights:
        return StageModel(spec, lo, hi, weights, ops)


Sample = tuple[int | None, PositionLogprobs | None]


class _OutputMaker:
    """Turns the last layer's rows into span outputs.

    Args:
        seed: of sampling, for requests that name none; their id then makes the difference.
    """

    def __init__(self, model: StageModel, seed: int) -> None:
        self._model = model
        self._seed = seed

    def make(self, spans: Sequence[SpanWork], x: Tensor) -> tuple[SpanOutput, ...]:
        """One output a span, in order, from rows x [T, hidden] in the same order."""
        ends = np.cumsum([span.length for span in spans])
        sampled = self._sample([(s, int(end) - 1) for s, end in zip(spans, ends, strict=True)], x)
        outputs = []
        for index, (span, end) in enumerate(zip(spans, ends, strict=True)):
            sample = sampled.get(index, (None, None))
            scores: tuple[PositionLogprobs, ...] = ()
            if span.sampling.prompt_logprobs is not None:
                scores = self._score_prompt(span, x[int(end) - span.length : int(end)])
            outputs.append(_span_output(span, sample, scores))
        return tuple(outputs)

    def _sample(self, lasts: Sequence[tuple[SpanWork, int]], x: Tensor) -> dict[int, Sample | None]:
        """Span index -> token and its log probabilities, for spans that sample; None: the logits
        are of no use.
        """
        asking = [index for index, (span, _) in enumerate(lasts) if span.sample]
        results: dict[int, Sample | None] = {}
        for part in _tiles(len(asking), self._model.logit_rows_max):
            indices = asking[part]
            rows = torch.tensor([lasts[i][1] for i in indices], device=x.device)
            logits = self._model.logits(x.index_select(0, rows))
            likeliest, usable = greedy_tokens(logits).tolist(), finite_rows(logits).tolist()
            for at, index in enumerate(indices):
                if not usable[at]:
                    results[index] = None
                    continue
                span = lasts[index][0]
                token_id = self._choose(span, logits[at], likeliest[at])
                results[index] = (token_id, _logprobs(span, logits[at : at + 1], token_id))
        return results

    def _choose(self, span: SpanWork, logits: Tensor, likeliest: int) -> int:
        sampling = span.sampling
        if sampling.temperature <= 0.0:
            return likeliest
        # Depends on the request and the position alone: not on waves, stages or other requests.
        named = f"{span.request_id}/{self._seed}" if sampling.seed is None else f"{sampling.seed}"
        seed = xxhash.xxh64_intdigest(f"{named}/{span.start + span.length}".encode())
        uniform = random.Random(seed).random()
        return sample_token(logits, sampling.temperature, sampling.top_p, uniform)

    def _score_prompt(self, span: SpanWork, x: Tensor) -> tuple[PositionLogprobs, ...]:
        """Scores tokens start+1 .. of a span from its rows x [length, hidden]."""
        following = span.token_ids[1:].tolist()
        if span.next_token_id is not None:
            following.append(span.next_token_id)
        top = span.sampling.prompt_logprobs or 0
        scores: list[PositionLogprobs] = []
        for part in _tiles(len(following), self._model.logit_rows_max):
            token_ids = torch.tensor(following[part], device=x.device)
            scored = score_rows(self._model.logits(x[part]), token_ids, top)
            scores.extend(_positions(scored, following[part]))
        return tuple(scores)


def _span_output(
    span: SpanWork, sample: Sample | None, scores: tuple[PositionLogprobs, ...]
) -> SpanOutput:
    """What is said of a span; nothing but an error when its numbers are of no use."""
    if sample is None or not all(math.isfinite(score.chosen.logprob) for score in scores):
        return SpanOutput(request_id=span.request_id, error=NOT_FINITE)
    token_id, logprobs = sample
    return SpanOutput(
        request_id=span.request_id, token_id=token_id, logprobs=logprobs, prompt_logprobs=scores
    )


def _tiles(count: int, size: int) -> Iterator[slice]:
    return (slice(begin, min(begin + size, count)) for begin in range(0, count, size))


def _logprobs(span: SpanWork, logits: Tensor, token_id: int) -> PositionLogprobs | None:
    if span.sampling.logprobs is None:
        return None
    token_ids = torch.tensor([token_id], device=logits.device)
    scored = score_rows(logits, token_ids, span.sampling.logprobs)
    return next(_positions(scored, [token_id]))


def _positions(scored: ScoredRows, token_ids: Sequence[int]) -> Iterator[PositionLogprobs]:
    columns = (scored.logprobs, scored.ranks, scored.top_ids, scored.top_logprobs)
    rows = zip(token_ids, *(column.tolist() for column in columns), strict=True)
    for token_id, logprob, rank, top_ids, top_logprobs in rows:
        top = zip(top_ids, top_logprobs, strict=True)
        yield PositionLogprobs(
            chosen=TokenLogprob(token_id=token_id, logprob=logprob, rank=rank),
            top=tuple(
                TokenLogprob(token_id=i, logprob=value, rank=place)
                for place, (i, value) in enumerate(top, start=1)
            ),
        )
