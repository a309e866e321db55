"""Mixture of experts: router, routed experts, shared experts, and the latent variant.

T rows, E experts, k chosen of them. Sources: DeepSeek-V3 (sigmoid scores, bias that steers the
choice only, groups); Kimi K3 (experts in a latent size).
"""

from __future__ import annotations

import torch
from torch import Tensor

from wavepp.kernels.api import Ops, Routes
from wavepp.kernels.workspace import Workspace
from wavepp.models.layers.mlp import DenseMlp, gated_activation
from wavepp.models.loader import WeightSource
from wavepp.models.mlp_specs import DenseMlpSpec, MoeSpec, RouterSpec


class Router:
    """Chooses experts and their weights; float32 throughout."""

    def __init__(self, spec: MoeSpec, weights: WeightSource, prefix: str) -> None:
        self._spec = spec.router
        shape = (spec.router.num_experts, spec.hidden_size)
        self._weight = weights.read(f"{prefix}.gate.weight", shape, dtype=torch.float32)
        self._bias = None
        if spec.router.bias:
            name = f"{prefix}.{spec.names.bias}"
            self._bias = weights.read(name, shape[:1], dtype=torch.float32)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The weights that are held."""
        return (self._weight,) if self._bias is None else (self._weight, self._bias)

    def route(self, x: Tensor) -> Routes:
        """Chosen experts int64 [T, k] and their weights float32 [T, k] of rows x [T, hidden]."""
        spec = self._spec
        logits = torch.mm(x.float(), self._weight.t())
        scores = logits.sigmoid() if spec.scoring == "sigmoid" else logits.softmax(-1)
        choice = scores if self._bias is None else scores + self._bias
        if spec.groups_kept < spec.groups:
            choice = _within_groups(choice, spec)
        chosen = choice.topk(spec.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(1, chosen)
        if spec.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + spec.renorm_eps)
        return chosen, weights * spec.scale


def _within_groups(choice: Tensor, spec: RouterSpec) -> Tensor:
    """Scores [T, E] with those outside the best groups at -inf; a group counts its two best."""
    grouped = choice.view(choice.shape[0], spec.groups, -1)
    best = grouped.topk(2, dim=-1).values.sum(-1)
    kept = best.topk(spec.groups_kept, dim=-1, sorted=False).indices
    dropped = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)
    return grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).view_as(choice)


class MoeMlp:
    """A mixture of experts with its weights (below `prefix`, such as model.layers.3.mlp)."""

    def __init__(
        self, spec: MoeSpec, norm_eps: float, weights: WeightSource, prefix: str, ops: Ops
    ) -> None:
        self._spec = spec
        self._eps = norm_eps
        self._ops = ops
        self._act = gated_activation(spec.activation, ops)
        self._router = Router(spec, weights, prefix)
        self._gate_up, self._down = _read_experts(spec, weights, f"{prefix}.experts")
        self._latent: tuple[Tensor, Tensor] | None = None
        self._latent_norm = None
        if spec.latent_size is not None:
            shape = (spec.latent_size, spec.hidden_size)
            down = weights.read(f"{prefix}.routed_expert_down_proj.weight", shape)
            up = weights.read(f"{prefix}.routed_expert_up_proj.weight", shape[::-1])
            self._latent = (down, up)
            if spec.latent_norm:
                name = f"{prefix}.routed_expert_norm.weight"
                self._latent_norm = weights.read(name, shape[:1])
        self._shared = self._shared_gate = None
        if spec.shared_size:
            dense = DenseMlpSpec(
                hidden_size=spec.hidden_size,
                intermediate_size=spec.shared_size,
                activation=spec.activation,
            )
            self._shared = DenseMlp(dense, weights, f"{prefix}.{spec.names.shared}", ops)
        if spec.shared_gate:
            name = f"{prefix}.{spec.names.shared}_gate.weight"
            self._shared_gate = weights.read(name, (1, spec.hidden_size))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The weights that are held."""
        shared = () if self._shared is None else self._shared.tensors
        held = (self._gate_up, self._down, *(self._latent or ()), self._latent_norm)
        some = (*held, self._shared_gate, *self._router.tensors, *shared)
        return tuple(tensor for tensor in some if tensor is not None)

    def add_to(self, residual: Tensor, x: Tensor, scratch: Workspace) -> Tensor:
        """residual + moe(x), both [T, hidden]. Overwrites the residual."""
        ops, routes = self._ops, self._router.route(x)
        inside = x if self._latent is None else ops.linear(x, self._latent[0], None, None)
        mixed = ops.moe(inside, routes, (self._gate_up, self._down), self._act)
        if self._latent is None:
            residual.add_(mixed)
        else:
            mixed = mixed.to(x.dtype)
            if self._latent_norm is not None:
                mixed = ops.rms_norm(mixed, self._latent_norm, self._eps, None)
            residual = ops.linear_add_(residual, mixed, self._latent[1], None)
        if self._shared is None:
            return residual
        if self._shared_gate is None:
            return self._shared.add_to(residual, x, scratch)
        gate = torch.sigmoid(ops.linear(x, self._shared_gate, None, None))
        return residual.addcmul_(self._shared.apply(x, scratch), gate)


def _read_experts(spec: MoeSpec, weights: WeightSource, prefix: str) -> tuple[Tensor, Tensor]:
    """Gate and up rows [E, 2I, H] and down [E, H, I] of all experts."""
    count, inner, size = spec.router.num_experts, spec.intermediate_size, spec.expert_size
    names = spec.names
    pairs = [f"{prefix}.{e}.{part}.weight" for e in range(count) for part in (names.gate, names.up)]
    gate_up = weights.read_rows(pairs, [inner] * len(pairs), size)
    downs = [f"{prefix}.{e}.{names.down}.weight" for e in range(count)]
    down = weights.read_rows(downs, [size] * count, inner)
    return gate_up.view(count, 2 * inner, size), down.view(count, size, inner)
