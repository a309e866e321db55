"""Kimi Delta Attention: merged projections, short convolution, decay gate, delta rule, gated norm.

T rows, H heads, K key and V value channels a head. Source: Kimi Linear (arXiv 2510.26692); Kimi K3
bounds the decay from below and has a full output gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from wavepp.kernels.api import DeltaInputs, Ops, Pools
from wavepp.models.layers.context import WaveContext
from wavepp.models.loader import WeightSource
from wavepp.models.mixer_specs import DeltaSpec


class KdaLayer:
    """One KDA mixer with its weights (below `prefix`). Pools: state and convolution inputs."""

    def __init__(self, spec: DeltaSpec, weights: WeightSource, prefix: str, ops: Ops) -> None:
        self._spec = spec
        self._ops = ops
        names = [*(f"{part}_proj" for part in "qkv"), "f_a_proj", "b_proj"]
        self._sizes = [spec.conv_channels, spec.decay_rank, spec.heads]
        rows = [spec.key_size, spec.key_size, spec.value_size, spec.decay_rank, spec.heads]
        names.append("g_proj" if spec.gate_rank is None else "g_a_proj")
        gate_rows = spec.gate_rank or spec.value_size
        self._sizes.append(gate_rows)
        found = [f"{prefix}.{name}.weight" for name in names]
        self._first = weights.read_rows(found, [*rows, gate_rows], spec.hidden_size)
        self._conv = torch.cat(
            [
                weights.read(f"{prefix}.{part}_conv1d.weight", (size, 1, spec.conv_size))
                for part, size in zip("qkv", rows, strict=False)
            ]
        ).squeeze(1)
        shape = (spec.key_size, spec.decay_rank)
        self._decay_up = weights.read(f"{prefix}.f_b_proj.weight", shape)
        fp32 = torch.float32
        self._decay_bias = weights.read(f"{prefix}.dt_bias", (spec.key_size,), dtype=fp32)
        self._log_rate = weights.read_leading(f"{prefix}.A_log", spec.heads, dtype=fp32)
        self._gate_up = None
        if spec.gate_rank is not None:
            shape = (spec.value_size, spec.gate_rank)
            self._gate_up = weights.read(f"{prefix}.g_b_proj.weight", shape)
        self._norm = weights.read(f"{prefix}.o_norm.weight", (spec.value_dim,))
        self._out = weights.read(f"{prefix}.o_proj.weight", (spec.hidden_size, spec.value_size))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The weights that are held."""
        held = (self._first, self._conv, self._decay_up, self._decay_bias, self._log_rate)
        some = (*held, self._gate_up, self._norm, self._out)
        return tuple(tensor for tensor in some if tensor is not None)

    def add_to(
        self, residual: Tensor, x: Tensor, context: WaveContext, pools: Pools, group: str
    ) -> Tensor:
        """residual + mixer(x), [T, hidden]; moves the states in the pools on."""
        spec, ops = self._spec, self._ops
        spans, tokens = context.wave.states[group], x.shape[0]
        first = context.workspace.empty("kda_first", (tokens, self._first.shape[0]), x)
        first = ops.linear(x, self._first, None, first)
        qkv, decay, beta, gate = columns(first, self._sizes)
        mixed = ops.short_conv(qkv, self._conv, pools[1], spans)
        q, k, v = columns(mixed, [spec.key_size, spec.key_size, spec.value_size])
        inputs = DeltaInputs(
            q=q.view(tokens, spec.key_heads, spec.key_dim),
            k=k.view(tokens, spec.key_heads, spec.key_dim),
            v=v.view(tokens, spec.heads, spec.value_dim),
            log_decay=self._log_decay(decay),
            beta=torch.sigmoid(beta.float()),
        )
        result = ops.delta_rule(inputs, pools[0], spans)
        normed = ops.rms_norm(result, self._norm, spec.norm_eps, None)
        if self._gate_up is not None:
            gate = ops.linear(gate, self._gate_up, None, None)
        gated = normed.view(tokens, -1).mul_(torch.sigmoid(gate))
        return ops.linear_add_(residual, gated, self._out, None)

    def _log_decay(self, down: Tensor) -> Tensor:
        """log alpha, float32 [T, H, K], from the low-rank projection [T, rank]."""
        spec = self._spec
        z = self._ops.linear(down, self._decay_up, None, None).float().add_(self._decay_bias)
        z = z.view(-1, spec.key_heads, spec.key_dim)
        rate = self._log_rate.exp().unsqueeze(1)
        if spec.lower_bound is None:
            return F.softplus(z).mul_(-rate)
        return torch.sigmoid(z.mul_(rate)).mul_(spec.lower_bound)


def columns(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """x [T, sum(sizes)] in parts, without a copy."""
    ends = list(accumulate(sizes))
    return [x[:, end - size : end] for size, end in zip(sizes, ends, strict=True)]
