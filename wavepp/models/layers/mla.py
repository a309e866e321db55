"""Multi-head latent attention: merged down-projections, inner norms, rope, attention over latents.

T rows, H heads, R latent rank; what is cached of a token: [normed latent R | rope key dr].
Sources: DeepSeek-V2 and V3; Kimi Linear and K3 use it without rotation (NoPE), K3 with a gate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wavepp.kernels.api import MlaHeads, Ops, Pools
from wavepp.models.layers.context import WaveContext
from wavepp.models.layers.indexer import Indexer
from wavepp.models.layers.rope import pairs_to_halves_
from wavepp.models.loader import WeightSource
from wavepp.models.mixer_specs import MlaSpec
from wavepp.models.spec import TOP_K


class MlaLayer:
    """One latent attention mixer with its weights (below `prefix`)."""

    def __init__(self, spec: MlaSpec, weights: WeightSource, prefix: str, ops: Ops) -> None:
        self._spec = spec
        self._ops = ops
        self._first, self._first_bias = self._read_first(weights, prefix)
        self._q_norm = self._q_up = None
        rows = spec.num_heads * spec.qk_dim
        if spec.q_rank is not None:
            self._q_norm = weights.read(f"{prefix}.q_a_layernorm.weight", (spec.q_rank,))
            self._q_up = weights.read(f"{prefix}.q_b_proj.weight", (rows, spec.q_rank))
        self._latent_norm = weights.read(f"{prefix}.kv_a_layernorm.weight", (spec.kv_rank,))
        self._order_rope_rows()
        shape = (spec.num_heads * (spec.nope_dim + spec.v_dim), spec.kv_rank)
        both = weights.read(f"{prefix}.kv_b_proj.weight", shape)
        both = both.view(spec.num_heads, spec.nope_dim + spec.v_dim, spec.kv_rank)
        self._kv_up = both
        self._heads = MlaHeads(both[:, : spec.nope_dim], both[:, spec.nope_dim :], spec.scale)
        out = (spec.hidden_size, spec.num_heads * spec.v_dim)
        self._out = weights.read(f"{prefix}.o_proj.weight", out)
        self._out_bias = weights.read(f"{prefix}.o_proj.bias", out[:1]) if spec.bias else None
        self._indexer = None
        if spec.indexer is not None and not spec.indexer.shared:
            self._indexer = Indexer(spec, weights, f"{prefix}.indexer", ops)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The weights that are held."""
        held = (self._first, self._first_bias, self._q_norm, self._q_up, self._latent_norm)
        index = () if self._indexer is None else self._indexer.tensors
        some = (*held, self._kv_up, self._out, self._out_bias, *index)
        return tuple(tensor for tensor in some if tensor is not None)

    def add_to(
        self, residual: Tensor, x: Tensor, context: WaveContext, pools: Pools, group: str
    ) -> Tensor:
        """residual + attention(x), [T, hidden]; writes this wave's latents (and index keys)."""
        spec, ops, scratch = self._spec, self._ops, context.workspace
        plan = context.wave.plans[group]
        first = scratch.empty("mla_first", (x.shape[0], self._first.shape[0]), x)
        first = ops.linear(x, self._first, self._first_bias, first)
        q_size = self._q_size
        latent = self._latent(first[:, q_size : q_size + spec.latent_dim], context)
        ops.write_rows(pools[0], latent, plan)
        q_latent = first[:, :q_size]
        if self._q_norm is not None:
            q_latent = ops.rms_norm(q_latent, self._q_norm, spec.norm_eps, None)
        if self._indexer is not None:
            chosen = self._indexer.select(x, q_latent, context, pools[1], plan)
            context.carried[TOP_K] = chosen
        q = self._query(q_latent, context)
        mixed = ops.mla_paged((q, latent), self._heads, pools[0], plan, scratch)
        if plan.sparse:
            rows = (q, context.carried[TOP_K])
            mixed = ops.dsa_attend(rows, self._heads, pools[0], plan, mixed)
        if spec.out_gate:
            mixed.mul_(torch.sigmoid(first[:, q_size + spec.latent_dim :]))
        return ops.linear_add_(residual, mixed, self._out, self._out_bias)

    @property
    def _q_size(self) -> int:
        """Columns of the first product that belong to the query."""
        return self._spec.q_rank or self._spec.num_heads * self._spec.qk_dim

    def _latent(self, down: Tensor, context: WaveContext) -> Tensor:
        """What is cached, [T, R + dr], from the down-projection of the same shape."""
        spec, rank = self._spec, self._spec.kv_rank
        latent = context.workspace.empty("latent", tuple(down.shape), down)
        normed = self._ops.rms_norm(down[:, :rank], self._latent_norm, spec.norm_eps, None)
        latent[:, :rank] = normed
        key = down[:, rank:]
        if spec.rope is not None:
            key = self._ops.rope(key.unsqueeze(1), *context.ropes[spec.rope], None).squeeze(1)
        latent[:, rank:] = key
        return latent

    def _query(self, latent: Tensor, context: WaveContext) -> Tensor:
        """[T, H, dn + dr], rotated where the model rotates."""
        spec, ops = self._spec, self._ops
        q = latent if self._q_up is None else ops.linear(latent, self._q_up, None, None)
        q = q.reshape(q.shape[0], spec.num_heads, spec.qk_dim)
        if spec.rope is not None:
            q[..., spec.nope_dim :] = ops.rope(
                q[..., spec.nope_dim :], *context.ropes[spec.rope], None
            )
        return q

    def _read_first(self, weights: WeightSource, prefix: str) -> tuple[Tensor, Tensor | None]:
        """All that is applied to x, as one product: query (or its latent), latent, gate."""
        spec = self._spec
        query = "q_proj" if spec.q_rank is None else "q_a_proj"
        names = [query, "kv_a_proj_with_mqa"]
        rows = [self._q_size, spec.latent_dim]
        biases = None
        if spec.bias:
            assert spec.q_rank is not None
            assert not spec.out_gate
            biases = weights.read_rows([f"{prefix}.{n}.bias" for n in names], rows, None)
        if spec.out_gate:
            names.append("g_proj")
            rows.append(spec.num_heads * spec.v_dim)
        found = [f"{prefix}.{name}.weight" for name in names]
        return weights.read_rows(found, rows, spec.hidden_size), biases

    def _order_rope_rows(self) -> None:
        """Reorders rows that make neighbouring pairs to halves, which rope turns; done once."""
        spec = self._spec
        if spec.rope is None or not spec.interleaved:
            return
        up = self._first[: self._q_size] if self._q_up is None else self._q_up
        heads = up.view(spec.num_heads, spec.qk_dim, -1)
        pairs_to_halves_(heads[:, spec.nope_dim :], 1)
        begin = self._q_size + spec.kv_rank
        for tensor in (self._first, self._first_bias):
            if tensor is not None:
                pairs_to_halves_(tensor[begin : begin + spec.rope_dim], 0)
