"""Gated MLP with gate and up projections merged into one product."""

from __future__ import annotations

from torch import Tensor

from wavepp.kernels.api import Glu, Ops
from wavepp.kernels.workspace import Workspace
from wavepp.models.loader import WeightSource
from wavepp.models.mlp_specs import ActivationSpec, DenseMlpSpec


def gated_activation(spec: ActivationSpec, ops: Ops) -> Glu:
    """What joins gate and up."""
    match spec.kind:
        case "silu":
            return ops.silu_mul_
        case "gelu_tanh":
            return ops.gelu_mul_
        case "situ":
            return lambda gate_up: ops.situ_mul_(gate_up, spec.beta, spec.linear_beta)


class DenseMlp:
    """down(act(gate(x), up(x))) with its weights (names below `prefix`)."""

    def __init__(self, spec: DenseMlpSpec, weights: WeightSource, prefix: str, ops: Ops) -> None:
        self._ops = ops
        self._act = gated_activation(spec.activation, ops)
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        rows = [spec.intermediate_size] * 2
        down = f"{prefix}.down_proj"
        self._gate_up = weights.read_rows([f"{n}.weight" for n in names], rows, spec.hidden_size)
        self._down = weights.read(f"{down}.weight", (spec.hidden_size, spec.intermediate_size))
        self._gate_up_bias = self._down_bias = None
        if spec.bias:
            self._gate_up_bias = weights.read_rows([f"{n}.bias" for n in names], rows, None)
            self._down_bias = weights.read(f"{down}.bias", (spec.hidden_size,))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The weights that are held."""
        held = (self._gate_up, self._gate_up_bias, self._down, self._down_bias)
        return tuple(tensor for tensor in held if tensor is not None)

    def inner(self, x: Tensor, scratch: Workspace) -> Tensor:
        """[T, intermediate]: what the down-projection is applied to."""
        gate_up = scratch.empty("gate_up", (x.shape[0], self._gate_up.shape[0]), x)
        return self._act(self._ops.linear(x, self._gate_up, self._gate_up_bias, gate_up))

    def add_to(self, residual: Tensor, x: Tensor, scratch: Workspace) -> Tensor:
        """residual + mlp(x), both [T, hidden]. Overwrites the residual."""
        inner = self.inner(x, scratch)
        return self._ops.linear_add_(residual, inner, self._down, self._down_bias)

    def apply(self, x: Tensor, scratch: Workspace) -> Tensor:
        """mlp(x), [T, hidden]."""
        return self._ops.linear(self.inner(x, scratch), self._down, self._down_bias, None)
