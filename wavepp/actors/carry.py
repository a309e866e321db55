"""Carries as plain buffers, for transports that move numpy arrays.

A packed tensor is (dtype name, array); numpy has no bfloat16, so that travels as int16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

PackedTensor = tuple[str, npt.NDArray[np.generic]]
PackedCarry = dict[str, PackedTensor]

_BITS = {torch.bfloat16: torch.int16}


def pack_carry(carry: Mapping[str, Tensor]) -> PackedCarry:
    """A carry as arrays. CPU tensors are not copied: the arrays share their memory."""
    packed: PackedCarry = {}
    for name, tensor in carry.items():
        plain = tensor.detach().cpu().contiguous()
        dtype = str(plain.dtype).removeprefix("torch.")
        packed[name] = (dtype, plain.view(_BITS.get(plain.dtype, plain.dtype)).numpy())
    return packed


def unpack_carry(packed: Mapping[str, PackedTensor]) -> dict[str, Tensor]:
    """The tensors of a packed carry, without a copy.

    The arrays may be read-only (shared memory): whoever gets the tensors must not write to them.
    """
    carry = {}
    for name, (dtype, array) in packed.items():
        carry[name] = torch.from_numpy(_writable(array)).view(getattr(torch, dtype))
    return carry


def _writable(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """The same memory without the read-only flag, which torch warns about; keeps it alive."""
    array = np.ascontiguousarray(array)
    if array.flags.writeable or array.nbytes == 0:
        return array if array.flags.writeable else array.copy()
    window = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    window._owner = array  # type: ignore[attr-defined]
    alias: npt.NDArray[np.generic] = np.ndarray(array.shape, array.dtype, memoryview(window))
    return alias
