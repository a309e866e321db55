"""Mixture of experts in torch: rows sorted by expert, two products per expert that is hit.

    chosen [T, k] -> sorted by expert:  | e0 e0 | e3 e3 e3 | e7 |      segments of token rows
                                          2 products each, added to their tokens' rows

An expert nobody chose costs nothing, and no intermediate is larger than one expert's segment.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wavepp.kernels.api import Experts, Glu, Routes


def moe(x: Tensor, routes: Routes, experts: Experts, activation: Glu) -> Tensor:
    """sum over a token's experts e of weight_e * down_e(act(gate_up_e(x))), float32 [T, H].

    Experts are added in ascending order, so a token's sum does not depend on its wave.

    Args:
        x: [T, H].
        routes: chosen experts int64 [T, k] and weights float32 [T, k].
        experts: gate and up rows [E, 2I, H], down [E, H, I].
        activation: of gate and up, [R, 2I] -> [R, I].
    """
    chosen, weights = routes
    gate_up, down = experts
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    flat = chosen.reshape(-1)
    order = torch.argsort(flat, stable=True)
    tokens = torch.div(order, chosen.shape[1], rounding_mode="floor")
    sorted_weights = weights.reshape(-1).index_select(0, order).unsqueeze(1)
    hit, counts = torch.unique_consecutive(flat.index_select(0, order), return_counts=True)
    begin = 0
    for expert, count in zip(hit.tolist(), counts.tolist(), strict=True):
        rows = tokens[begin : begin + count]
        inner = activation(torch.mm(x.index_select(0, rows), gate_up[expert].t()))
        result = torch.mm(inner, down[expert].t()).float()
        total.index_add_(0, rows, result.mul_(sorted_weights[begin : begin + count]))
        begin += count
    return total
