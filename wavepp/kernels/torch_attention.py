"""Attention of one wave over a paged cache, in torch: the definition of correct, and fast on CPU.

Takes the plan made once per wave (attention_plan). Keys and values of the wave are written to the
cache before they are attended to. On CPU the fused attention kernel of torch returns the
log-sum-exp that merging needs; elsewhere `attend_tiled` does, in tiles of queries.

    Shapes: T rows, N spans of L rows, S keys, H query heads, K key heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wavepp.kernels.api import KvPools, Qkv
from wavepp.kernels.attention_plan import AttentionPlan, BandBatch, Prefix, Rows, SpanBatch
from wavepp.kernels.workspace import Workspace

Scored = tuple[Tensor, Tensor]  # result [N, L, H, D] and log-sum-exp of its scores [N, H, L]

PREFIX_KEYS = 16384  # cached keys that are copied out of the pools at once
SCORES_MAX = 1 << 24  # elements of the score matrix `attend_tiled` holds at once
FLASH_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def write_paged(cache: KvPools, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
    """Puts k, v [T, K, D] into the cache (each [blocks, B, K, D]) at the plan's slots."""
    for pool, values in zip(cache, (k, v), strict=True):
        flat = pool.view(-1, *pool.shape[2:])
        slots = plan.slots
        if slots.index is None:
            flat[slots.begin : slots.begin + slots.count].copy_(values)
        else:
            flat.index_copy_(0, slots.index, values.to(flat.dtype))


def attn_paged(
    qkv: Qkv, cache: KvPools, plan: AttentionPlan, scale: float, workspace: Workspace
) -> Tensor:
    """Causal attention of every row over its own sequence.

    Args:
        qkv: q [T, H, D]; k, v [T, K, D] of the same rows, already written to the cache.
        cache: key and value pool, each [blocks, B, K, D].
        plan: of the layer's cache group.
        scale: factor of q . k.

    Returns:
        [T, H * D], contiguous.
    """
    q = qkv[0]
    if len(plan.batches) == 1 and not plan.bands and plan.batches[0].out_rows is None:
        only = _span_batch(qkv, cache, plan.batches[0], scale, workspace)
        return only.reshape(q.shape[0], -1)
    out = workspace.empty("attention", (q.shape[0], q.shape[1] * q.shape[2]), q)
    for batch in plan.batches:
        result = _span_batch(qkv, cache, batch, scale, workspace).reshape(batch.rows.count, -1)
        if batch.out_rows is None:
            out[batch.rows.begin : batch.rows.begin + batch.rows.count] = result
        else:
            kept = result if batch.keep is None else result.index_select(0, batch.keep)
            out.index_copy_(0, batch.out_rows, kept)
    for band in plan.bands:
        rows = band.tile * band.tiles
        result = _band(q, cache, band, scale, workspace)
        out[band.begin : band.begin + rows] = result.reshape(rows, -1)
    return out


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, scale: float
) -> Scored:
    """Attention of q [N, L, H, D] over k, v [N, S, K, D].

    Args:
        causal: query i sees keys 0..i (L = S).
        mask: bool, broadcastable to [N, H, L, S]; True where a key may be seen. Not with causal.

    Returns:
        The result [N, L, H, D] and the log-sum-exp of the scores [N, H, L] (float32).
    """
    if q.device.type != "cpu" or q.dtype not in FLASH_DTYPES:
        return attend_tiled(q, k, v, causal=causal, mask=mask, scale=scale)
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
        bias.masked_fill_(~mask, float("-inf"))
        mask = bias.expand(q.shape[0], 1, q.shape[1], k.shape[1])
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        0.0,
        causal,
        attn_mask=mask,
        scale=scale,
    )
    return out.transpose(1, 2), lse


