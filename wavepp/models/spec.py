"""What a model is, as data: layers by kind, cache groups with exact bytes, carries between stages.

Owns no tensors and reads no files. A stage is a contiguous range of layers [lo, hi); a *boundary* b
lies before layer b, so stage [lo, hi) takes the carry at lo and gives the carry at hi. The carry is
typed because some families pass more than hidden states on: the keys that sparse attention chose,
or the blocks of attention residuals.

    boundary:   0        lo                hi        L
                | ...    |  layers lo..hi-1 |   ...  |
                embed    carry_at(lo)       carry_at(hi)   norm, lm_head
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from wavepp.models.mixer_specs import MixerSpec, MlaSpec
from wavepp.models.mlp_specs import MlpSpec

DtypeName = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: dict[DtypeName, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
CarryDtype = DtypeName | Literal["int32"]
BLOCKS = "blocks"  # the carry with the blocks of attention residuals
TOP_K = "top_k"  # the carry with the keys that sparse attention chose
STATE_GROUP = "recurrent"

GroupKind = Literal["attention", "sliding", "recurrent"]

LOGIT_ROWS_PER_TOKEN = (
    1 / 256
)  # a prefill scores one position a prompt; prompts shorter than this are rare
CONTEXT_FOR_COST = 4096  # tokens of context at which attention is counted when layers are balanced


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTensorSpec:
    """One tensor a layer keeps: `shape` per token, or per state slot (recurrent)."""

    name: str
    shape: tuple[int, ...]
    dtype: DtypeName

    @property
    def nbytes(self) -> int:
        """Bytes for one token or one slot."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One decoder layer: a mixer, an MLP, and the cache group its state lives in.

    Attributes:
        opens_block: a block of attention residuals begins here (models that have them).
        norm_offset: added to the weights of its norms, where they are stored around 0.
        sandwich: mixer and MLP have a norm behind them too, before their result is added.
    """

    mixer: MixerSpec
    mlp: MlpSpec
    group: str
    cache: tuple[CacheTensorSpec, ...]
    opens_block: bool = False
    norm_offset: float = 0.0
    sandwich: bool = False

    @property
    def parameters(self) -> int:
        """Elements of all its weights, its norms included."""
        norms = 4 if self.sandwich else 2
        return self.mixer.parameters + self.mlp.parameters + norms * self.mixer.hidden_size

    @property
    def cache_bytes(self) -> int:
        """Cache bytes of this layer for one token (or one state slot)."""
        return sum(tensor.nbytes for tensor in self.cache)

    def cost(self, context: int = CONTEXT_FOR_COST) -> float:
        """Floating-point operations for one token."""
        return self.mixer.flops_per_token(context) + self.mlp.flops_per_token()


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroupSpec:
    """A set of layers that share one block table, and the rule for reuse there."""

    name: str
    kind: GroupKind
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CarryTensorSpec:
    """One tensor that crosses a boundary: shape [T, *shape]."""

    name: str
    shape: tuple[int, ...]
    dtype: CarryDtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes that cross for one token."""
        size = 4 if self.dtype == "int32" else DTYPE_BYTES[self.dtype]
        return math.prod(self.shape) * size


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A whole model.

    Attributes:
        dtype: of weights, activations between stages, and cache.
        attention_residuals: layers mix over blocks of the residual; some layers open a block.
        norm_offset: added to the weight of the last norm, where it is stored around 0.
        embedding_scale: factor of embedded tokens.
    """

    family: str
    dtype: DtypeName
    hidden_size: int
    vocab_size: int
    norm_eps: float
    max_model_len: int
    tie_word_embeddings: bool
    layers: tuple[LayerSpec, ...]
    groups: tuple[CacheGroupSpec, ...]
    eos_token_ids: tuple[int, ...] = ()
    attention_residuals: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0

    @property
    def num_layers(self) -> int:
        """How many decoder layers there are."""
        return len(self.layers)

    @property
    def preferred_cuts(self) -> tuple[int, ...]:
        """Boundaries where the carry is smallest; the automatic partition cuts there if it can."""
        if self.attention_residuals:
            return tuple(b for b in range(1, self.num_layers) if self.layers[b].opens_block)
        return tuple(b for b in range(1, self.num_layers) if self.choice_at(b) is None)

    def carry_at(self, boundary: int) -> tuple[CarryTensorSpec, ...]:
        """What goes from the stage that ends at `boundary` (0 < boundary < L) to the next."""
        assert 0 < boundary < self.num_layers, boundary
        hidden = CarryTensorSpec(name="hidden", shape=(self.hidden_size,), dtype=self.dtype)
        if self.attention_residuals:
            shape = (sum(layer.opens_block for layer in self.layers[:boundary]), self.hidden_size)
            return (hidden, CarryTensorSpec(name=BLOCKS, shape=shape, dtype=self.dtype))
        choice = self.choice_at(boundary)
        if choice is None:
            return (hidden,)
        return (hidden, CarryTensorSpec(name=TOP_K, shape=(choice,), dtype="int32"))

    def choice_at(self, boundary: int) -> int | None:
        """How many chosen keys a token layer `boundary` takes over; None: it takes none over."""
        mixer = self.layers[boundary].mixer
        if isinstance(mixer, MlaSpec) and mixer.indexer is not None and mixer.indexer.shared:
            return mixer.indexer.top_k
        return None

    def groups_in(self, lo: int, hi: int) -> tuple[CacheGroupSpec, ...]:
        """The cache groups that layers [lo, hi) use, in the model's order."""
        used = {layer.group for layer in self.layers[lo:hi]}
        return tuple(group for group in self.groups if group.name in used)

    def cache_bytes(self, group: str, lo: int, hi: int) -> int:
        """Cache bytes of `group` in layers [lo, hi), for one token (or one state slot)."""
        return sum(layer.cache_bytes for layer in self.layers[lo:hi] if layer.group == group)

    def parameters_in(self, lo: int, hi: int) -> int:
        """Elements stage [lo, hi) loads, embedding (first) or norm and head (last) included."""
        table = self.vocab_size * self.hidden_size
        count = sum(layer.parameters for layer in self.layers[lo:hi])
        last = hi == self.num_layers
        if self.attention_residuals:  # a norm and a projection for each mix
            count += 2 * self.hidden_size * (2 * (hi - lo) + (1 if last else 0))
        count += table if lo == 0 else 0
        count += self.hidden_size if last else 0
        shared = self.tie_word_embeddings and lo == 0
        return count + (table if last and not shared else 0)

    @property
    def embedding_cost(self) -> float:
        """Operations for one token in the embedding: a row is copied."""
        return float(self.hidden_size)

    @property
    def head_cost(self) -> float:
        """Operations for one token in the final norm and lm_head, which see few positions."""
        return 2.0 * self.hidden_size * self.vocab_size * LOGIT_ROWS_PER_TOKEN
