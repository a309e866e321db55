"""Grouped-query attention: merged qkv product, optional per-head norms, rope, paged attention.

T rows, H query heads, K key heads, D head size; qkv rows are [q: H*D | k: K*D | v: K*D],
and [gate: H*D] behind them in models that gate the result
"""

from __future__ import annotations

import torch
from torch import Tensor

from wavepp.kernels.api import Ops, Pools
from wavepp.models.layers.context import WaveContext
from wavepp.models.layers.norm import read_norm
from wavepp.models.loader import WeightSource
from wavepp.models.mixer_specs import GqaSpec


class GqaLayer:
    """One attention mixer with its weights (below `prefix`, such as model.layers.3.self_attn)."""

    def __init__(
        self, spec: GqaSpec, norm_eps: float, weights: WeightSource, prefix: str, ops: Ops
    ) -> None:
        self._spec = spec
        self._eps = norm_eps
        self._ops = ops
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        names = [f"{prefix}.{part}_proj" for part in "qkv"]
        rows = [heads * dim * (2 if spec.out_gate else 1), kv_heads * dim, kv_heads * dim]
        self._qkv = weights.read_rows([f"{n}.weight" for n in names], rows, spec.hidden_size)
        self._qkv_bias = None
        if spec.qkv_bias:
            self._qkv_bias = weights.read_rows([f"{n}.bias" for n in names], rows, None)
        if spec.out_gate:
            order = _gates_last(spec, self._qkv.device)
            self._qkv = self._qkv.index_select(0, order)
            if self._qkv_bias is not None:
                self._qkv_bias = self._qkv_bias.index_select(0, order)
        self._out = weights.read(f"{prefix}.o_proj.weight", (spec.hidden_size, heads * dim))
        self._out_bias = None
        if spec.out_bias:
            self._out_bias = weights.read(f"{prefix}.o_proj.bias", (spec.hidden_size,))
        self._qk_norm = self._read_qk_norm(weights, prefix)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The weights that are held."""
        held = (self._qkv, self._qkv_bias, self._out, self._out_bias, *self._qk_norm)
        return tuple(tensor for tensor in held if tensor is not None)

    def add_to(
        self, residual: Tensor, x: Tensor, context: WaveContext, pools: Pools, group: str
    ) -> Tensor:
        """residual + attention(x), [T, hidden]; writes this wave's keys and values to pools.

        Overwrites the residual. `group` is the cache group whose block tables hold the pools.
        """
        spec, ops, scratch = self._spec, self._ops, context.workspace
        plan = context.wave.plans[group]
        tokens, rotated = x.shape[0], spec.num_heads + spec.num_kv_heads
        qkv = scratch.empty("qkv", (tokens, self._qkv.shape[0]), x)
        qkv = ops.linear(x, self._qkv, self._qkv_bias, qkv)
        heads = qkv.view(tokens, -1, spec.head_dim)
        qk = heads[:, :rotated]
        if self._qk_norm:
            normed = scratch.empty("qk_norm", (tokens, rotated, spec.head_dim), x)
            qk = self._normed(qkv, qk, normed)
        turned = scratch.empty("qk_rope", (tokens, rotated, spec.head_dim), x)
        qk = ops.rope(qk, *context.ropes[spec.rope], turned)
        q, k, v = (
            qk[:, : spec.num_heads],
            qk[:, spec.num_heads :],
            heads[:, rotated : rotated + spec.num_kv_heads],
        )
        cache = (pools[0], pools[1])
        ops.write_paged(cache, k, v, plan)
        scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        mixed = ops.attn_paged((q, k, v), cache, plan, scale, scratch)
        if spec.out_gate:
            mixed = mixed.mul_(torch.sigmoid(qkv[:, -mixed.shape[1] :]))
        return ops.linear_add_(residual, mixed, self._out, self._out_bias)

    def _read_qk_norm(self, weights: WeightSource, prefix: str) -> tuple[Tensor, ...]:
        """Norm weights: none, one row a head [H + K, D], or those of q and k over all heads."""
        spec = self._spec
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        if spec.qk_norm is None:
            return ()
        sizes = (dim, dim) if spec.qk_norm == "head" else (heads * dim, kv_heads * dim)
        q, k = (
            read_norm(weights, f"{prefix}.{part}_norm.weight", size, spec.norm_offset)
            for part, size in zip("qk", sizes, strict=True)
        )
        if spec.qk_norm == "all":
            return (q, k)
        both = q.new_empty((heads + kv_heads, dim))
        both[:heads], both[heads:] = q, k
        return (both,)

    def _normed(self, qkv: Tensor, qk: Tensor, out: Tensor) -> Tensor:
        """Queries and keys [T, H + K, D] after their norms."""
        if len(self._qk_norm) == 1:
            return self._ops.rms_norm(qk, self._qk_norm[0], self._eps, out)
        flat, begin = out.view(out.shape[0], -1), 0
        for weight in self._qk_norm:
            part = slice(begin, begin + weight.shape[0])
            flat[:, part] = self._ops.rms_norm(qkv[:, part], weight, self._eps, None)
            begin = part.stop
        return out


def _gates_last(spec: GqaSpec, device: torch.device) -> Tensor:
    """Order of rows that brings [q | gate] of each head, k, v to q, k, v, gate."""
    size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    both = torch.arange(2 * size, device=device).view(spec.num_heads, 2, spec.head_dim)
    kv = torch.arange(2 * size, 2 * (size + kv_size), device=device)
    return torch.cat([both[:, 0].reshape(-1), kv, both[:, 1].reshape(-1)])
