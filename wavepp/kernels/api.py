"""The operations a model is written in, as functions on flat varlen waves.

One implementation of each is chosen by device when a stage is built (select.py); models call them
through this table and know no library. `torch_ref` says what each must compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from wavepp.kernels.attention_plan import AttentionPlan
from wavepp.kernels.recurrent_plan import StateSpan
from wavepp.kernels.workspace import Workspace

Qkv = tuple[Tensor, Tensor, Tensor]  # q [T, H, D]; k, v [T, K, D]
KvPools = tuple[Tensor, Tensor]  # each [blocks, B, K, D]
Pools = tuple[Tensor, ...]  # what one layer caches: a tensor for each of its cache specs
Glu = Callable[[Tensor], Tensor]  # [T, 2I] -> [T, I]; may overwrite its input
Experts = tuple[Tensor, Tensor]  # gate and up [E, 2I, H], down [E, H, I]
Routes = tuple[Tensor, Tensor]  # chosen experts int64 [T, k], their weights float32 [T, k]


@dataclass(frozen=True, slots=True)
class MlaHeads:
    """What turns latents into keys and values, and the factor of q . k.

    Attributes:
        key_up: K of every head, [H, dn, R].
        value_up: V of every head, [H, dv, R].
    """

    key_up: Tensor
    value_up: Tensor
    scale: float

    @property
    def part_of(self) -> tuple[int, int, int]:
        """H, dn, dv."""
        return self.key_up.shape[0], self.key_up.shape[1], self.value_up.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaInputs:
    """What the gated delta rule is applied to.

    Attributes:
        q, k: [T, Hk, K], as projected: the rule brings them to unit length and scales q by
            K ** -0.5; each of the Hk heads serves H / Hk value heads in a row.
        v: [T, H, V].
        log_decay: float32 [T, H, K], or [T, H, 1] for one decay a head; never positive.
        beta: float32 [T, H], how much of a value is written.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """One implementation of every operation; signatures and shapes are those of torch_ref.

    Attributes:
        rms_norm: (x [..., D], weight, eps, out) -> [..., D]
        rope: (x [T, H, D], cos, sin [T, 1, C], out) -> [T, H, D]
        silu_mul_: (gate_up [T, 2I]) -> [T, I]; may overwrite its input
        gelu_mul_: (gate_up [T, 2I]) -> [T, I]; may overwrite its input
        situ_mul_: (gate_up [T, 2I], beta, linear_beta) -> [T, I]; may overwrite its input
        attn_res: (x [T, D], blocks [T, n, D], weight [D], eps) -> [T, D]
        linear: (x [T, I], weight [O, I], bias, out) -> [T, O]
        linear_add_: (residual [T, O], x, weight, bias) -> [T, O]; may overwrite the residual
        write_paged: (pools, k, v, plan) -> None
        attn_paged: ((q, k, v), pools, plan, scale, workspace) -> [T, H * D]
        write_rows: (pool, rows [T, D], plan) -> None
        mla_paged: ((q [T, H, dn + dr], latents), heads, pool, plan, workspace) -> [T, H * dv]
        dsa_select: ((q [T, n, d], weights), pool, plan, top_k, workspace) -> int32 [T, top_k]
        dsa_attend: ((q, choices), heads, pool, plan, out [T, H * dv]) -> out
        short_conv: (x [T, C], weight [C, W], pool, spans) -> [T, C], SiLU applied
        delta_rule: (inputs, pool, spans) -> [T, H, V]
        moe: (x [T, H], routes, experts, activation) -> float32 [T, H]

    `out` is where a result goes (None: a new tensor); an implementation may ignore it, so only what
    is returned counts.
    """

    rms_norm: Callable[[Tensor, Tensor, float, Tensor | None], Tensor]
    rope: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    silu_mul_: Callable[[Tensor], Tensor]
    gelu_mul_: Callable[[Tensor], Tensor]
    situ_mul_: Callable[[Tensor, float, float], Tensor]
    attn_res: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    linear: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
    linear_add_: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    write_paged: Callable[[KvPools, Tensor, Tensor, AttentionPlan], None]
    attn_paged: Callable[[Qkv, KvPools, AttentionPlan, float, Workspace], Tensor]
    write_rows: Callable[[Tensor, Tensor, AttentionPlan], None]
    mla_paged: Callable[[tuple[Tensor, Tensor], MlaHeads, Tensor, AttentionPlan, Workspace], Tensor]
    dsa_select: Callable[[tuple[Tensor, Tensor], Tensor, AttentionPlan, int, Workspace], Tensor]
    dsa_attend: Callable[[tuple[Tensor, Tensor], MlaHeads, Tensor, AttentionPlan, Tensor], Tensor]
    short_conv: Callable[[Tensor, Tensor, Tensor, Sequence[StateSpan]], Tensor]
    delta_rule: Callable[[DeltaInputs, Tensor, Sequence[StateSpan]], Tensor]
    moe: Callable[[Tensor, Routes, Experts, Glu], Tensor]
