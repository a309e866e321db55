"""Sparse attention: choices against sorted scores, attention against a masked softmax."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from wavepp.kernels import torch_dsa, torch_mla
from wavepp.kernels.api import MlaHeads
from wavepp.kernels.attention_plan import plan_attention
from wavepp.kernels.workspace import Workspace

CPU = torch.device("cpu")
BLOCK, TOP_K, HEADS, RANK, ROPE, NOPE, VALUE = 4, 6, 3, 10, 4, 5, 7
EXTENTS = [(0, 3), (4, 9), (30, 5), (12, 1), (0, 20)]


class SparseCase:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        sizes = [start + length for start, length in EXTENTS]
        count = sum(length for _, length in EXTENTS)
        order = list(range(sum(-(-n // BLOCK) for n in sizes)))
        random.Random(0).shuffle(order)
        self.tables = [
            np.array([order.pop() for _ in range(-(-n // BLOCK))], np.int32) for n in sizes
        ]
        self.tables[-1] = np.sort(self.tables[-1])
        blocks = sum(map(len, self.tables))
        self.index_pool = torch.full((blocks, BLOCK, 8), float("nan"))
        self.pool = torch.full((blocks, BLOCK, RANK + ROPE), float("nan"))
        self.index_keys = [randn(n, 8) for n in sizes]
        self.latents = [randn(n, RANK + ROPE) for n in sizes]
        for table, keys, rows in zip(self.tables, self.index_keys, self.latents, strict=True):
            for t in range(len(rows)):
                self.index_pool[int(table[t // BLOCK]), t % BLOCK] = keys[t]
                self.pool[int(table[t // BLOCK]), t % BLOCK] = rows[t]
        # Many heads: with few, scores are often exactly 0 and ties are broken by chance.
        self.index_q, self.weights = randn(count, 32, 8), randn(count, 32)
        self.q = randn(count, HEADS, NOPE + ROPE)
        up = randn(HEADS, NOPE + VALUE, RANK)
        self.heads = MlaHeads(up[:, :NOPE], up[:, NOPE:], 0.3)
        self.plan = plan_attention(
            EXTENTS, self.tables, BLOCK, window=None, top_k=TOP_K, device=CPU
        )

    def choices(self) -> list[set[int]]:
        """The right choice of every row."""
        found, row = [], 0
        for (start, length), keys in zip(EXTENTS, self.index_keys, strict=True):
            for t in range(start, start + length):
                products = (keys[: t + 1] @ self.index_q[row].t()).relu()
                scores = products @ self.weights[row]
                found.append(set(scores.topk(min(TOP_K, t + 1)).indices.tolist()))
                row += 1
        return found


@pytest.mark.parametrize("elements", [1 << 23, 300])
def test_choices_are_the_largest_scores(monkeypatch, elements):
    monkeypatch.setattr(torch_dsa, "TILE_ELEMENTS", elements)
    case = SparseCase()
    queries = (case.index_q, case.weights)
    chosen = torch_dsa.dsa_select(queries, case.index_pool, case.plan, TOP_K, Workspace())
    assert chosen.dtype == torch.int32
    for row, expected in zip(chosen.tolist(), case.choices(), strict=True):
        is_dense = len(expected) < TOP_K or set(row) == {-1}
        assert row == [-1] * TOP_K if is_dense else set(row) == expected
    assert sum(-1 not in row for row in chosen.tolist()) == sum(r.count for r in case.plan.sparse)


@pytest.mark.parametrize("elements", [1 << 23, 200])
def test_dense_and_sparse_rows_together_attend_to_their_choices(monkeypatch, elements):
    monkeypatch.setattr(torch_dsa, "TILE_ELEMENTS", elements)
    case, scratch = SparseCase(), Workspace()
    queries = (case.index_q, case.weights)
    chosen = torch_dsa.dsa_select(queries, case.index_pool, case.plan, TOP_K, scratch)
    pairs = zip(case.latents, EXTENTS, strict=True)
    own = torch.cat([rows[start:] for rows, (start, _) in pairs])
    out = torch_mla.mla_paged((case.q, own), case.heads, case.pool, case.plan, scratch)
    out = torch_dsa.dsa_attend((case.q, chosen), case.heads, case.pool, case.plan, out)
    choices, row = case.choices(), 0
    for (_, length), rows in zip(EXTENTS, case.latents, strict=True):
        for _ in range(length):
            seen = rows[sorted(choices[row])]
            k = torch.einsum("sr,hdr->shd", seen[:, :RANK], case.heads.key_up)
            k = torch.cat([k, seen[:, None, RANK:].expand(-1, HEADS, -1)], -1)
            v = torch.einsum("sr,hdr->shd", seen[:, :RANK], case.heads.value_up)
            weights = (torch.einsum("hd,shd->hs", case.q[row], k) * 0.3).softmax(-1)
            expected = torch.einsum("hs,shd->hd", weights, v).flatten()
            torch.testing.assert_close(out[row], expected, atol=3e-6, rtol=1e-5)
            row += 1


def test_only_rows_beyond_top_k_are_sparse():
    spans = [(rows.start, rows.count) for rows in SparseCase().plan.sparse]
    assert spans == [(6, 7), (30, 5), (12, 1), (6, 14)]
