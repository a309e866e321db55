"""Multi-head latent attention of one wave over a paged cache, in torch: the definition of correct.

The cache has one row a token: the normed latent c [R] and the shared rope key r [dr]. A head's key
is [K c | r] and its value V c, with K [dn, R] and V [dv, R] of the head. Two ways, same result:

    expanded   make the heads' keys and values of all cached rows, then attend
    absorbed   fold K into the query and V into the result, and attend over the rows themselves:
               more work a (query, key) pair, none a cached row

A wave's own rows are expanded; its cached prefix is read whichever way costs less.

    Shapes: T rows, N spans of L rows, S cached rows, H heads, D the larger of dn + dr and dv.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from wavepp.kernels.api import MlaHeads
from wavepp.kernels.attention_plan import AttentionPlan, Prefix, Rows, SpanBatch
from wavepp.kernels.torch_attention import PREFIX_KEYS, Scored, attend, cached_rows, merge
from wavepp.kernels.workspace import Workspace

EXPANDED_MAX = 1 << 25  # elements of keys and values that are expanded at once


def write_rows(pool: Tensor, rows: Tensor, plan: AttentionPlan) -> None:
    """Puts rows [T, D] into a pool [blocks, B, D] at the plan's slots."""
    flat, slots = pool.view(-1, pool.shape[-1]), plan.slots
    if slots.index is None:
        flat[slots.begin : slots.begin + slots.count].copy_(rows)
    else:
        flat.index_copy_(0, slots.index, rows.to(flat.dtype))


def mla_paged(
    rows: tuple[Tensor, Tensor],
    heads: MlaHeads,
    pool: Tensor,
    plan: AttentionPlan,
    workspace: Workspace,
) -> Tensor:
    """Causal latent attention of every row over its own sequence.

    Args:
        rows: queries [T, H, dn + dr] and latents [T, R + dr], the latter already in the cache.
        pool: [blocks, B, R + dr].
        plan: of the layer's cache group. Rows that only its `sparse` names are left undefined.

    Returns:
        [T, H * dv], contiguous.
    """
    q = rows[0]
    count, _, v_dim = heads.part_of
    out = workspace.empty("mla", (q.shape[0], count * v_dim), q)
    for batch in plan.batches:
        result = _span_batch(rows, heads, pool, batch, workspace).reshape(batch.rows.count, -1)
        if batch.out_rows is None:
            out[batch.rows.begin : batch.rows.begin + batch.rows.count] = result
        else:
            kept = result if batch.keep is None else result.index_select(0, batch.keep)
            out.index_copy_(0, batch.out_rows, kept)
    return out


def absorb(q: Tensor, heads: MlaHeads) -> Tensor:
    """Queries [..., H, dn + dr] as queries of cached rows, [..., H, R + dr]."""
    count, nope, _ = heads.part_of
    flat = q.reshape(-1, count, q.shape[-1])
    latent = torch.bmm(flat[..., :nope].transpose(0, 1), heads.key_up).transpose(0, 1)
    absorbed = torch.cat([latent, flat[..., nope:]], dim=-1)
    return absorbed.view(*q.shape[:-1], absorbed.shape[-1])


def release(mixed: Tensor, heads: MlaHeads) -> Tensor:
    """Mixed latents [..., H, R] as the heads' results [..., H, dv]."""
    flat = mixed.reshape(-1, *mixed.shape[-2:]).transpose(0, 1)
    values = torch.bmm(flat, heads.value_up.transpose(1, 2)).transpose(0, 1)
    return values.reshape(*mixed.shape[:-1], values.shape[-1])


def _span_batch(
    rows: tuple[Tensor, Tensor],
    heads: MlaHeads,
    pool: Tensor,
    batch: SpanBatch,
    workspace: Workspace,
) -> Tensor:
    """[N, L, H, dv] for a batch of spans."""
    q = batch.rows.take(rows[0])
    q = q.view(batch.size, batch.length, *q.shape[1:])
    scored = None
    if batch.chunk:
        own = batch.rows.take(rows[1]).view(batch.size, batch.length, -1)
        scored = _expanded(q, own, heads, causal=True, mask=None)
    if batch.prefix is not None:
        part = _prefix(q, heads, pool, batch.prefix, workspace)
        scored = part if scored is None else merge(scored, part)
    assert scored is not None
    return scored[0]


