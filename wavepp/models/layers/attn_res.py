"""A decoder layer with Block Attention Residuals: inputs are mixes over snapshots of the residual.

The residual starts anew every few layers; what it was is kept as a block. Before the mixer, before
the MLP and before the head, the input is a softmax mix over the blocks so far and the running
residual. Blocks cross stage boundaries. Source: Attention Residuals (arXiv 2603.15031).

    layer i opens a block:   blocks += residual; residual = mixer(norm(mix))
    otherwise:               residual += mixer(norm(mix))
    then always:             residual += mlp(norm(mix of the new residual))
"""

from __future__ import annotations

import torch
from torch import Tensor

from wavepp.kernels.api import Ops, Pools
from wavepp.models.layers.context import WaveContext
from wavepp.models.layers.decoder import build_mixer, build_mlp
from wavepp.models.loader import WeightSource
from wavepp.models.spec import BLOCKS, LayerSpec


class ResidualMix:
    """One mix over blocks and residual; its norm and projection act as one weight."""

    def __init__(self, size: int, eps: float, weights: WeightSource, prefix: str, ops: Ops) -> None:
        norm = weights.read(f"{prefix}_norm.weight", (size,), dtype=torch.float32)
        projection = weights.read(f"{prefix}_proj.weight", (1, size), dtype=torch.float32)
        self.weight = norm * projection[0]
        self._eps = eps
        self._ops = ops

    def apply(self, x: Tensor, blocks: Tensor | None) -> Tensor:
        """The mix [T, hidden] of blocks [T, n, hidden] and residual x; x itself without blocks."""
        if blocks is None:
            return x
        return self._ops.attn_res(x, blocks, self.weight, self._eps)


class AttnResLayer:
    """Layer `index` with its weights. `opens`: whether a block begins here."""

    def __init__(
        self, spec: LayerSpec, norm_eps: float, weights: WeightSource, prefix: str, ops: Ops
    ) -> None:
        self._group = spec.group
        self._opens = spec.opens_block
        self._eps = norm_eps
        self._ops = ops
        size = spec.mixer.hidden_size
        self._mixer_norm = weights.read(f"{prefix}.input_layernorm.weight", (size,))
        self._mixer = build_mixer(spec, norm_eps, weights, prefix, ops)
        self._mlp_norm = weights.read(f"{prefix}.post_attention_layernorm.weight", (size,))
        self._mlp = build_mlp(spec, norm_eps, weights, prefix, ops)
        name = f"{prefix}.self_attention_res"
        self._mixer_mix = ResidualMix(size, norm_eps, weights, name, ops)
        self._mlp_mix = ResidualMix(size, norm_eps, weights, f"{prefix}.mlp_res", ops)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The weights that are held."""
        mixes = (self._mixer_mix.weight, self._mlp_mix.weight)
        norms = (self._mixer_norm, self._mlp_norm)
        return (*norms, *mixes, *self._mixer.tensors, *self._mlp.tensors)

    def forward(self, x: Tensor, context: WaveContext, pools: Pools) -> Tensor:
        """The residual x [T, hidden] after this layer. Overwrites x; may add a block."""
        blocks = context.carried.get(BLOCKS)
        mixed = self._mixer_mix.apply(x, blocks)
        normed = self._ops.rms_norm(mixed, self._mixer_norm, self._eps, None)
        if self._opens:
            own = x.unsqueeze(1)
            blocks = own.clone() if blocks is None else torch.cat([blocks, own], dim=1)
            context.carried[BLOCKS] = blocks
            x.zero_()
        x = self._mixer.add_to(x, normed, context, pools, self._group)
        mixed = self._mlp_mix.apply(x, blocks)
        normed = self._ops.rms_norm(mixed, self._mlp_norm, self._eps, None)
        return self._mlp.add_to(x, normed, context.workspace)
