"""Waves for the flashinfer adapter, beside what the torch operations make of them."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor

from wavepp.kernels import torch_attention, torch_mla
from wavepp.kernels.api import MlaHeads
from wavepp.kernels.attention_plan import AttentionPlan, plan_attention
from wavepp.kernels.flashinfer_attention import FlashInferAttention
from wavepp.kernels.workspace import Workspace

CPU = torch.device("cpu")
B, BLOCKS = 16, 64
HEADS, KV_HEADS, DIM = 4, 2, 64
NOPE, ROPE, VALUE, RANK = 128, 64, 128, 128
EXTENTS = [(0, 40), (48, 33), (0, 1), (77, 1), (130, 64)]
ROWS = sum(length for _, length in EXTENTS)


def planned(window: int | None = None) -> AttentionPlan:
    """A wave of spans; blocks before a window are gone."""
    blocks = list(range(BLOCKS))
    random.Random(0).shuffle(blocks)
    tables = []
    for start, length in EXTENTS:
        table = np.array([blocks.pop() for _ in range(-(-(start + length) // B))], dtype=np.int32)
        if window is not None:
            table[: max(start - window + 1, 0) // B] = -1
        tables.append(table)
    return plan_attention(EXTENTS, tables, B, window=window, device=CPU)


def randn(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator)


def paged(adapter: FlashInferAttention, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
    """Grouped-query attention of a wave: the adapter's result and the one to compare with."""
    qkv = (randn(ROWS, HEADS, DIM), randn(ROWS, KV_HEADS, DIM), randn(ROWS + 1, KV_HEADS, DIM)[1:])
    pools = (randn(BLOCKS, B, KV_HEADS, DIM), randn(BLOCKS, B, KV_HEADS, DIM + 1)[..., 1:].clone())
    torch_attention.write_paged(pools, qkv[1], qkv[2], plan)
    scale = DIM**-0.5
    ours = adapter.attn_paged(qkv, pools, plan, scale, Workspace())
    return ours, torch_attention.attn_paged(qkv, pools, plan, scale, Workspace())


def latent(adapter: FlashInferAttention, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
    """Latent attention of a wave: the adapter's result and the one to compare with."""
    heads = MlaHeads(
        key_up=randn(HEADS, NOPE, RANK) * RANK**-0.5,
        value_up=randn(HEADS, VALUE, RANK + 1)[..., 1:] * RANK**-0.5,
        scale=(NOPE + ROPE) ** -0.5,
    )
    rows = (randn(ROWS, HEADS, NOPE + ROPE), randn(ROWS, RANK + ROPE))
    pool = randn(BLOCKS, B, RANK + ROPE)
    torch_mla.write_rows(pool, rows[1], plan)
    ours = adapter.mla_paged(rows, heads, pool, plan, Workspace())
    return ours, torch_mla.mla_paged(rows, heads, pool, plan, Workspace())
