"""Scratch memory that is kept from wave to wave.

Large tensors that a wave makes and drops cost page faults each time the allocator gives the memory
back (measured: four times the copy itself for a gathered prefix). A workspace belongs to one stage
and one thread at a time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Workspace:
    """Named buffers that only grow."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def empty(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A contiguous tensor of `shape` with the dtype and device of `like`, content undefined.

        Valid until `name` is asked for again.
        """
        key = (name, like.dtype, like.device)
        size = math.prod(shape)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            # The old buffer goes first, so that both are never held.
            self._buffers.pop(key, None)
            buffer = torch.empty(size, dtype=like.dtype, device=like.device)
            self._buffers[key] = buffer
        return buffer[:size].view(shape)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())
