"""Gated MLP with gate and up projections merged into one product."""

from __future__ import annotations

from torch import Tensor

from wavepp.kernels.api import Ops
from wavepp.kernels.workspace import Workspace
from wavepp.models.loader import WeightSource
from wavepp.models.spec import DenseMlpSpec


class DenseMlp:
    """down(silu(gate(x)) * up(x)) with its weights (names below `prefix`)."""

    def __init__(self, spec: DenseMlpSpec, weights: WeightSource, prefix: str, ops: Ops) -> None:
        self._ops = ops
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

    def add_to(self, residual: Tensor, x: Tensor, scratch: Workspace) -> Tensor:
        """residual + mlp(x), both [T, hidden]. Overwrites the residual."""
        ops = self._ops
        gate_up = scratch.empty("gate_up", (x.shape[0], self._gate_up.shape[0]), x)
        inner = ops.silu_mul_(ops.linear(x, self._gate_up, self._gate_up_bias, gate_up))
        return ops.linear_add_(residual, inner, self._down, self._down_bias)
