"""Latent attention, absorbed and expanded, against plain attention over expanded keys."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from wavepp.kernels import torch_mla
from wavepp.kernels.api import MlaHeads
from wavepp.kernels.attention_plan import plan_attention
from wavepp.kernels.workspace import Workspace

CPU = torch.device("cpu")
BLOCK, HEADS, RANK, NOPE, ROPE = 4, 3, 10, 6, 4
EXTENTS = [(0, 9), (30, 7), (31, 1), (5, 1), (17, 20), (0, 1)]


class LatentCase:
    """Sequences of latents over shuffled blocks; what is not theirs is NaN."""

    def __init__(self, extents: list[tuple[int, int]], value_dim: int) -> None:
        generator = torch.Generator().manual_seed(value_dim)
        self.extents = extents
        up = torch.randn(HEADS, NOPE + value_dim, RANK, generator=generator)
        self.heads = MlaHeads(up[:, :NOPE], up[:, NOPE:], (NOPE + ROPE) ** -0.5)
        sizes = [start + length for start, length in extents]
        self.latents = [torch.randn(n, RANK + ROPE, generator=generator) for n in sizes]
        count = sum(length for _, length in extents)
        self.q = torch.randn(count, HEADS, NOPE + ROPE, generator=generator)
        order = list(range(sum(-(-n // BLOCK) for n in sizes) + 2))
        random.Random(0).shuffle(order)
        self.tables = [
            np.array([order.pop() for _ in range(-(-n // BLOCK))], np.int32) for n in sizes
        ]
        self.pool = torch.full((len(order) + sum(map(len, self.tables)), BLOCK, RANK + ROPE), 1.0)
        self.pool.fill_(float("nan"))
        for table, rows in zip(self.tables, self.latents, strict=True):
            for t, row in enumerate(rows):
                self.pool[int(table[t // BLOCK]), t % BLOCK] = row

    @property
    def own(self) -> Tensor:
        pairs = zip(self.latents, self.extents, strict=True)
        return torch.cat([rows[start:] for rows, (start, _) in pairs])

    def run(self) -> Tensor:
        plan = plan_attention(self.extents, self.tables, BLOCK, window=None, device=CPU)
        own = self.own
        torch_mla.write_rows(self.pool, own, plan)
        return torch_mla.mla_paged((self.q, own), self.heads, self.pool, plan, Workspace())

    def expected(self) -> Tensor:
        results, row = [], 0
        for rows, (start, length) in zip(self.latents, self.extents, strict=True):
            k = torch.einsum("sr,hdr->shd", rows[:, :RANK], self.heads.key_up)
            k = torch.cat([k, rows[:, None, RANK:].expand(-1, HEADS, -1)], -1)
            v = torch.einsum("sr,hdr->shd", rows[:, :RANK], self.heads.value_up)
            scores = torch.einsum("lhd,shd->hls", self.q[row : row + length], k) * self.heads.scale
            late = torch.arange(len(rows))[None] > torch.arange(start, start + length)[:, None]
            weights = scores.masked_fill(late, float("-inf")).softmax(-1)
            results.append(torch.einsum("hls,shd->lhd", weights, v).flatten(1))
            row += length
        return torch.cat(results)


@pytest.mark.parametrize("value_dim", [5, 10, 16])
@pytest.mark.parametrize("absorbed", [True, False])
@pytest.mark.parametrize("keys", [8, 1000])
def test_both_ways_equal_plain_attention(monkeypatch, value_dim, absorbed, keys):
    monkeypatch.setattr(torch_mla, "is_absorbing_cheaper", lambda *_: absorbed)
    monkeypatch.setattr(torch_mla, "PREFIX_KEYS", keys)
    monkeypatch.setattr(torch_mla, "EXPANDED_MAX", keys * 40)
    case = LatentCase(EXTENTS, value_dim)
    torch.testing.assert_close(case.run(), case.expected(), atol=5e-6, rtol=1e-5)


def test_one_token_absorbs_and_a_long_span_expands():
    heads = MlaHeads(torch.empty(64, 128, 512), torch.empty(64, 128, 512), 1.0)
    assert torch_mla.is_absorbing_cheaper(1, 5000, heads, 576)
    assert torch_mla.is_absorbing_cheaper(64, 100_000, heads, 576)
    assert not torch_mla.is_absorbing_cheaper(4096, 100_000, heads, 576)
    assert not torch_mla.is_absorbing_cheaper(4096, 64, heads, 576)
