"""The fla adapter against the torch operations, with fla's own kernels under Triton's interpreter.

Not part of the suite: it needs fla-core and triton, and TRITON_INTERPRET=1 before they come in.
`scripts/check_kernels` runs it in an environment of its own.
"""

from __future__ import annotations

import builtins
import os
import sys

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

HEADS, DIM = 2, 32
SLOTS = 10
SPANS = (
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


def planned() -> tuple[StateSpan, ...]:
    return plan_states([extent for extent, _ in SPANS], [slots for _, slots in SPANS])


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def softplus_gate(raw: Tensor) -> Tensor:
    """Log decay as Kimi Linear has it."""
    return -randn(5, HEADS, 1).exp() * F.softplus(raw)


def bounded_gate(raw: Tensor) -> Tensor:
    """Log decay as Kimi K3 has it."""
    return -5.0 * torch.sigmoid(randn(5, HEADS, 1).exp() * raw)


@pytest.mark.parametrize(
    ("gate", "channels", "key_heads"),
    [
        (softplus_gate, DIM, HEADS),
        (bounded_gate, DIM, HEADS),
        (softplus_gate, 1, HEADS),
        (softplus_gate, 1, 1),
    ],
)
@torch.inference_mode()
def test_delta_rule_equals_torch(fla: FlaDelta, gate, channels: int, key_heads: int) -> None:
    rows = sum(length for (_, length), _ in SPANS)
    inputs = DeltaInputs(
        q=randn(0, rows, key_heads, DIM),
        k=randn(1, rows, key_heads, DIM),
        v=randn(2, rows, HEADS, DIM),
        log_decay=gate(randn(3, rows, HEADS, channels)),
        beta=torch.sigmoid(randn(4, rows, HEADS)),
    )
    pool = randn(6, SLOTS, HEADS, DIM, DIM)
    ours, expected = pool.clone(), pool.clone()
    result = fla.delta_rule(inputs, ours, planned())
    wanted = torch_delta.delta_rule(inputs, expected, planned())
    torch.testing.assert_close(result, wanted, atol=2e-5, rtol=0)
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=0)


@torch.inference_mode()
def test_short_convolution_equals_torch(fla: FlaDelta) -> None:
    rows, width = sum(length for (_, length), _ in SPANS), 4
    x, weight = randn(0, rows, 24), randn(1, 24, width)
    pool = randn(2, SLOTS, width - 1, 24)
    ours, expected = pool.clone(), pool.clone()
    result = fla.short_conv(x, weight, ours, planned())
    wanted = torch_delta.short_conv(x, weight, expected, planned())
    torch.testing.assert_close(result, wanted, atol=1e-5, rtol=0)
    assert torch.equal(ours, expected)