def attend_tiled(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, scale: float
) -> Scored:
    """`attend` by plain matrix products, in tiles of queries, with scores in float32."""
    n, length, heads, dim = q.shape
    size, kv_heads = k.shape[1], k.shape[2]
    q_heads = q.reshape(n, length, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
    k_heads = k.permute(0, 2, 3, 1).unsqueeze(2)  # [N, K, 1, D, S]
    v_heads = v.permute(0, 2, 1, 3).unsqueeze(2)  # [N, K, 1, S, D]
    tile = max(1, SCORES_MAX // max(1, n * heads * size))
    outs, lses = [], []
    for begin in range(0, length, tile):
        end = min(begin + tile, length)
        scores = torch.matmul(q_heads[..., begin:end, :], k_heads).float() * scale
        scores = scores.reshape(n, heads, end - begin, size)
        if causal:
            above = torch.arange(size, device=q.device)
            rows = torch.arange(begin, end, device=q.device)
            scores.masked_fill_(above[None, :] > rows[:, None], float("-inf"))
        elif mask is not None:
            tiled = mask if mask.shape[-2] == 1 else mask[..., begin:end, :]
            scores.masked_fill_(~tiled, float("-inf"))
        lse = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - lse[..., None]).to(v.dtype)
        weights = weights.view(n, kv_heads, heads // kv_heads, end - begin, size)
        result = torch.matmul(weights, v_heads).permute(0, 3, 1, 2, 4)
        outs.append(result.reshape(n, end - begin, heads, dim))
        lses.append(lse)
    return torch.cat(outs, 1), torch.cat(lses, 2)


def merge(one: Scored, other: Scored) -> Scored:
    """Attention over the union of two disjoint key sets, from (result, log-sum-exp) of each.

    result [N, L, H, D], log-sum-exp [N, H, L]. The softmax over both sets weighs the second by
    exp(lse2) / (exp(lse1) + exp(lse2)) = sigmoid(lse2 - lse1).
    """
    weight = torch.sigmoid(other[1] - one[1]).transpose(1, 2).unsqueeze(-1)
    merged = torch.lerp(one[0], other[0], weight.to(one[0].dtype))
    return merged, torch.logaddexp(one[1], other[1])


def _span_batch(
    qkv: Qkv, cache: KvPools, batch: SpanBatch, scale: float, workspace: Workspace
) -> Tensor:
    """[N, L, H, D] for a batch of spans."""
    shape = (batch.size, batch.length)
    q = _split(batch.rows.take(qkv[0]), shape)
    scored = None
    if batch.chunk:
        k, v = (_split(batch.rows.take(x), shape) for x in qkv[1:])
        scored = attend(q, k, v, causal=True, mask=None, scale=scale)
    if batch.prefix is not None:
        scored = _attend_prefix(scored, q, cache, batch.prefix, scale, workspace=workspace)
    assert scored is not None
    return scored[0]


def _attend_prefix(
    scored: Scored | None,
    q: Tensor,
    cache: KvPools,
    prefix: Prefix,
    scale: float,
    *,
    workspace: Workspace,
) -> Scored:
    """`scored` with the cached keys merged in, a bounded number of them at a time.

    Query heads that share a key head are laid side by side as more queries (nothing is causal
    here), which makes larger products and reads every key once.
    """
    n, length, heads, dim = q.shape
    kv_heads = cache[0].shape[2]
    folded = q.reshape(n, length, kv_heads, heads // kv_heads, dim).transpose(2, 3)
    folded = folded.reshape(n, -1, kv_heads, dim)
    step = max(1, PREFIX_KEYS // n)
    for begin in range(0, prefix.size, step):
        end = min(begin + step, prefix.size)
        k, v = (
            cached_rows(pool, prefix.slots_of(n, begin, end), name, q, workspace)
            for pool, name in zip(cache, ("prefix_keys", "prefix_values"), strict=True)
        )
        k, v = (_split(x, (n, end - begin)) for x in (k, v))
        mask = None if prefix.mask is None else prefix.mask[..., begin:end]
        out, lse = attend(folded, k, v, causal=False, mask=mask, scale=scale)
        if mask is not None and begin:  # a shorter sequence may have no key in this part
            none = ~mask.any(-1)
            out = out.masked_fill(none.unsqueeze(-1), 0.0)
            lse = lse.masked_fill(none, float("-inf"))
        part = (_unfold(out, length), _unfold(lse.transpose(1, 2), length).transpose(1, 2))
        scored = part if scored is None else merge(scored, part)
    assert scored is not None
    return scored


def _unfold(x: Tensor, length: int) -> Tensor:
    """[N, L * G, K, ...] -> [N, L, K * G, ...], the inverse of laying query heads side by side."""
    n, rows, kv_heads = x.shape[:3]
    parts = x.reshape(n, length, rows // length, kv_heads, *x.shape[3:]).transpose(2, 3)
    return parts.reshape(n, length, -1, *x.shape[3:])


def cached_rows(pool: Tensor, slots: Rows, name: str, like: Tensor, workspace: Workspace) -> Tensor:
    """Cached rows [R, K, D] in the dtype of `like`; a view if they are one run, else a copy."""
    flat = pool.view(-1, *pool.shape[2:])
    if slots.index is None:
        rows = slots.take(flat)
    else:
        rows = workspace.empty(name, (slots.count, *flat.shape[1:]), flat)
        torch.index_select(flat, 0, slots.index, out=rows)
    if rows.dtype == like.dtype:
        return rows
    wide = workspace.empty(name, tuple(rows.shape), like)
    return wide.copy_(rows)


def _band(q: Tensor, cache: KvPools, band: BandBatch, scale: float, workspace: Workspace) -> Tensor:
    """[tiles, tile, H, D]: every tile over its own window - 1 + tile keys.

    Tiles are overlapping views of one stretch of keys; query i of a tile sees keys i .. i+window-1.
    """
    span = band.window - 1 + band.tile
    stretches = []
    for pool, name in zip(cache, ("prefix_keys", "prefix_values"), strict=True):
        flat = cached_rows(pool, band.keys, name, q, workspace)
        stride = flat.stride()
        view = flat.as_strided(
            (band.tiles, span, *flat.shape[1:]), (band.tile * stride[0], *stride)
        )
        stretches.append(view)
    rows = q[band.begin : band.begin + band.tile * band.tiles]
    offset = torch.arange(span, device=q.device)[None, :]
    first = torch.arange(band.tile, device=q.device)[:, None]
    mask = (offset >= first) & (offset < first + band.window)
    return attend(
        _split(rows, (band.tiles, band.tile)),
        stretches[0],
        stretches[1],
        causal=False,
        mask=None if band.tile == 1 else mask[None, None],
        scale=scale,
    )[0]


def _split(x: Tensor, shape: tuple[int, int]) -> Tensor:
    """[N * L, ...] as [N, L, ...], without a copy."""
    return x.view(*shape, *x.shape[1:])
