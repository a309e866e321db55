"""What flashinfer's wrappers compute, in plain torch over the same page tables: their contract."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from wavepp.kernels.flashinfer_attention import FlashInferParts

LOG2_E = math.log2(math.e)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, window_left: int = -1
) -> tuple[Tensor, Tensor]:
    """q [L, H, D] at the end of keys [S, K, D]: results and base-2 log-sum-exp [L, H]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).float() for x in (k, v))
    scores = torch.einsum("lhd,shd->hls", q.float(), k) * scale
    at = torch.arange(len(k) - len(q), len(k))[:, None]
    other = torch.arange(len(k))[None, :]
    hidden = torch.zeros(len(q), len(k), dtype=torch.bool)
    if causal:
        hidden |= other > at
    if window_left >= 0:
        hidden |= other < at - window_left
    scores = scores.masked_fill(hidden, float("-inf"))
    mixed = torch.einsum("hls,shd->lhd", scores.softmax(-1), v)
    return mixed.to(q.dtype), (torch.logsumexp(scores, -1) * LOG2_E).t().contiguous()


class _Wrapper:
    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *, backend: str = "auto"
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"
        assert backend == "auto"
        self.plans = 0
        self.options: dict[str, Any] = {}
        self.tables: tuple[Tensor, ...] = ()

    def plan(self, *tables: Tensor, **options: Any) -> None:
        assert all(table.dtype == torch.int32 for table in tables)
        self.tables, self.options = tables, options
        self.plans += 1


class Paged(_Wrapper):
    """BatchPrefillWithPagedKVCacheWrapper."""

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        rows, ends, ids, last = (table.tolist() for table in self.tables)
        results = []
        for n in range(len(rows) - 1):
            pages = ids[ends[n] : ends[n + 1]]
            assert min(pages) >= 0
            count = (len(pages) - 1) * self.options["page_size"] + last[n]
            k, v = (pool[pages].flatten(0, 1)[:count] for pool in cache)
            results.append(
                attention(
                    q[rows[n] : rows[n + 1]],
                    k,
                    v,
                    causal=self.options["causal"],
                    scale=self.options["sm_scale"],
                    window_left=self.options["window_left"],
                )[0]
            )
        return torch.cat(results)


class Ragged(_Wrapper):
    """BatchPrefillWithRaggedKVCacheWrapper."""

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False
    ) -> tuple[Tensor, Tensor]:
        assert return_lse
        rows, ends = (table.tolist() for table in self.tables)
        parts = [
            attention(
                q[rows[n] : rows[n + 1]],
                k[ends[n] : ends[n + 1]],
                v[ends[n] : ends[n + 1]],
                causal=self.options["causal"],
                scale=self.options["sm_scale"],
            )
            for n in range(len(rows) - 1)
        ]
        return torch.cat([mixed for mixed, _ in parts]), torch.cat([lse for _, lse in parts])


class Latent:
    """BatchMLAPagedAttentionWrapper."""

    def __init__(self, float_workspace_buffer: Tensor, *, backend: str = "auto") -> None:
        self.plans = 0

    def plan(self, *, metadata: dict[str, Tensor], **options: Any) -> None:
        assert options["lse_mode"] == "base2"
        self.metadata, self.options = metadata, options
        self.plans += 1

    def run(
        self, *, query: tuple[Tensor, Tensor], kv_cache: tuple[Tensor, Tensor], return_lse: bool
    ) -> tuple[Tensor, Tensor]:
        assert return_lse
        rows, ends, ids, sizes = (table.tolist() for table in self.metadata.values())
        q, pool = torch.cat(query, -1), torch.cat(kv_cache, -1)
        parts = []
        for n in range(len(rows) - 1):
            latents = pool[ids[ends[n] : ends[n + 1]]].flatten(0, 1)[: sizes[n], None]
            parts.append(
                attention(
                    q[rows[n] : rows[n + 1]],
                    latents,
                    latents[..., : self.options["head_dim_ckv"]],
                    causal=self.options["causal"],
                    scale=self.options["sm_scale"],
                )
            )
        return torch.cat([mixed for mixed, _ in parts]), torch.cat([lse for _, lse in parts])


def merge(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """flashinfer.merge_state."""
    assert v_a.shape == v_b.shape
    total = torch.logaddexp2(s_a, s_b)
    weights = [torch.exp2(s - total).unsqueeze(-1).to(v_a.dtype) for s in (s_a, s_b)]
    return weights[0] * v_a + weights[1] * v_b, total


def latent_pages(
    qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor
) -> dict[str, Tensor]:
    """MLAPlanMetadata.csr."""
    return {
        "qo_indptr": qo_indptr,
        "kv_indptr": kv_indptr,
        "kv_indices": kv_indices,
        "kv_len_arr": kv_len_arr,
    }


IN_TORCH = FlashInferParts(
    paged=Paged, ragged=Ragged, latent=Latent, latent_pages=latent_pages, merge=merge
)
