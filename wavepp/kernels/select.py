"""Picks an implementation of every operation, by device; any of them can be overridden.

Also picks the dtype of computation. On CPUs with bf16 tile units (AMX) bf16 products run at many
times the float32 rate; on CPUs without, measured products are slower in bf16 than in float32 (83 to
155 GFLOP/s on one AVX-512 core), so weights are widened once and computation is in float32, while
cache and activations between stages keep the model's dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from wavepp.errors import ConfigError
from wavepp.kernels import torch_attention, torch_delta, torch_dsa, torch_mla, torch_moe, torch_ref
from wavepp.kernels.api import Ops
from wavepp.kernels.fla_delta import FlaDelta
from wavepp.kernels.flashinfer_attention import FlashInferAttention, load_flashinfer


def select_ops(
    device: torch.device,
    overrides: Mapping[str, Callable[..., Any]] | None = None,
    *,
    recurrent: bool = False,
) -> Ops:
    """The operations for `device`, with `overrides` (operation name -> function) on top.

    Args:
        recurrent: the model has recurrent layers.

    Raises:
        ConfigError: the device's kernels are not installed.
        ValueError: an override that names no operation.
    """
    ops = _torch_ops()
    if device.type == "cuda":
        ops = _cuda_ops(ops, device, recurrent=recurrent)
    if not overrides:
        return ops
    known = {field.name for field in dataclasses.fields(Ops)}
    unknown = set(overrides) - known
    if unknown:
        raise ValueError(f"no such operation: {sorted(unknown)}; there are {sorted(known)}")
    return dataclasses.replace(ops, **dict(overrides))


def compute_dtype(stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype a stage computes in, for weights stored in `stored`."""
    if device.type != "cpu" or stored == torch.float32 or _has_tile_units(stored):
        return stored
    return torch.float32


def _has_tile_units(dtype: torch.dtype) -> bool:
    if dtype == torch.float16:
        return bool(torch.cpu._is_amx_fp16_supported())
    return bool(torch.cpu._is_amx_tile_supported())


def _cuda_ops(ops: Ops, device: torch.device, *, recurrent: bool) -> Ops:
    """Torch operations, and kernels of libraries where there are some. Not run on a GPU."""
    try:
        attention = FlashInferAttention(load_flashinfer(), device)
        ops = dataclasses.replace(
            ops, attn_paged=attention.attn_paged, mla_paged=attention.mla_paged
        )
        if recurrent:
            delta = FlaDelta()
            ops = dataclasses.replace(ops, short_conv=delta.short_conv, delta_rule=delta.delta_rule)
    except ImportError as error:
        raise ConfigError(
            f"device cuda: {error.name or error} is not installed: pip install 'wavepp[cuda]'"
        ) from None
    return ops


def _torch_ops() -> Ops:
    return Ops(
        rms_norm=torch_ref.rms_norm,
        rope=torch_ref.rope,
        silu_mul_=torch_ref.silu_mul_,
        gelu_mul_=torch_ref.gelu_mul_,
        situ_mul_=torch_ref.situ_mul_,
        attn_res=torch_ref.attn_res,
        linear=torch_ref.linear,
        linear_add_=torch_ref.linear_add_,
        write_paged=torch_attention.write_paged,
        attn_paged=torch_attention.attn_paged,
        write_rows=torch_mla.write_rows,
        mla_paged=torch_mla.mla_paged,
        dsa_select=torch_dsa.dsa_select,
        dsa_attend=torch_dsa.dsa_attend,
        short_conv=torch_delta.short_conv,
        delta_rule=torch_delta.delta_rule,
        moe=torch_moe.moe,
    )
