"""The fla adapter against the torch operations, with fla's own kernels under Triton's interpreter.

Not part of the suite: it needs fla-core and triton, and TRITON_INTERPRET=1 before they come in.
`scripts/check_kernels` runs it in an environment of its own.
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from wavepp.kernels import torch_delta
from wavepp.kernels.api import DeltaInputs
from wavepp.kernels.fla_delta import FlaDelta
from wavepp.kernels.recurrent_plan import RecurrentSlots, StateSpan, plan_states

assert os.environ.get("TRITON_INTERPRET") == "1", "run scripts/check_kernels"
sys.modules.pop("fla", None)  # the suite blocks it

Spanned = tuple[tuple[int, int], RecurrentSlots]

HEADS, DIM = 2, 32
SLOTS = 10
SPANS: tuple[Spanned, ...] = (
    ((0, 96), RecurrentSlots(read_slot=None, write_slot=0, snapshots=((64, 1),))),
    ((130, 30), RecurrentSlots(read_slot=2, write_slot=2)),
    ((64, 64), RecurrentSlots(read_slot=3, write_slot=4, snapshots=((64, 5),))),
    ((300, 1), RecurrentSlots(read_slot=6, write_slot=7)),
)


@pytest.fixture(scope="module")
def fla() -> FlaDelta:
    """The adapter over interpreted kernels: the first configuration instead of the fastest, since
    there is no device to measure on, and loops whose index is a tensor, as compiled ones are."""
    import triton.language as tl
    from triton.runtime import autotuner

    run = autotuner.Autotuner.run

    def first(self, *args, **options):
        if len(self.configs) > 1:
            self.nargs = dict(zip(self.arg_names, args, strict=False))
            self.configs = [self.prune_configs(options)[0]]
        return run(self, *args, **options)

    def tensor_range(*bounds):
        return (tl.to_tensor(i) for i in builtins.range(*(int(bound) for bound in bounds)))

    autotuner.Autotuner.run = first
    from fla.ops.common import chunk_delta_h

    chunk_delta_h.range = tensor_range
    return FlaDelta()


def planned(spans: Sequence[Spanned] = SPANS) -> tuple[StateSpan, ...]:
    return plan_states([extent for extent, _ in spans], [slots for _, slots in spans])


def rows_of(spans: Sequence[Spanned]) -> int:
    return sum(length for (_, length), _ in spans)


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def softplus_gate(raw: Tensor) -> Tensor:
    """Log decay as Kimi Linear has it."""
    return -randn(5, HEADS, 1).exp() * F.softplus(raw)


def bounded_gate(raw: Tensor) -> Tensor:
    """Log decay as Kimi K3 has it."""
    return -5.0 * torch.sigmoid(randn(5, HEADS, 1).exp() * raw)


KDA = [(softplus_gate, DIM, HEADS), (bounded_gate, DIM, HEADS)]
GDN = [(softplus_gate, 1, HEADS), (softplus_gate, 1, 1)]


@pytest.mark.parametrize(("gate", "channels", "key_heads"), [*KDA, *GDN])
def test_delta_rule_equals_torch(fla: FlaDelta, gate, channels: int, key_heads: int) -> None:
    inputs = drawn_inputs(SPANS, gate, (channels, key_heads), torch.float32)
    compare_delta_rule(fla, inputs, SPANS, 2e-5)


@pytest.mark.parametrize(("gate", "channels", "key_heads"), [KDA[1], GDN[1]])
def test_half_inputs_and_float32_gates(fla: FlaDelta, gate, channels: int, key_heads: int) -> None:
    """What models hand over. Not bfloat16: the interpreter multiplies its bits as integers."""
    spans = SPANS[1:2]
    inputs = drawn_inputs(spans, gate, (channels, key_heads), torch.float16)
    compare_delta_rule(fla, inputs, spans, 2e-3)


def drawn_inputs(
    spans: Sequence[Spanned], gate, sizes: tuple[int, int], dtype: torch.dtype
) -> DeltaInputs:
    rows, (channels, key_heads) = rows_of(spans), sizes
    return DeltaInputs(
        q=randn(0, rows, key_heads, DIM).to(dtype),
        k=randn(1, rows, key_heads, DIM).to(dtype),
        v=randn(2, rows, HEADS, DIM).to(dtype),
        log_decay=gate(randn(3, rows, HEADS, channels)),
        beta=torch.sigmoid(randn(4, rows, HEADS)),
    )


@torch.inference_mode()
def compare_delta_rule(
    fla: FlaDelta, inputs: DeltaInputs, spans: Sequence[Spanned], atol: float
) -> None:
    pool = randn(6, SLOTS, HEADS, DIM, DIM)
    ours, expected = pool.clone(), pool.clone()
    result = fla.delta_rule(inputs, ours, planned(spans))
    wanted = torch_delta.delta_rule(inputs, expected, planned(spans))
    torch.testing.assert_close(result, wanted, atol=atol, rtol=0)
    torch.testing.assert_close(ours, expected, atol=atol, rtol=0)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float16, 0.02)])
@torch.inference_mode()
def test_short_convolution_equals_torch(fla: FlaDelta, dtype: torch.dtype, atol: float) -> None:
    rows, width = rows_of(SPANS), 4
    x, weight = randn(0, rows, 24).to(dtype), randn(1, 24, width).to(dtype)
    pool = randn(2, SLOTS, width - 1, 24).to(dtype)
    ours, expected = pool.clone(), pool.clone()
    result = fla.short_conv(x, weight, ours, planned())
    wanted = torch_delta.short_conv(x, weight, expected, planned())
    torch.testing.assert_close(result, wanted, atol=atol, rtol=0)
    assert torch.equal(ours, expected)
