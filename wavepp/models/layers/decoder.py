"""One pre-norm decoder layer: x += mixer(norm(x)); x += mlp(norm(x))."""

from __future__ import annotations

from torch import Tensor

from wavepp.kernels.api import KvPools, Ops
from wavepp.models.layers.context import WaveContext
from wavepp.models.layers.gqa import GqaLayer
from wavepp.models.layers.mlp import DenseMlp
from wavepp.models.loader import WeightSource
from wavepp.models.spec import LayerSpec


class DecoderLayer:
    """Layer `index` of the model with its weights."""

    def __init__(
        self, spec: LayerSpec, norm_eps: float, weights: WeightSource, prefix: str, ops: Ops
    ) -> None:
        self._spec = spec
        self._eps = norm_eps
        self._ops = ops
        shape = (spec.mixer.hidden_size,)
        self._mixer_norm = weights.read(f"{prefix}.input_layernorm.weight", shape)
        self._mixer = GqaLayer(spec.mixer, norm_eps, weights, f"{prefix}.self_attn", ops)
        self._mlp_norm = weights.read(f"{prefix}.post_attention_layernorm.weight", shape)
        self._mlp = DenseMlp(spec.mlp, weights, f"{prefix}.mlp", ops)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The weights that are held."""
        return (self._mixer_norm, self._mlp_norm, *self._mixer.tensors, *self._mlp.tensors)

    def forward(self, x: Tensor, context: WaveContext, pools: KvPools) -> Tensor:
        """x [T, hidden] after this layer. Overwrites x."""
        scratch = context.workspace
        normed = scratch.empty("normed", tuple(x.shape), x)
        normed = self._ops.rms_norm(x, self._mixer_norm, self._eps, normed)
        x = self._mixer.add_to(x, normed, context, pools, self._spec.group)
        normed = scratch.empty("normed", tuple(x.shape), x)
        normed = self._ops.rms_norm(x, self._mlp_norm, self._eps, normed)
        return self._mlp.add_to(x, normed, scratch)