def _prefix(
    q: Tensor, heads: MlaHeads, pool: Tensor, prefix: Prefix, workspace: Workspace
) -> Scored:
    """Attention of q [N, L, H, dn + dr] over cached rows, a bounded number of them at a time."""
    n, length = q.shape[:2]
    folded = is_absorbing_cheaper(length, prefix.size, heads, pool.shape[-1])
    query = absorb(q, heads) if folded else q
    step = max(1, PREFIX_KEYS // n)
    scored: Scored | None = None
    for begin in range(0, prefix.size, step):
        end = min(begin + step, prefix.size)
        slots: Rows = prefix.slots_of(n, begin, end)
        latents = cached_rows(pool, slots, "prefix_latents", q, workspace)
        latents = latents.view(n, end - begin, -1)
        mask = None if prefix.mask is None else prefix.mask[..., begin:end]
        if folded:
            out, lse = _over_latents(query, latents, mask, heads.scale)
        else:
            out, lse = _expanded(query, latents, heads, causal=False, mask=mask)
        if mask is not None and begin:  # a shorter sequence may have no key in this part
            none = ~mask.any(-1)
            out = out.masked_fill(none.unsqueeze(-1), 0.0)
            lse = lse.masked_fill(none, float("-inf"))
        scored = (out, lse) if scored is None else merge(scored, (out, lse))
    assert scored is not None
    if not folded:
        return scored
    return release(scored[0][..., : heads.key_up.shape[-1]], heads), scored[1]


def is_absorbing_cheaper(length: int, size: int, heads: MlaHeads, latent_dim: int) -> bool:
    """Whether L queries over S cached rows cost fewer operations absorbed than expanded."""
    _, nope, v_dim = heads.part_of
    rank = heads.key_up.shape[-1]
    per_row = rank * (nope + v_dim)  # to expand a cached row, or to absorb a query
    wide = 2 * max(nope + latent_dim - rank, v_dim)
    return length * (per_row + size * 2 * latent_dim) < size * (per_row + length * wide)


def _over_latents(q: Tensor, latents: Tensor, mask: Tensor | None, scale: float) -> Scored:
    """Absorbed q [N, L, H, R + dr] over latents [N, S, R + dr], which are key and value."""
    n, length, heads, dim = q.shape
    rows = latents.unsqueeze(2)
    flat = q.reshape(n, length * heads, 1, dim)
    out, lse = attend(flat, rows, rows, causal=False, mask=mask, scale=scale)
    lse = lse.view(n, length, heads).transpose(1, 2)
    return out.reshape(n, length, heads, dim), lse


def _expanded(
    q: Tensor, latents: Tensor, heads: MlaHeads, *, causal: bool, mask: Tensor | None
) -> Scored:
    """q [N, L, H, dn + dr] over the keys and values of latents [N, S, R + dr], some heads a time.

    Keys and values are padded to one size, which the fused kernel wants.
    """
    n, size = latents.shape[:2]
    count, nope, v_dim = heads.part_of
    rank = heads.key_up.shape[-1]
    wide = max(q.shape[-1], v_dim)
    compressed, shared = latents[..., :rank].reshape(n * size, rank), latents[..., None, rank:]
    step = max(1, EXPANDED_MAX // (2 * n * size * wide))
    outs, lses = [], []
    for begin in range(0, count, step):
        part = slice(begin, min(begin + step, count))
        number = part.stop - begin
        k = q.new_zeros((n, size, number, wide))
        v = q.new_zeros((n, size, number, wide))
        up = heads.key_up[part].reshape(-1, rank)
        k[..., :nope] = torch.mm(compressed, up.t()).view(n, size, number, nope)
        k[..., nope : q.shape[-1]] = shared
        up = heads.value_up[part].reshape(-1, rank)
        v[..., :v_dim] = torch.mm(compressed, up.t()).view(n, size, number, v_dim)
        query = F.pad(q[:, :, part], (0, wide - q.shape[-1]))
        out, lse = attend(query, k, v, causal=causal, mask=mask, scale=heads.scale)
        outs.append(out[..., :v_dim])
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 1)
