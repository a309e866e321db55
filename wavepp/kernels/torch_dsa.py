"""Sparse attention over latents: choosing keys by index scores, and attending to the chosen.

    I[t, s] = sum_h w[t, h] relu(q[t, h] . k[s])        the top_k largest over s <= t attend

Rows that see no more than top_k keys are dense and belong to the plan's ordinary batches; here are
only those of its `sparse`, so every row has exactly top_k choices. Scores are float32, as ties and
near-ties decide. Source: DeepSeek-V3.2. Choices are positions in the sequence, so that another
stage can look them up in its own cache.

    Shapes: T rows, S keys, n index heads, d their size, H heads, R + dr a latent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wavepp.kernels.api import MlaHeads
from wavepp.kernels.attention_plan import AttentionPlan, SparseRows
from wavepp.kernels.torch_attention import cached_rows
from wavepp.kernels.torch_mla import absorb, release
from wavepp.kernels.workspace import Workspace

TILE_ELEMENTS = 1 << 23  # elements of scores, or of gathered latents, held at once


def dsa_select(
    queries: tuple[Tensor, Tensor],
    pool: Tensor,
    plan: AttentionPlan,
    top_k: int,
    workspace: Workspace,
) -> Tensor:
    """The keys each sparse row attends to.

    Args:
        queries: index queries [T, n, d] and their float32 weights [T, n], all scales included.
        pool: index keys, [blocks, B, d]; those of this wave are in it.

    Returns:
        int32 [T, top_k], positions in no particular order; -1 in rows that are dense.
    """
    q, weights = queries
    chosen = torch.full((q.shape[0], top_k), -1, dtype=torch.int32, device=q.device)
    for rows in plan.sparse:
        keys = cached_rows(pool, rows.keys, "index_keys", q, workspace).float().t()
        step = max(1, TILE_ELEMENTS // (q.shape[1] * keys.shape[1]))
        for begin in range(0, rows.count, step):
            end = min(begin + step, rows.count)
            part = slice(rows.row + begin, rows.row + end)
            products = torch.matmul(q[part].float(), keys).relu_()
            scores = torch.bmm(weights[part].unsqueeze(1), products).squeeze(1)
            at = torch.arange(rows.start + begin, rows.start + end, device=q.device)
            later = torch.arange(keys.shape[1], device=q.device) > at[:, None]
            scores.masked_fill_(later, float("-inf"))
            chosen[part] = largest(scores, top_k).to(torch.int32)
    return chosen


def largest(scores: Tensor, count: int) -> Tensor:
    """Columns of the largest scores of each row, [rows, count], in no particular order."""
    return scores.topk(count, dim=-1, sorted=False).indices


def dsa_attend(
    rows: tuple[Tensor, Tensor],
    heads: MlaHeads,
    pool: Tensor,
    plan: AttentionPlan,
    out: Tensor,
) -> Tensor:
    """Latent attention of the plan's sparse rows over their chosen keys, written into `out`.

    Args:
        rows: queries [T, H, dn + dr] and choices int32 [T, top_k].
        pool: latents, [blocks, B, R + dr].
        out: [T, H * dv]; rows that are dense stay as they are.
    """
    q, chosen = rows
    flat = pool.view(-1, pool.shape[-1])
    rank = heads.key_up.shape[-1]
    step = max(1, TILE_ELEMENTS // (chosen.shape[1] * flat.shape[1]))
    for sparse in plan.sparse:
        for begin in range(sparse.row, sparse.row + sparse.count, step):
            part = slice(begin, min(begin + step, sparse.row + sparse.count))
            slots = _slots(sparse, chosen[part].long())
            latents = flat.index_select(0, slots.view(-1)).to(q.dtype).view(*slots.shape, -1)
            query = absorb(q[part], heads)
            scores = torch.bmm(query, latents.transpose(1, 2)).float().mul_(heads.scale)
            mixed = torch.bmm(scores.softmax(-1).to(q.dtype), latents[..., :rank])
            out[part] = release(mixed, heads).flatten(1)
    return out


def _slots(rows: SparseRows, positions: Tensor) -> Tensor:
    """Cache slots of positions in the rows' sequence."""
    if rows.keys.index is None:
        return positions + rows.keys.begin
    return rows.keys.index[positions]
