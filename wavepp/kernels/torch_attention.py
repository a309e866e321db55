"""Attention of one wave over a paged cache, in torch: the definition of correct, and fast on CPU.

Takes the plan made once per wave (attention_plan). Keys and values of the wave are written to the
cache before they are attended to. On CPU the fused attention kernel of torch returns the
log-sum-exp that merging needs; elsewhere `attend_tiled` does, in tiles of queries.

    Shapes: T rows, N spans of L rows, S keys, H query heads, K key heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wavepp.kernels.attention_plan import AttentionPlan, BandBatch, Prefix, SpanBatch

SCORES_MAX = 1 << 24  # elements of the score matrix `attend_tiled` holds at once
FLASH_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def write_paged(cache: tuple[Tensor, Tensor], k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
    """Puts k, v [T, K, D] into the cache (each [blocks, B, K, D]) at the plan's slots."""
    for pool, values in zip(cache, (k, v), strict=True):
        flat = pool.view(-1, *pool.shape[2:])
        slots = plan.slots
        if slots.index is None:
            flat[slots.begin : slots.begin + slots.count].copy_(values)
        else:
            flat.index_copy_(0, slots.index, values.to(flat.dtype))


def attn_paged(
    qkv: tuple[Tensor, Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    plan: AttentionPlan,
    scale: float,
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
        return _span_batch(qkv, cache, plan.batches[0], scale).reshape(q.shape[0], -1)
    out = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
    for batch in plan.batches:
        result = _span_batch(qkv, cache, batch, scale).reshape(batch.rows.count, -1)
        if batch.out_rows is None:
            out[batch.rows.begin : batch.rows.begin + batch.rows.count] = result
        else:
            kept = result if batch.keep is None else result.index_select(0, batch.keep)
            out.index_copy_(0, batch.out_rows, kept)
    for band in plan.bands:
        rows = band.tile * band.tiles
        out[band.begin : band.begin + rows] = _band(q, cache, band, scale).reshape(rows, -1)
    return out


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
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
) -> tuple[Tensor, Tensor]:
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


def merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """Attention over the union of two disjoint key sets, from (result, log-sum-exp) of each.

    result [N, L, H, D], log-sum-exp [N, H, L]. The softmax over both sets weighs the second by
    exp(lse2) / (exp(lse1) + exp(lse2)) = sigmoid(lse2 - lse1).
    """
    weight = torch.sigmoid(other[1] - one[1]).transpose(1, 2).unsqueeze(-1)
    return torch.lerp(one[0], other[0], weight.to(one[0].dtype))


def _span_batch(
    qkv: tuple[Tensor, Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    batch: SpanBatch,
    scale: float,
) -> Tensor:
    """[N, L, H, D] for a batch of spans."""
    shape = (batch.size, batch.length)
    q = _split(batch.rows.take(qkv[0]), shape)
    own = None
    if batch.chunk:
        k, v = (_split(batch.rows.take(x), shape) for x in qkv[1:])
        own = attend(q, k, v, causal=True, mask=None, scale=scale)
    if batch.prefix is None:
        assert own is not None
        return own[0]
    k, v = (_cached(pool, batch.prefix, batch.size, q.dtype) for pool in cache)
    past = attend(q, k, v, causal=False, mask=batch.prefix.mask, scale=scale)
    return past[0] if own is None else merge(own, past)


def _cached(pool: Tensor, prefix: Prefix, size: int, dtype: torch.dtype) -> Tensor:
    """Cached rows [N, S, K, D] in the dtype of computation."""
    flat = pool.view(-1, *pool.shape[2:])
    return _split(prefix.slots.take(flat).to(dtype), (size, prefix.size))


def _band(q: Tensor, cache: tuple[Tensor, Tensor], band: BandBatch, scale: float) -> Tensor:
    """[tiles, tile, H, D]: every tile over its own window - 1 + tile keys.

    Tiles are overlapping views of one stretch of keys; query i of a tile sees keys i .. i+window-1.
    """
    span = band.window - 1 + band.tile
    stretches = []
    for pool in cache:
        flat = band.keys.take(pool.view(-1, *pool.shape[2:])).to(q.dtype).contiguous()
        stride = flat.stride()
        view = flat.as_strided(
            (band.tiles, span, *flat.shape[1:]), (band.tile * stride[0], *stride)
        )
        stretches.append(view)
    rows = q[band.begin : band.begin + band.tile * band.tiles]
    offset = torch.arange(span, device=q.device)[None, :]
    first = torch.arange(band.tile, device=q.device)[:, None]
    mask = (offset >= first) & (offset < first + band.window)
    shaped = _split(rows, (band.tiles, band.tile))
    return attend(
        shaped,
        stretches[0],
        stretches[1],
        causal=False,
        mask=None if band.tile == 1 else mask[None, None],
        scale=scale,
    )[0]


def _split(x: Tensor, shape: tuple[int, int]) -> Tensor:
    """[N * L, ...] as [N, L, ...], without a copy."""
    return x.view(*shape, *x.shape[1:])
