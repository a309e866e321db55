"""Mixture of experts against a loop over tokens; activations against their formulas."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from wavepp.kernels import torch_ref
from wavepp.kernels.torch_moe import moe


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def routes(tokens: int, experts: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores = randn(tokens, experts)
    return scores.topk(k).indices, scores.topk(k).values.softmax(-1)


def test_moe_is_the_weighted_sum_over_its_experts():
    x, gate_up, down = randn(23, 8), randn(12, 10, 8), randn(12, 8, 5)
    chosen, weights = routes(23, 12, 3)
    result = moe(x, (chosen, weights), (gate_up, down), torch_ref.silu_mul_)
    for t in range(23):
        expected = torch.zeros(8)
        for e, w in zip(chosen[t].tolist(), weights[t], strict=True):
            gate, up = (gate_up[e] @ x[t]).chunk(2)
            expected += w * (down[e] @ (F.silu(gate) * up))
        torch.testing.assert_close(result[t], expected)


def test_only_experts_that_are_hit_are_read_and_take_a_turn():
    x, gate_up, down = randn(4, 8), randn(300, 10, 8), randn(300, 8, 5)
    chosen = torch.tensor([[7, 250]] * 4)
    weights = torch.full((4, 2), 0.5)
    expected = moe(x, (chosen, weights), (gate_up, down), torch_ref.silu_mul_)
    others = [e for e in range(300) if e not in (7, 250)]
    gate_up[others], down[others] = float("nan"), float("nan")
    turns = []

    def activation(rows: torch.Tensor) -> torch.Tensor:
        turns.append(len(rows))
        return torch_ref.silu_mul_(rows)

    assert torch.equal(moe(x, (chosen, weights), (gate_up, down), activation), expected)
    assert turns == [4, 4]


def test_moe_sums_bfloat16_results_in_float32():
    x, gate_up, down = (randn(*s).bfloat16() for s in ((9, 8), (4, 10, 8), (4, 8, 5)))
    chosen, weights = routes(9, 4, 4)
    result = moe(x, (chosen, weights), (gate_up, down), torch_ref.silu_mul_)
    assert result.dtype == torch.float32
    wide = moe(x.float(), (chosen, weights), (gate_up.float(), down.float()), torch_ref.silu_mul_)
    torch.testing.assert_close(result, wide, atol=0.3, rtol=0.05)


def test_activations_are_their_formulas():
    gate, up = randn(4, 5) * 5, randn(4, 6)[:, :5] * 40
    both = torch.cat([gate, up], 1)
    expected = F.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(torch_ref.gelu_mul_(both.clone()), expected)
    expected = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * (25 * torch.tanh(up / 25))
    torch.testing.assert_close(torch_ref.situ_mul_(both.clone(), 4.0, 25.0), expected)
