"""Rotary frequencies and the per-wave tables of cosines and sines.

Sources: RoFormer (default), position interpolation (linear), Llama 3.1 (llama3), YaRN (yarn).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wavepp.models.mixer_specs import RopeSpec

CosSin = tuple[Tensor, Tensor]


def inverse_frequencies(rope: RopeSpec) -> Tensor:
    """Radians per position of each rotated pair: float32 [rotary_dim / 2]."""
    steps = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    wave_lengths = rope.theta**steps  # over 2 pi
    plain = 1.0 / wave_lengths
    match rope.kind:
        case "default":
            return plain
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3(rope, plain)
        case "yarn":
            return _yarn(rope, wave_lengths)


def cos_sin(rope: RopeSpec, frequencies: Tensor, positions: Tensor, dtype: torch.dtype) -> CosSin:
    """Cosines and sines [T, 1, rotary_dim / 2] at positions [T], scaled as the rope says."""
    angles = torch.outer(positions.float(), frequencies).unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    if rope.attention_factor != 1.0:
        cos.mul_(rope.attention_factor)
        sin.mul_(rope.attention_factor)
    return cos.to(dtype), sin.to(dtype)


def _llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between interpolated."""
    context = rope.original_max_positions
    lengths = 2 * math.pi / plain
    stretched = plain / rope.factor
    spread = rope.high_freq_factor - rope.low_freq_factor
    smooth = (context / lengths - rope.low_freq_factor) / spread
    between = (1 - smooth) * stretched + smooth * plain
    result = torch.where(lengths > context / rope.low_freq_factor, stretched, plain)
    is_short = lengths < context / rope.high_freq_factor
    is_long = lengths > context / rope.low_freq_factor
    return torch.where(~is_short & ~is_long, between, result)


def _yarn(rope: RopeSpec, wave_lengths: Tensor) -> Tensor:
    """Blend of interpolated and plain frequencies, by how often a pair turns over the context."""
    dim = rope.rotary_dim

    def turns_to_dim(turns: float) -> float:
        ratio = rope.original_max_positions / (turns * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = turns_to_dim(rope.beta_fast), turns_to_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return (1.0 / (rope.factor * wave_lengths)) * (1 - keep) + (1.0 / wave_lengths) * keep


def pairs_to_halves_(rows: Tensor, dim: int) -> None:
    """Reorders x0 x1 x2 x3 ... along `dim` to x0 x2 ... x1 x3 ..., in place."""
    size = rows.shape[dim]
    order = torch.arange(size, device=rows.device).view(-1, 2).t().reshape(-1)
    rows.copy_(rows.index_select(dim, order))
