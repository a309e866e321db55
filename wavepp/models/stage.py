"""What one stage computes: layers [lo, hi), the embedding if first, the head if last.

Owns weights; the cache is handed in. Knows waves and tensors, nothing of requests or the runtime.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import torch
from torch import Tensor

from wavepp.kernels.api import Ops, Pools
from wavepp.kernels.select import select_ops
from wavepp.kernels.wave import GroupWindow, Wave
from wavepp.kernels.workspace import Workspace
from wavepp.models.layers.attn_res import AttnResLayer, ResidualMix
from wavepp.models.layers.context import WaveContext
from wavepp.models.layers.decoder import DecoderLayer, SandwichLayer
from wavepp.models.layers.norm import read_norm
from wavepp.models.layers.rope import CosSin, cos_sin, inverse_frequencies
from wavepp.models.loader import NameRecorder, WeightSource
from wavepp.models.mixer_specs import DeltaSpec, MlaSpec, RopeSpec
from wavepp.models.spec import BLOCKS, CarryDtype, LayerSpec, ModelSpec

TORCH_DTYPES: dict[CarryDtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int32": torch.int32,
}
Layer = DecoderLayer | SandwichLayer | AttnResLayer
Activations = dict[str, Tensor]  # the tensors of a carry, in the stage's own dtype

LOGITS_MAX = 1 << 24  # elements of logits held at once (64 MB in float32)


class StageModel:
    """Stage [lo, hi) of a model.

    Args:
        spec: the whole model.
        lo, hi: its layers.
        weights: where they are read from; decides dtype and device of computation.
    """

    def __init__(self, spec: ModelSpec, lo: int, hi: int, weights: WeightSource, ops: Ops) -> None:
        assert 0 <= lo < hi <= spec.num_layers, (lo, hi, spec.num_layers)
        self.spec = spec
        self.lo, self.hi = lo, hi
        self._ops = ops
        self._workspace = Workspace()
        table = (spec.vocab_size, spec.hidden_size)
        self._embedding = self._norm = self._head = None
        if self.is_first:
            self._embedding = weights.read("model.embed_tokens.weight", table)
        self._layers = [_build_layer(spec, i, weights, ops) for i in range(lo, hi)]
        if self.is_last:
            size = spec.hidden_size
            self._norm = read_norm(weights, "model.norm.weight", size, spec.norm_offset)
            self._head = self._read_head(weights, table)
        self._final_mix = None
        if self.is_last and spec.attention_residuals:
            name = "model.output_attn_res"
            self._final_mix = ResidualMix(spec.hidden_size, spec.norm_eps, weights, name, ops)
        sample = self._layers[0].tensors[0]
        self.dtype, self.device = sample.dtype, sample.device
        ropes = _ropes(spec.layers[lo:hi])
        self._frequencies = {rope: inverse_frequencies(rope).to(self.device) for rope in ropes}

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens."""
        return self.lo == 0

    @property
    def is_last(self) -> bool:
        """Whether it makes logits."""
        return self.hi == self.spec.num_layers

    @property
    def wave_groups(self) -> tuple[GroupWindow, ...]:
        """Its cache groups, as `build_wave` takes them."""
        return wave_groups(self.spec, self.lo, self.hi)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights held; a tensor that serves twice counts once."""
        held = [t for layer in self._layers for t in layer.tensors]
        mix = None if self._final_mix is None else self._final_mix.weight
        held += [t for t in (self._embedding, self._norm, self._head, mix) if t is not None]
        return sum({t.data_ptr(): t.numel() * t.element_size() for t in held}.values())

    def embed(self, token_ids: Tensor) -> Activations:
        """What the first stage starts from, for token ids [T]."""
        assert self._embedding is not None, "only the first stage embeds"
        hidden = self._embedding.index_select(0, token_ids)
        if self.spec.embedding_scale != 1.0:
            # The factor is rounded as the model was trained with it: to the model's dtype.
            stored = TORCH_DTYPES[self.spec.dtype]
            hidden.mul_(torch.tensor(self.spec.embedding_scale).to(stored).item())
        return {"hidden": hidden}

    def receive(self, carry: Mapping[str, Tensor]) -> Activations:
        """What a later stage starts from: its own copy of the carry at `lo`, in its dtype."""
        declared = self.spec.carry_at(self.lo)
        assert set(carry) == {tensor.name for tensor in declared}, sorted(carry)
        activations = {}
        for tensor in declared:
            given = carry[tensor.name]
            assert tuple(given.shape[1:]) == tensor.shape, (tensor, tuple(given.shape))
            dtype = torch.int32 if tensor.dtype == "int32" else self.dtype
            activations[tensor.name] = given.to(device=self.device, dtype=dtype, copy=True)
        return activations

    def forward(self, activations: Activations, wave: Wave, pools: Sequence[Pools]) -> Activations:
        """Activations of T rows through this stage's layers. Overwrites its input.

        Args:
            activations: from `embed` or `receive`.
            pools: the pools of each of its layers, in order.
        """
        x = activations["hidden"]
        assert x.shape[0] == wave.num_tokens, (tuple(x.shape), wave.num_tokens)
        carried = {name: given for name, given in activations.items() if name != "hidden"}
        ropes = self._rope_tables(wave.positions)
        context = WaveContext(wave, ropes, self._workspace, carried)
        for layer, layer_pools in zip(self._layers, pools, strict=True):
            x = layer.forward(x, context, layer_pools)
        if self._final_mix is not None:
            x = self._final_mix.apply(x, carried[BLOCKS])
        return {"hidden": x, **carried}

    def send(self, activations: Activations) -> dict[str, Tensor]:
        """The carry at `hi`, as declared: what the next stage receives."""
        return {
            tensor.name: activations[tensor.name].to(TORCH_DTYPES[tensor.dtype])
            for tensor in self.spec.carry_at(self.hi)
        }

    def logits(self, x: Tensor) -> Tensor:
        """Float32 logits [R, vocab] of rows x [R, hidden]; last stage only.

        The caller keeps R * vocab small (see `logit_rows_max`).
        """
        assert self._norm is not None, "only the last stage has logits"
        assert self._head is not None
        normed = self._ops.rms_norm(x, self._norm, self.spec.norm_eps, None)
        return self._ops.linear(normed, self._head, None, None).float()

    @property
    def logit_rows_max(self) -> int:
        """How many rows of logits may be held at once."""
        return max(1, LOGITS_MAX // self.spec.vocab_size)

    def _rope_tables(self, positions: Tensor) -> dict[RopeSpec, CosSin]:
        return {
            rope: cos_sin(rope, frequencies, positions, self.dtype)
            for rope, frequencies in self._frequencies.items()
        }

    def _read_head(self, weights: WeightSource, table: tuple[int, int]) -> Tensor:
        if not self.spec.tie_word_embeddings:
            return weights.read("lm_head.weight", table)
        if self._embedding is not None:
            return self._embedding
        return weights.read("model.embed_tokens.weight", table)


def _build_layer(spec: ModelSpec, index: int, weights: WeightSource, ops: Ops) -> Layer:
    layer, prefix = spec.layers[index], f"model.layers.{index}"
    if spec.attention_residuals:
        return AttnResLayer(layer, spec.norm_eps, weights, prefix, ops)
    kind = SandwichLayer if layer.sandwich else DecoderLayer
    return kind(layer, spec.norm_eps, weights, prefix, ops)


def _ropes(layers: Sequence[LayerSpec]) -> set[RopeSpec]:
    """All rotary embeddings these layers use."""
    found = set()
    for layer in layers:
        if not isinstance(layer.mixer, DeltaSpec) and layer.mixer.rope is not None:
            found.add(layer.mixer.rope)
    return found


def wave_groups(spec: ModelSpec, lo: int, hi: int) -> tuple[GroupWindow, ...]:
    """The cache groups of layers [lo, hi), as `build_wave` takes them."""
    return tuple(
        GroupWindow(
            name=group.name,
            window=group.window,
            recurrent=group.kind == "recurrent",
            top_k=_top_k(spec, group.name),
        )
        for group in spec.groups_in(lo, hi)
    )


def _top_k(spec: ModelSpec, group: str) -> int | None:
    """Keys that sparse attention chooses in a group; its layers all choose equally many."""
    mixers = [layer.mixer for layer in spec.layers if layer.group == group]
    indexers = [mixer.indexer for mixer in mixers if isinstance(mixer, MlaSpec)]
    return indexers[0].top_k if indexers and indexers[0] is not None else None


def tensor_shapes(spec: ModelSpec, have: Container[str] = ()) -> dict[str, tuple[int, ...] | None]:
    """Names and shapes of all weights a whole model reads, without reading any; shape None where
    the stored tensor may be larger.

    Args:
        have: names of a checkpoint, which decide where there are two spellings.
    """
    recorder = NameRecorder(have)
    StageModel(spec, 0, spec.num_layers, recorder, select_ops(torch.device("meta")))
    return recorder.shapes
