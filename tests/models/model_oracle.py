"""Tools of the model tests: transformers as the oracle, and a pipeline of bare stages."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wavepp.kernels.recurrent_plan import RecurrentSlots
from wavepp.kernels.select import select_ops
from wavepp.kernels.wave import Span, build_wave
from wavepp.models.cache_pools import CachePools
from wavepp.models.config import read_model_spec
from wavepp.models.loader import CheckpointReader
from wavepp.models.stage import StageModel, wave_groups

sys.modules.setdefault("fla", None)  # type: ignore[arg-type]  # its kernels need a GPU
torch.set_num_threads(1)
CPU = torch.device("cpu")


def load_oracle(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The checkpoint as transformers loads it."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.inference_mode()
def oracle_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    """[length, vocab] of one prompt, in one plain forward."""
    logits: Tensor = model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
    return logits.float()


def random_prompt(rng: random.Random, length: int, vocab: int = 512) -> list[int]:
    """Random ordinary tokens."""
    return [rng.randrange(5, vocab) for _ in range(length)]


class BareSequence:
    """A prompt, the blocks it has, and how far it is."""

    def __init__(self, token_ids: Sequence[int], table: np.ndarray, position: int = 0) -> None:
        self.token_ids = list(token_ids)
        self.table = table
        self.position = position
        self.logits: list[Tensor] = []
        self.slot: int | None = None
        self.read_from: int | None = None
        self.snapshots: dict[int, int] = {}

    @property
    def remaining(self) -> int:
        return len(self.token_ids) - self.position

    def all_logits(self) -> Tensor:
        return torch.cat(self.logits)


class BarePipeline:
    """Stages of one model joined by nothing but tensors; all logits are kept.

    Pools start as NaN, so that reading what was never written can't pass.
    """

    def __init__(
        self,
        folder: Path,
        split: Sequence[int],
        *,
        block_size: int = 16,
        blocks: int = 128,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.spec = read_model_spec(folder, str(dtype).removeprefix("torch."))
        self.block_size = block_size
        self.free = list(range(blocks))
        self.free_slots = list(range(blocks))
        random.Random(seed).shuffle(self.free)
        random.Random(seed + 1).shuffle(self.free_slots)
        self.stages: list[StageModel] = []
        self.pools: list[list[tuple[Tensor, ...]]] = []
        units = {group.name: blocks for group in self.spec.groups}
        ops = select_ops(CPU)
        ends = list(accumulate(split))
        for lo, hi in zip([0, *ends[:-1]], ends, strict=True):
            with CheckpointReader(folder, dtype, CPU) as weights:
                self.stages.append(StageModel(self.spec, lo, hi, weights, ops))
            pools = CachePools(
                self.spec,
                (lo, hi),
                units=units,
                host_units=dict.fromkeys(units, 0),
                block_size=block_size,
                device=CPU,
            )
            for pool in (pool for layer in pools.layers for pool in layer):
                pool.fill_(float("nan"))
            self.pools.append(pools.layers)

    def sequence(self, token_ids: Sequence[int], like: BareSequence | None = None, at: int = 0):
        """A new sequence; with `like`, it shares that one's blocks up to position `at`."""
        count = -(-len(token_ids) // self.block_size)
        shared = [] if like is None else like.table[: at // self.block_size].tolist()
        assert at % self.block_size == 0
        own = [self.free.pop() for _ in range(count - len(shared))]
        made = BareSequence(token_ids, np.array(shared + own, dtype=np.int32), at)
        made.read_from = like.snapshots[at] if like is not None and self.recurrent and at else None
        return made

    @property
    def recurrent(self) -> list[str]:
        return [group.name for group in self.spec.groups if group.kind == "recurrent"]

    def states(self, sequence: BareSequence, length: int) -> dict[str, RecurrentSlots]:
        """Slots of a chunk, with a snapshot at every block boundary in it."""
        if not self.recurrent:
            return {}
        if sequence.slot is None:
            sequence.slot = self.free_slots.pop()
        start, size = sequence.position, self.block_size
        inner = range(size - start % size, length + 1, size)
        taken = [(offset, self.free_slots.pop()) for offset in inner]
        sequence.snapshots.update({start + offset: unit for offset, unit in taken})
        slots = RecurrentSlots(
            read_slot=sequence.read_from, write_slot=sequence.slot, snapshots=tuple(taken)
        )
        sequence.read_from = sequence.slot
        return dict.fromkeys(self.recurrent, slots)

    @torch.inference_mode()
    def run(self, chunks: Sequence[tuple[BareSequence, int]]) -> None:
        """One wave of (sequence, length) chunks through all stages."""
        groups = wave_groups(self.spec, 0, self.spec.num_layers)
        names = [group.name for group in groups]
        spans = [
            Span(
                start=s.position,
                length=n,
                tables=dict.fromkeys(names, s.table),
                states=self.states(s, n),
            )
            for s, n in chunks
        ]
        wave = build_wave(spans, groups, self.block_size, CPU)
        tokens = [t for s, n in chunks for t in s.token_ids[s.position : s.position + n]]
        activations = self.stages[0].embed(torch.tensor(tokens))
        for stage, pools in zip(self.stages, self.pools, strict=True):
            activations = stage.forward(activations, wave, pools)
            if not stage.is_last:
                activations = self.stages[self.stages.index(stage) + 1].receive(
                    stage.send(activations)
                )
        logits = self.stages[-1].logits(activations["hidden"])
        row = 0
        for sequence, length in chunks:
            sequence.logits.append(logits[row : row + length])
            sequence.position += length
            row += length

    def prefill(self, sequences: Sequence[BareSequence], budget: int, rng: random.Random) -> None:
        """All sequences to their end, in waves of at most `budget` tokens that mix them."""
        while any(s.remaining for s in sequences):
            open_ones = [s for s in sequences if s.remaining]
            rng.shuffle(open_ones)
            left = budget
            chunks = []
            for sequence in open_ones:
                share = left if len(open_ones) == 1 else rng.randint(0, left)
                length = min(share, sequence.remaining)
                if length:
                    chunks.append((sequence, length))
                    left -= length
            if chunks:
                self.run(chunks)
