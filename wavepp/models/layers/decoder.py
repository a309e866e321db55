"""One pre-norm decoder layer: x += mixer(norm(x)); x += mlp(norm(x)). And what builds its parts."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from wavepp.kernels.api import Ops, Pools
from wavepp.kernels.workspace import Workspace
from wavepp.models.layers.context import WaveContext
from wavepp.models.layers.gdn import GdnLayer
from wavepp.models.layers.gqa import GqaLayer
from wavepp.models.layers.kda import KdaLayer
from wavepp.models.layers.mla import MlaLayer
from wavepp.models.layers.mlp import DenseMlp
from wavepp.models.layers.moe import MoeMlp
from wavepp.models.layers.norm import read_norm
from wavepp.models.loader import WeightSource
from wavepp.models.mixer_specs import DeltaSpec, GqaSpec, MlaSpec
from wavepp.models.mlp_specs import DenseMlpSpec, MoeSpec
from wavepp.models.spec import LayerSpec


class Mixer(Protocol):
    """Mixes tokens of a sequence, through what the cache holds of it."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The weights that are held."""
        ...

    def add_to(
        self, residual: Tensor, x: Tensor, context: WaveContext, pools: Pools, group: str
    ) -> Tensor:
        """residual + mixer(x), [T, hidden]; overwrites the residual, updates the pools."""
        ...


class Mlp(Protocol):
    """Works on every token alone."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The weights that are held."""
        ...

    def add_to(self, residual: Tensor, x: Tensor, scratch: Workspace) -> Tensor:
        """residual + mlp(x), [T, hidden]; overwrites the residual."""
        ...


class DecoderLayer:
    """Layer `index` of the model with its weights."""

    def __init__(
        self, spec: LayerSpec, norm_eps: float, weights: WeightSource, prefix: str, ops: Ops
    ) -> None:
        self._group = spec.group
        self._eps = norm_eps
        self._ops = ops
        size, offset = spec.mixer.hidden_size, spec.norm_offset
        name = f"{prefix}.input_layernorm.weight"
        self._mixer_norm = read_norm(weights, name, size, offset)
        self._mixer = build_mixer(spec, norm_eps, weights, prefix, ops)
        name = f"{prefix}.post_attention_layernorm.weight"
        self._mlp_norm = read_norm(weights, name, size, offset)
        self._mlp = build_mlp(spec, norm_eps, weights, prefix, ops)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The weights that are held."""
        return (self._mixer_norm, self._mlp_norm, *self._mixer.tensors, *self._mlp.tensors)

    def forward(self, x: Tensor, context: WaveContext, pools: Pools) -> Tensor:
        """x [T, hidden] after this layer. Overwrites x."""
        scratch = context.workspace
        normed = scratch.empty("normed", tuple(x.shape), x)
        normed = self._ops.rms_norm(x, self._mixer_norm, self._eps, normed)
        x = self._mixer.add_to(x, normed, context, pools, self._group)
        normed = scratch.empty("normed", tuple(x.shape), x)
        normed = self._ops.rms_norm(x, self._mlp_norm, self._eps, normed)
        return self._mlp.add_to(x, normed, scratch)


class SandwichLayer:
    """Norms on both sides: x += norm(mixer(norm(x))); x += norm(mlp(norm(x)))."""

    def __init__(
        self, spec: LayerSpec, norm_eps: float, weights: WeightSource, prefix: str, ops: Ops
    ) -> None:
        self._group = spec.group
        self._eps = norm_eps
        self._ops = ops
        size, offset = spec.mixer.hidden_size, spec.norm_offset
        names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        self._norms = [
            read_norm(weights, f"{prefix}.{name}_layernorm.weight", size, offset) for name in names
        ]
        self._mixer = build_mixer(spec, norm_eps, weights, prefix, ops)
        self._mlp = build_mlp(spec, norm_eps, weights, prefix, ops)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The weights that are held."""
        return (*self._norms, *self._mixer.tensors, *self._mlp.tensors)

    def forward(self, x: Tensor, context: WaveContext, pools: Pools) -> Tensor:
        """x [T, hidden] after this layer. Overwrites x."""
        before_mixer, after_mixer, before_mlp, after_mlp = self._norms
        rms_norm, eps = self._ops.rms_norm, self._eps
        inner = torch.zeros_like(x)
        normed = rms_norm(x, before_mixer, eps, None)
        inner = self._mixer.add_to(inner, normed, context, pools, self._group)
        x = x.add_(rms_norm(inner, after_mixer, eps, None))
        inner = torch.zeros_like(x)
        inner = self._mlp.add_to(inner, rms_norm(x, before_mlp, eps, None), context.workspace)
        return x.add_(rms_norm(inner, after_mlp, eps, None))


def build_mixer(
    spec: LayerSpec, norm_eps: float, weights: WeightSource, prefix: str, ops: Ops
) -> Mixer:
    """The layer's token mixer."""
    match spec.mixer:
        case GqaSpec():
            return GqaLayer(spec.mixer, norm_eps, weights, f"{prefix}.self_attn", ops)
        case MlaSpec():
            return MlaLayer(spec.mixer, weights, f"{prefix}.self_attn", ops)
        case DeltaSpec(kind="gdn"):
            return GdnLayer(spec.mixer, weights, f"{prefix}.linear_attn", ops)
        case DeltaSpec():
            return KdaLayer(spec.mixer, weights, f"{prefix}.self_attn", ops)


def build_mlp(
    spec: LayerSpec, norm_eps: float, weights: WeightSource, prefix: str, ops: Ops
) -> Mlp:
    """The layer's feed-forward part."""
    match spec.mlp:
        case DenseMlpSpec():
            found = [p for p in spec.mlp.prefixes if weights.has(f"{prefix}.{p}.gate_proj.weight")]
            where = found[0] if found else spec.mlp.prefixes[0]
            return DenseMlp(spec.mlp, weights, f"{prefix}.{where}", ops)
        case MoeSpec():
            where = f"{prefix}.{spec.mlp.names.prefix}"
            return MoeMlp(spec.mlp, norm_eps, weights, where, ops)
