"""Attention for CUDA by the kernels of flashinfer 0.7: paged keys and values, paged latents.

Not run on a GPU: its calls bind to the installed package's signatures, and what it hands over is
right for plain torch kernels of the same contract. Signatures are those of the torch operations,
which take over where a shape or dtype has no kernel: float32, unusual head sizes, sparse rows.

Latent attention is two calls. A wave's own rows are expanded to keys and values, cached rows are
attended to as they are (absorbed), and the two are merged by their log-sum-exp:

    span    |------- cached: absorbed, paged -------|-- own: expanded, ragged, causal --|

    Shapes: T rows, H query heads, K key heads, D head size, B tokens a page; dn, dr, dv, R of MLA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wavepp.kernels import torch_attention, torch_mla
from wavepp.kernels.api import KvPools, MlaHeads, Qkv
from wavepp.kernels.attention_plan import AttentionPlan, PagedSpans
from wavepp.kernels.workspace import Workspace

SCRATCH_BYTES = 128 << 20  # what flashinfer asks for
HALF = (torch.bfloat16, torch.float16)
GQA_DIMS = (64, 128, 256)
MLA_DIMS = ((192, 128), (256, 256), (128, 128))  # dn + dr and dv that have a ragged kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashInferParts:
    """What is used of flashinfer.

    Attributes:
        paged, ragged, latent: its wrapper classes.
        latent_pages: its maker of page tables for `latent`.
        merge: joins two results by their base-2 log-sum-exp.
    """

    paged: Callable[..., Any]
    ragged: Callable[..., Any]
    latent: Callable[..., Any]
    latent_pages: Callable[..., Any]
    merge: Callable[..., tuple[Tensor, Tensor]]


def load_flashinfer() -> FlashInferParts:
    """
    Raises:
        ImportError: flashinfer is not installed.
    """
    import flashinfer
    from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

    return FlashInferParts(
        paged=flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        ragged=flashinfer.BatchPrefillWithRaggedKVCacheWrapper,
        latent=BatchMLAPagedAttentionWrapper,
        latent_pages=MLAPlanMetadata.csr,
        merge=flashinfer.merge_state,
    )


@dataclass(frozen=True, slots=True)
class _Pages:
    """Page tables of N spans, int32 on the CPU, where flashinfer plans.

    Attributes:
        rows_ends: [N + 1], where the spans' rows begin and end.
        ends: [N + 1], where their pages begin and end in `ids`.
        last: [N], tokens in the last page.
        sizes: [N], tokens in all pages.
    """

    rows_ends: Tensor
    ends: Tensor
    ids: Tensor
    last: Tensor
    sizes: Tensor


@dataclass(slots=True)
class _Planned:
    """A wrapper, and the plan it was last planned for."""

    wrapper: Any
    plan: AttentionPlan | None = None


class FlashInferAttention:
    """`attn_paged` and `mla_paged`. Every wrapper is planned once a wave and geometry."""

    def __init__(self, parts: FlashInferParts, device: torch.device) -> None:
        self._parts = parts
        self._scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[tuple[Any, ...], _Planned] = {}

    def attn_paged(
        self, qkv: Qkv, cache: KvPools, plan: AttentionPlan, scale: float, workspace: Workspace
    ) -> Tensor:
        """As `torch_attention.attn_paged`."""
        q = qkv[0]
        heads, kv_heads, dim = q.shape[1], cache[0].shape[2], q.shape[2]
        if q.dtype not in HALF or cache[0].dtype != q.dtype or dim not in GQA_DIMS:
            return torch_attention.attn_paged(qkv, cache, plan, scale, workspace)
        planned = self._wrapper(self._parts.paged, (heads, kv_heads, dim, scale, q.dtype))
        if planned.plan is not plan:
            pages = _seen_pages(plan.spans)
            window = plan.spans.window
            planned.wrapper.plan(
                pages.rows_ends,
                pages.ends,
                pages.ids,
                pages.last,
                num_qo_heads=heads,
                num_kv_heads=kv_heads,
                head_dim_qk=dim,
                page_size=plan.spans.block_size,
                causal=True,
                sm_scale=scale,
                window_left=-1 if window is None else window - 1,
                q_data_type=q.dtype,
                kv_data_type=q.dtype,
            )
            planned.plan = plan
        result: Tensor = planned.wrapper.run(q.contiguous(), cache)
        return result.reshape(q.shape[0], -1)

    def mla_paged(
        self,
        rows: tuple[Tensor, Tensor],
        heads: MlaHeads,
        pool: Tensor,
        plan: AttentionPlan,
        workspace: Workspace,
    ) -> Tensor:
        """As `torch_mla.mla_paged`."""
        q = rows[0]
        if plan.sparse or pool.dtype != q.dtype or not _has_mla_kernels(q, heads, pool):
            return torch_mla.mla_paged(rows, heads, pool, plan, workspace)
        result, lse = self._own_rows(rows, heads, plan)
        after = [i for i, (start, _) in enumerate(plan.spans.extents) if start]
        if after:
            at = torch.from_numpy(_rows_of(plan.spans, after)).to(q.device)
            mixed, mixed_lse = self._cached_rows(q.index_select(0, at), heads, pool, plan, after)
            own = (result.index_select(0, at), lse.index_select(0, at))
            merged, _ = self._parts.merge(*own, torch_mla.release(mixed, heads), mixed_lse)
            result.index_copy_(0, at, merged)
        return result.reshape(q.shape[0], -1)

    def _own_rows(
        self, rows: tuple[Tensor, Tensor], heads: MlaHeads, plan: AttentionPlan
    ) -> tuple[Tensor, Tensor]:
        """Causal attention of the wave's rows over themselves: [T, H, dv] and base-2 lse [T, H]."""
        q, latents = rows
        count, nope, v_dim = heads.part_of
        rank, dim = heads.key_up.shape[-1], q.shape[-1]
        k = q.new_empty((q.shape[0], count, dim))
        compressed = latents[:, :rank]
        k[..., :nope] = torch.einsum("tr,hdr->thd", compressed, heads.key_up)
        k[..., nope:] = latents[:, None, rank:]
        v = torch.einsum("tr,hdr->thd", compressed, heads.value_up).contiguous()
        key = (count, dim, v_dim, heads.scale, q.dtype)
        planned = self._wrapper(self._parts.ragged, key)
        if planned.plan is not plan:
            ends = _ends([length for _, length in plan.spans.extents])
            planned.wrapper.plan(
                ends,
                ends,
                num_qo_heads=count,
                num_kv_heads=count,
                head_dim_qk=dim,
                head_dim_vo=v_dim,
                causal=True,
                sm_scale=heads.scale,
                q_data_type=q.dtype,
                kv_data_type=q.dtype,
            )
            planned.plan = plan
        scored: tuple[Tensor, Tensor] = planned.wrapper.run(q.contiguous(), k, v, return_lse=True)
        return scored

    def _cached_rows(
        self, q: Tensor, heads: MlaHeads, pool: Tensor, plan: AttentionPlan, after: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Attention of the rows of spans `after` over what is cached before each span: mixed
        latents [R', H, R] and base-2 lse [R', H]."""
        rank = heads.key_up.shape[-1]
        count, rope = q.shape[1], pool.shape[-1] - rank
        planned = self._wrapper(self._parts.latent, (count, rank, rope, heads.scale, q.dtype))
        if planned.plan is not plan:
            pages = _prefix_pages(plan.spans, after)
            tables = self._parts.latent_pages(
                qo_indptr=pages.rows_ends,
                kv_indptr=pages.ends,
                kv_indices=pages.ids,
                kv_len_arr=pages.sizes,
            )
            planned.wrapper.plan(
                metadata=tables,
                num_heads=count,
                head_dim_ckv=rank,
                head_dim_kpe=rope,
                page_size=plan.spans.block_size,
                causal=False,
                sm_scale=heads.scale,
                q_data_type=q.dtype,
                kv_data_type=q.dtype,
                query_layout="split",
                kv_cache_layout="split",
                lse_mode="base2",
            )
            planned.plan = plan
        absorbed = torch_mla.absorb(q, heads)
        scored: tuple[Tensor, Tensor] = planned.wrapper.run(
            query=(absorbed[..., :rank], absorbed[..., rank:]),
            kv_cache=(pool[..., :rank], pool[..., rank:]),
            return_lse=True,
        )
        return scored

    def _wrapper(self, kind: Callable[..., Any], geometry: tuple[Any, ...]) -> _Planned:
        key = (kind, *geometry)
        if key not in self._wrappers:
            options = {} if kind is self._parts.latent else {"kv_layout": "NHD"}
            self._wrappers[key] = _Planned(kind(self._scratch, backend="auto", **options))
        return self._wrappers[key]


def _has_mla_kernels(q: Tensor, heads: MlaHeads, pool: Tensor) -> bool:
    rank = heads.key_up.shape[-1]
    rope = pool.shape[-1] - rank
    dims = (q.shape[-1], heads.part_of[2])
    return q.dtype in HALF and dims in MLA_DIMS and rank % 128 == 0 and rope % 64 == 0


def _seen_pages(spans: PagedSpans) -> _Pages:
    """All pages that the spans' rows see; before a sliding window there are none."""
    ids, counts, sizes = [], [], []
    for (start, length), table in zip(spans.extents, spans.tables, strict=True):
        end = start + length
        oldest = 0 if spans.window is None else max(start - spans.window + 1, 0)
        first = oldest // spans.block_size
        own = table[first : -(-end // spans.block_size)]
        ids.append(own)
        counts.append(len(own))
        sizes.append(end - first * spans.block_size)
    lengths = [length for _, length in spans.extents]
    return _pages(spans, lengths, ids, counts, sizes)


def _prefix_pages(spans: PagedSpans, chosen: list[int]) -> _Pages:
    """The pages before each chosen span."""
    ids, counts, sizes = [], [], []
    for index in chosen:
        start = spans.extents[index][0]
        own = spans.tables[index][: -(-start // spans.block_size)]
        ids.append(own)
        counts.append(len(own))
        sizes.append(start)
    lengths = [spans.extents[index][1] for index in chosen]
    return _pages(spans, lengths, ids, counts, sizes)


def _pages(
    spans: PagedSpans,
    lengths: list[int],
    ids: list[Any],
    counts: list[int],
    sizes: list[int],
) -> _Pages:
    last = [
        size - (count - 1) * spans.block_size for size, count in zip(sizes, counts, strict=True)
    ]
    return _Pages(
        rows_ends=_ends(lengths),
        ends=_ends(counts),
        ids=torch.from_numpy(np.concatenate(ids).astype(np.int32)),
        last=torch.tensor(last, dtype=torch.int32),
        sizes=torch.tensor(sizes, dtype=torch.int32),
    )


def _ends(lengths: list[int]) -> Tensor:
    return torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32))


def _rows_of(spans: PagedSpans, chosen: list[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Flat rows of the chosen spans."""
    begins = np.cumsum([0, *(length for _, length in spans.extents)])
    rows = [np.arange(begins[i], begins[i + 1], dtype=np.int64) for i in chosen]
    return np.concatenate(rows)
