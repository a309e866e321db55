"""Gated DeltaNet: merged projections, short convolution, one decay a head, delta rule, gated norm.

T rows, Hk key heads, H value heads, K and V their channels. Source: Gated Delta Networks
(arXiv 2412.06464), as Qwen3-Next and Qwen3.5 have it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from wavepp.kernels.api import DeltaInputs, Ops, Pools
from wavepp.models.layers.context import WaveContext
from wavepp.models.layers.kda import columns
from wavepp.models.loader import WeightSource
from wavepp.models.mixer_specs import DeltaSpec


class GdnLayer:
    """One Gated DeltaNet mixer with its weights. Pools: state and convolution inputs."""

    def __init__(self, spec: DeltaSpec, weights: WeightSource, prefix: str, ops: Ops) -> None:
        self._spec = spec
        self._ops = ops
        self._first = self._read_first(weights, prefix)
        shape = (spec.conv_channels, 1, spec.conv_size)
        self._conv = weights.read(f"{prefix}.conv1d.weight", shape).squeeze(1)
        fp32 = torch.float32
        self._decay_bias = weights.read(f"{prefix}.dt_bias", (spec.heads,), dtype=fp32)
        self._log_rate = weights.read_leading(f"{prefix}.A_log", spec.heads, dtype=fp32)
        self._norm = weights.read(f"{prefix}.norm.weight", (spec.value_dim,))
        self._out = weights.read(f"{prefix}.out_proj.weight", (spec.hidden_size, spec.value_size))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The weights that are held."""
        gates = (self._decay_bias, self._log_rate, self._norm)
        return (self._first, self._conv, *gates, self._out)

    def add_to(
        self, residual: Tensor, x: Tensor, context: WaveContext, pools: Pools, group: str
    ) -> Tensor:
        """residual + mixer(x), [T, hidden]; moves the states in the pools on."""
        spec, ops = self._spec, self._ops
        spans, tokens = context.wave.states[group], x.shape[0]
        first = context.workspace.empty("gdn_first", (tokens, self._first.shape[0]), x)
        first = ops.linear(x, self._first, None, first)
        sizes = [spec.conv_channels, spec.value_size, spec.heads, spec.heads]
        qkv, gate, beta, decay = columns(first, sizes)
        mixed = ops.short_conv(qkv, self._conv, pools[1], spans)
        q, k, v = columns(mixed, [spec.key_size, spec.key_size, spec.value_size])
        log_decay = F.softplus(decay.float() + self._decay_bias).mul_(-self._log_rate.exp())
        inputs = DeltaInputs(
            q=q.view(tokens, spec.key_heads, spec.key_dim),
            k=k.view(tokens, spec.key_heads, spec.key_dim),
            v=v.view(tokens, spec.heads, spec.value_dim),
            log_decay=log_decay.unsqueeze(-1),
            beta=torch.sigmoid(beta.float()),
        )
        result = ops.delta_rule(inputs, pools[0], spans)
        normed = ops.rms_norm(result, self._norm, spec.norm_eps, None)
        gated = normed.view(tokens, -1).mul_(F.silu(gate))
        return ops.linear_add_(residual, gated, self._out, None)

    def _read_first(self, weights: WeightSource, prefix: str) -> Tensor:
        """All that is applied to x, as one product: q, k, v, gate, beta, decay."""
        spec = self._spec
        if not spec.merged:
            names = [f"{prefix}.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")]
            rows = [spec.conv_channels, spec.value_size, spec.heads, spec.heads]
            return weights.read_rows(names, rows, spec.hidden_size)
        names = [f"{prefix}.in_proj_{part}.weight" for part in ("qkvz", "ba")]
        rows = [spec.conv_channels + spec.value_size, 2 * spec.heads]
        merged = weights.read_rows(names, rows, spec.hidden_size)
        values = spec.value_size // spec.key_heads
        parts = [spec.key_dim, spec.key_dim, values, values]
        large = _by_kind(merged[: rows[0]], spec.key_heads, parts)
        small = _by_kind(merged[rows[0] :], spec.key_heads, [spec.heads // spec.key_heads] * 2)
        return torch.cat([*large, *small])


def _by_kind(rows: Tensor, heads: int, sizes: list[int]) -> list[Tensor]:
    """Rows that lie head by head, as one tensor for each kind of row."""
    by_head = rows.view(heads, sum(sizes), -1).transpose(0, 1)
    parts, begin = [], 0
    for size in sizes:
        part = by_head[begin : begin + size].transpose(0, 1)
        parts.append(part.reshape(heads * size, -1))
        begin += size
    return parts
