"""Norm weights as they are applied."""

from __future__ import annotations

import torch
from torch import Tensor

from wavepp.models.loader import WeightSource


def read_norm(weights: WeightSource, name: str, size: int, offset: float) -> Tensor:
    """A norm's weight [size]; where it is stored around 0, `offset` 1 is added, in float32."""
    if not offset:
        return weights.read(name, (size,))
    return weights.read(name, (size,), dtype=torch.float32).add_(offset)
