"""Token mixers as data: what attends, recurs or selects, with exact parameter and operation counts.

Owns no tensors and reads no files; layers/ computes what is described here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn"]
DELTA_CHUNK = 64  # tokens the delta rule takes at once; snapshots inside a span lie on multiples


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding: the `rotary_dim` leading dims of each head turn, half-split.

    Sources: RoFormer; Llama 3.1's frequency scaling; YaRN (arXiv 2309.00071).
    """

    kind: RopeKind
    theta: float
    rotary_dim: int
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GqaSpec:
    """Grouped-query attention. `window` w: a token sees itself and w-1 before it; None: all.

    Attributes:
        qk_norm: RMSNorm of queries and keys before rope: per head, or over all heads at once.
        norm_offset: added to the weights of those norms (1 where they are stored around 0).
        out_gate: the result is multiplied by sigmoid of a gate, whose rows lie in q_proj behind
            the query rows of each head.
        scale: factor of q . k; None: head_dim ** -0.5.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    window: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["head", "all"] | None = None
    norm_offset: float = 0.0
    out_gate: bool = False
    scale: float | None = None

    @property
    def parameters(self) -> int:
        """Elements of its weights."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        rows = q_size * (2 if self.out_gate else 1) + 2 * kv_size
        count = rows * self.hidden_size + self.hidden_size * q_size
        count += rows if self.qkv_bias else 0
        count += self.hidden_size if self.out_bias else 0
        if self.qk_norm == "all":
            return count + q_size + kv_size
        return count + (2 * self.head_dim if self.qk_norm == "head" else 0)

    def flops_per_token(self, context: int) -> float:
        """Multiply-adds times two for one token that sees `context` tokens."""
        seen = context if self.window is None else min(context, self.window)
        return 2.0 * self.parameters + 4.0 * self.num_heads * self.head_dim * seen


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec:
    """Sparse attention's selector: index scores of one small key a token, the top `top_k` attend.

    I[t,s] = sum_h w[t,h] relu(q[t,h] . k[s]), source: DeepSeek-V3.2. `shared` layers have no
    selector of their own and take the choice of the last layer that has (arXiv 2603.12201).
    """

    num_heads: int
    head_dim: int
    top_k: int
    interleaved: bool
    shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSpec:
    """Multi-head latent attention; the cache has one latent and one shared rope key a token.

    Attributes:
        q_rank: rank of the query's down-projection; None: one full projection.
        rope: None: the `rope_dim` dims exist and are used as they are (NoPE).
        interleaved: pairs to turn are neighbours in the checkpoint (rows are reordered at load).
        scale: factor of q . k.
        out_gate: the result is multiplied by sigmoid(g_proj x) before the output projection.
    """

    hidden_size: int
    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float
    rope: RopeSpec | None = None
    interleaved: bool = False
    bias: bool = False
    out_gate: bool = False
    indexer: IndexerSpec | None = None
    norm_eps: float = 1e-6  # of the two inner norms: the published code leaves its default there

    @property
    def qk_dim(self) -> int:
        """Dims of a query or an expanded key of one head."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """Dims that are cached for a token: latent and rope key."""
        return self.kv_rank + self.rope_dim

    @property
    def parameters(self) -> int:
        """Elements of its weights."""
        hidden, heads = self.hidden_size, self.num_heads
        q_rows = heads * self.qk_dim
        if self.q_rank is None:
            count = hidden * q_rows
        else:
            count = self.q_rank * (hidden + q_rows + 1) + (self.q_rank if self.bias else 0)
        count += hidden * self.latent_dim + self.kv_rank + (self.latent_dim if self.bias else 0)
        count += self.kv_rank * heads * (self.nope_dim + self.v_dim)
        count += hidden * heads * self.v_dim * (2 if self.out_gate else 1)
        count += hidden if self.bias else 0
        if self.indexer is not None and not self.indexer.shared:
            size = self.indexer.num_heads * self.indexer.head_dim
            count += (self.q_rank or hidden) * size
            count += hidden * (self.indexer.head_dim + self.indexer.num_heads)
            count += 2 * self.indexer.head_dim
        return count

    def flops_per_token(self, context: int) -> float:
        """Multiply-adds times two for one token that sees `context` tokens."""
        seen, extra = context, 0.0
        if self.indexer is not None:
            seen = min(context, self.indexer.top_k)
            if not self.indexer.shared:
                extra = 2.0 * self.indexer.num_heads * self.indexer.head_dim * context
        per_key = 2.0 * self.num_heads * (self.qk_dim + self.v_dim)
        return 2.0 * self.parameters + per_key * seen + extra


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec:
    """A gated delta rule: Kimi Delta Attention ("kda") or Gated DeltaNet ("gdn").

    S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T and o_t = S_t^T q_t, with
    a decay alpha per key channel (kda, arXiv 2510.26692) or per head (gdn, arXiv 2412.06464).

    Attributes:
        key_heads, heads: gdn may have fewer query and key heads than value heads; each serves
            heads / key_heads of them.
        gate_rank: inner size of the two-step output gate; None: one full projection (kda).
        decay_rank: inner size of the decay projection (kda).
        lower_bound: the log decay is lower_bound * sigmoid(exp(A) z); None: -exp(A) softplus(z).
        merged: gdn's projections come merged by key head, as qwen3_next stores them.
    """

    kind: Literal["kda", "gdn"]
    hidden_size: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    conv_size: int
    norm_eps: float
    gate_rank: int | None = None
    decay_rank: int = 0
    lower_bound: float | None = None
    merged: bool = False

    @property
    def key_size(self) -> int:
        """Channels of all queries, and of all keys."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Channels of all values."""
        return self.heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution: q, k and v side by side."""
        return 2 * self.key_size + self.value_size

    @property
    def parameters(self) -> int:
        """Elements of its weights."""
        hidden, values = self.hidden_size, self.value_size
        count = self.conv_channels * (hidden + self.conv_size) + self.heads * hidden
        count += self.value_dim + hidden * values
        if self.kind == "gdn":
            return count + hidden * values + self.heads * hidden + 2 * self.heads
        count += self.decay_rank * (hidden + self.key_size) + self.key_size
        count += self.heads
        if self.gate_rank is None:
            return count + hidden * values
        return count + self.gate_rank * (hidden + values)

    def flops_per_token(self, context: int) -> float:
        """Multiply-adds times two for one token; the context does not matter."""
        state = self.heads * self.key_dim * self.value_dim
        inside = self.heads * DELTA_CHUNK * (2 * self.key_dim + self.value_dim)
        return 2.0 * self.parameters + 8.0 * state + 2.0 * inside


MixerSpec = GqaSpec | MlaSpec | DeltaSpec
