"""Norm, rope, activation and products against their formulas; choice of implementations."""

from __future__ import annotations

import pytest
import torch

from wavepp.kernels import torch_ref
from wavepp.kernels.select import compute_dtype, select_ops
from wavepp.kernels.workspace import Workspace

CPU = torch.device("cpu")


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", [(5, 64), (5, 6, 16)])
def test_rms_norm_is_its_formula(shape):
    x, weight = randn(*shape), randn(*shape[1:])
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(torch_ref.rms_norm(x, weight, 1e-5), expected)


def test_rms_norm_of_bfloat16_reduces_in_float32():
    x, weight = randn(3, 512).bfloat16(), torch.ones(512, dtype=torch.bfloat16)
    expected = x.float() / (x.float().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(
        torch_ref.rms_norm(x, weight, 1e-6).float(), expected, atol=0.02, rtol=0.01
    )


def test_rope_turns_pairs_and_leaves_the_rest():
    x, angles = randn(7, 3, 12), randn(7, 1, 4)
    result = torch_ref.rope(x, angles.cos(), angles.sin())
    low, high = x[..., :4], x[..., 4:8]
    pairs = torch.complex(low, high) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(result[..., :4], pairs.real)
    torch.testing.assert_close(result[..., 4:8], pairs.imag)
    assert torch.equal(result[..., 8:], x[..., 8:])


def test_rope_reads_strided_rows_and_writes_out():
    wide, angles = randn(5, 8, 4), randn(5, 1, 2)
    out = torch.empty(5, 3, 4)
    result = torch_ref.rope(wide[:, :3], angles.cos(), angles.sin(), out)
    assert result.data_ptr() == out.data_ptr()
    expected = torch_ref.rope(wide[:, :3].contiguous(), angles.cos(), angles.sin())
    torch.testing.assert_close(result, expected)


def test_silu_mul_is_its_formula():
    gate_up = randn(4, 10)
    gate, up = gate_up[:, :5].clone(), gate_up[:, 5:].clone()
    expected = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(torch_ref.silu_mul_(gate_up), expected)


@pytest.mark.parametrize("with_bias", [True, False])
def test_products_are_their_formulas(with_bias):
    x, weight, residual = randn(4, 6), randn(5, 6), randn(4, 5)
    bias = randn(5) if with_bias else None
    expected = x @ weight.T + (0 if bias is None else bias)
    torch.testing.assert_close(torch_ref.linear(x, weight, bias), expected)
    out = torch.empty(4, 5)
    assert torch_ref.linear(x, weight, bias, out).data_ptr() == out.data_ptr()
    torch.testing.assert_close(out, expected)
    total = torch_ref.linear_add_(residual.clone(), x, weight, bias)
    torch.testing.assert_close(total, residual + expected)


def test_override_replaces_one_operation():
    def shouting(x, weight, eps, out):
        return x

    ops = select_ops(CPU, {"rms_norm": shouting})
    assert ops.rms_norm is shouting
    assert ops.rope is select_ops(CPU).rope


def test_override_of_nothing_is_refused():
    with pytest.raises(ValueError, match="rms_morn"):
        select_ops(CPU, {"rms_morn": torch_ref.rms_norm})


def test_float32_is_computed_in_float32():
    assert compute_dtype(torch.float32, CPU) == torch.float32


@pytest.mark.parametrize("has_tiles", [True, False])
def test_bfloat16_is_widened_only_without_tile_units(monkeypatch, has_tiles):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_tiles)
    expected = torch.bfloat16 if has_tiles else torch.float32
    assert compute_dtype(torch.bfloat16, CPU) == expected
    assert compute_dtype(torch.bfloat16, torch.device("cuda")) == torch.bfloat16


def test_workspace_grows_and_is_reused():
    workspace, like = Workspace(), torch.empty(0)
    first = workspace.empty("a", (3, 4), like)
    assert workspace.empty("a", (2, 5), like).data_ptr() == first.data_ptr()
    assert workspace.empty("b", (3, 4), like).data_ptr() != first.data_ptr()
    assert workspace.empty("a", (6, 4), like).shape == (6, 4)
    assert workspace.nbytes == (24 + 12) * 4
