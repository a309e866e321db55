"""Quantised weight formats: how each is stored, and one function that makes plain numbers of them.

    fp8      X.weight F8_E4M3 [o, i] and X.weight_scale_inv [ceil(o / a), ceil(i / b)]: each number
             times the scale of its block; blocks at the end may be partial
    mxfp4    X.weight_packed U8 [o, i / 2] and X.weight_scale U8 [o, i / 32]: E2M1 numbers, the low
             nibble is the even column, times 2^(scale - 127)
    int4     X.weight_packed I32 [o, i / 8], X.weight_scale [o, i / group] and X.weight_shape:
             (nibble - 8) times the scale of its column group, the low nibble first

Weights are decoded to float32, one tensor at a time, as a stage reads them, with little memory
beside the result. Tensors that a checkpoint left unquantised are stored plainly and never come
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from wavepp.errors import ConfigError
from wavepp.models.json_config import JsonConfig

PackedFormat = Literal["fp8", "mxfp4", "int4"]
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4_GROUP = 32
MXFP4_BIAS = 127
INT4_OFFSET = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """A checkpoint's format. `block`: rows and columns that share a scale (fp8)."""

    format: PackedFormat
    block: tuple[int, int] = (1, 1)


def read_quantization(config: JsonConfig) -> Quantization | None:
    """The format config.json names, at the top or below text_config; None: weights are plain.

    Raises:
        ConfigError: a format that is not supported, named by its key.
    """
    found = config.child("quantization_config")
    if not config.mapping("quantization_config"):
        found = config.child("text_config").child("quantization_config")
    method = found.raw("quant_method")
    if method is None:
        return None
    if method == "fp8":
        block = found.int_list("weight_block_size")
        if len(block) != 2 or min(block) < 1:
            raise found.fail("weight_block_size", "is not supported; known: [rows, columns]")
        return Quantization(format="fp8", block=(block[0], block[1]))
    if method == "compressed-tensors":
        return _compressed(found)
    raise found.fail("quant_method", "is not supported; known: fp8, compressed-tensors")


def _compressed(config: JsonConfig) -> Quantization:
    known: dict[str, PackedFormat] = {"mxfp4-pack-quantized": "mxfp4", "pack-quantized": "int4"}
    name = config.text("format")
    if name not in known:
        raise config.fail("format", f"is not supported; known: {', '.join(known)}")
    groups = config.child("config_groups")
    for key in config.mapping("config_groups"):
        weights = groups.child(key).child("weights")
        if weights.integer("num_bits", 4) != 4:
            raise weights.fail("num_bits", "is not supported; known: 4")
        if not weights.flag("symmetric", True):
            raise weights.fail("symmetric", "is not supported; known: true")
        if weights.raw("actorder") is not None:
            raise weights.fail("actorder", "is not supported")
    return Quantization(format=known[name])


def stored_parts(name: str, format: PackedFormat) -> tuple[str, ...]:
    """Names of the tensors a quantised `name` (X.weight) is stored as."""
    stem = name.removesuffix(".weight")
    if format == "fp8":
        return (name, f"{stem}.weight_scale_inv")
    parts = (f"{stem}.weight_packed", f"{stem}.weight_scale")
    return parts if format == "mxfp4" else (*parts, f"{stem}.weight_shape")


def packed_shape(shape: tuple[int, ...], format: PackedFormat) -> tuple[int, ...]:
    """The stored shape of the first of `stored_parts`, for a weight of this shape."""
    per_element = {"fp8": 1, "mxfp4": 2, "int4": 8}[format]
    return (*shape[:-1], -(-shape[-1] // per_element))


def dequantize(name: str, tensors: Mapping[str, Tensor], quantization: Quantization) -> Tensor:
    """The float32 weight [o, i] that `tensors` (by `stored_parts`) stand for.

    Raises:
        ConfigError: their shapes or dtypes do not fit each other.
    """
    parts = [tensors[part] for part in stored_parts(name, quantization.format)]
    match quantization.format:
        case "fp8":
            return _fp8(name, parts[0], parts[1], quantization.block)
        case "mxfp4":
            return _mxfp4(name, parts[0], parts[1])
        case "int4":
            return _int4(name, parts[0], parts[1], parts[2])


def _fp8(name: str, weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    expected = tuple(-(-size // step) for size, step in zip(weight.shape, block, strict=True))
    _require(name, weight.dtype == torch.float8_e4m3fn, f"dtype {weight.dtype}")
    _require(name, tuple(scale.shape) == expected, f"{list(scale.shape)} scales for {block}")
    columns = scale.float().repeat_interleave(block[1], 1)[:, : weight.shape[1]]
    decoded = weight.float()
    for rows, scales in zip(torch.split(decoded, block[0]), columns, strict=True):
        rows.mul_(scales)
    return decoded


def _mxfp4(name: str, packed: Tensor, scale: Tensor) -> Tensor:
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    _require(name, packed.dtype == torch.uint8 == scale.dtype, f"dtype {packed.dtype}")
    shape = [rows, columns // MXFP4_GROUP]
    _require(name, list(scale.shape) == shape, f"{list(scale.shape)} scales, not {shape}")
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=packed.device)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=-1)  # of each byte
    decoded = pairs.index_select(0, packed.reshape(-1).int()).view(rows, -1, MXFP4_GROUP)
    exponent = scale.float().sub_(MXFP4_BIAS)
    return decoded.mul_(torch.exp2(exponent).unsqueeze(-1)).view(rows, columns)


def _int4(name: str, packed: Tensor, scale: Tensor, shape: Tensor) -> Tensor:
    rows, columns = (int(size) for size in shape.tolist())
    _require(name, packed.dtype == torch.int32, f"dtype {packed.dtype}")
    words = -(-columns // 8)
    _require(name, list(packed.shape) == [rows, words], f"shape {list(packed.shape)}")
    groups = scale.shape[1]
    _require(name, columns % groups == 0, f"{groups} scale groups for {columns} columns")
    values = torch.empty((rows, words, 8), device=packed.device)
    for nibble in range(8):
        values[..., nibble] = (packed >> 4 * nibble).bitwise_and_(15)
    decoded = values.view(rows, -1)[:, :columns].sub_(INT4_OFFSET)
    decoded.view(rows, groups, -1).mul_(scale.float().unsqueeze(-1))
    return decoded


def _require(name: str, holds: bool, found: str) -> None:
    if not holds:
        raise ConfigError(f"{name!r}: {found} does not fit its quantisation")
