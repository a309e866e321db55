"""The selector of sparse attention: index queries, weights and keys. Source: DeepSeek-V3.2."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from wavepp.kernels.api import Ops
from wavepp.kernels.attention_plan import AttentionPlan
from wavepp.models.layers.context import WaveContext
from wavepp.models.layers.rope import pairs_to_halves_
from wavepp.models.loader import WeightSource
from wavepp.models.mixer_specs import IndexerSpec, MlaSpec

KEY_NORM_EPS = 1e-6


class Indexer:
    """One selector with its weights (below `prefix`, such as model.layers.3.self_attn.indexer)."""

    def __init__(self, spec: MlaSpec, weights: WeightSource, prefix: str, ops: Ops) -> None:
        assert spec.indexer is not None
        assert spec.q_rank is not None
        assert spec.rope is not None
        self._spec: IndexerSpec = spec.indexer
        self._rope = spec.rope
        self._ops = ops
        heads, dim = spec.indexer.num_heads, spec.indexer.head_dim
        self._q_up = weights.read(f"{prefix}.wq_b.weight", (heads * dim, spec.q_rank))
        self._key = weights.read(f"{prefix}.wk.weight", (dim, spec.hidden_size))
        self._key_norm = weights.read(f"{prefix}.k_norm.weight", (dim,))
        self._key_bias = weights.read(f"{prefix}.k_norm.bias", (dim,))
        shape = (heads, spec.hidden_size)
        self._weights = weights.read(f"{prefix}.weights_proj.weight", shape)
        if spec.indexer.interleaved:
            turned = spec.rope.rotary_dim
            pairs_to_halves_(self._q_up.view(heads, dim, -1)[:, :turned], 1)
            for tensor in (self._key, self._key_norm, self._key_bias):
                pairs_to_halves_(tensor[:turned], 0)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The weights that are held."""
        return (self._q_up, self._key, self._key_norm, self._key_bias, self._weights)

    def select(
        self, x: Tensor, q_latent: Tensor, context: WaveContext, pool: Tensor, plan: AttentionPlan
    ) -> Tensor:
        """Choices int32 [T, top_k] of rows x [T, hidden]; writes this wave's index keys.

        Args:
            q_latent: the attention's normed query latent, [T, q_rank].
        """
        spec, ops = self._spec, self._ops
        turn = context.ropes[self._rope]
        key = ops.linear(x, self._key, None, None)
        key = F.layer_norm(key, key.shape[1:], self._key_norm, self._key_bias, KEY_NORM_EPS)
        ops.write_rows(pool, ops.rope(key.unsqueeze(1), *turn, None).squeeze(1), plan)
        if not plan.sparse:  # all rows are dense: nothing to choose, and nobody will look
            return torch.full((x.shape[0], spec.top_k), -1, dtype=torch.int32, device=x.device)
        q = ops.linear(q_latent, self._q_up, None, None)
        q = ops.rope(q.view(-1, spec.num_heads, spec.head_dim), *turn, None)
        scale = (spec.num_heads * spec.head_dim) ** -0.5
        weights = ops.linear(x, self._weights, None, None).float().mul_(scale)
        return ops.dsa_select((q, weights), pool, plan, spec.top_k, context.workspace)
