"""Paged attention against the plain formula, and the shape of its plans."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from wavepp.kernels.attention_plan import PADDING_FREE, plan_attention
from wavepp.kernels.torch_attention import (
    attend,
    attend_tiled,
    attn_paged,
    merge,
    write_paged,
)
from wavepp.kernels.workspace import Workspace

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 8, 4


def plain_attention(q: Tensor, k: Tensor, v: Tensor, first: int, window: int | None) -> Tensor:
    """Softmax over whole score rows: q [L, H, D] at positions first.., k and v [S, K, D] from 0."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1).double() for x in (k, v))
    scores = torch.einsum("lhd,shd->hls", q.double(), k) * q.shape[-1] ** -0.5
    at = torch.arange(first, first + q.shape[0])[:, None]
    key = torch.arange(k.shape[0])[None, :]
    seen = key <= at
    if window is not None:
        seen &= key > at - window
    scores = scores.masked_fill(~seen, float("-inf"))
    return torch.einsum("hls,shd->lhd", scores.softmax(-1), v).float().flatten(1)


class PagedCase:
    """Random spans over shuffled blocks; whatever is not part of a sequence is NaN."""

    def __init__(self, extents: list[tuple[int, int]], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.extents = extents
        counts = [-(-(start + length) // BLOCK) for start, length in extents]
        order = list(range(sum(counts) + 3))
        random.Random(seed).shuffle(order)
        self.tables = [np.array([order.pop() for _ in range(n)], dtype=np.int32) for n in counts]
        shape = (sum(counts) + 3, BLOCK, KV_HEADS, DIM)
        self.pools = (torch.full(shape, float("nan")), torch.full(shape, float("nan")))
        self.keys, self.values = [], []
        rows = sum(length for _, length in extents)
        self.q = torch.randn(rows, HEADS, DIM, generator=generator)
        for (start, length), table in zip(extents, self.tables, strict=True):
            k = torch.randn(start + length, KV_HEADS, DIM, generator=generator)
            v = torch.randn(start + length, KV_HEADS, DIM, generator=generator)
            self.keys.append(k)
            self.values.append(v)
            for t in range(start):
                block = int(table[t // BLOCK])
                self.pools[0][block, t % BLOCK] = k[t]
                self.pools[1][block, t % BLOCK] = v[t]
        pairs = list(zip(extents, self.keys, self.values, strict=True))
        self.k = torch.cat([k[start:] for (start, _), k, _ in pairs])
        self.v = torch.cat([v[start:] for (start, _), _, v in pairs])

    def run(self, window: int | None) -> Tensor:
        plan = plan_attention(self.extents, self.tables, BLOCK, window=window, device=CPU)
        write_paged(self.pools, self.k, self.v, plan)
        qkv = (self.q, self.k, self.v)
        return attn_paged(qkv, self.pools, plan, DIM**-0.5, Workspace())

    def expected(self, window: int | None) -> Tensor:
        results, row = [], 0
        pairs = zip(self.extents, self.keys, self.values, strict=True)
        for (start, length), k, v in pairs:
            results.append(plain_attention(self.q[row : row + length], k, v, start, window))
            row += length
        return torch.cat(results)


@pytest.mark.parametrize("window", [None, 1, 2, 7, 64, 500])
@pytest.mark.parametrize("seed", range(6))
def test_attn_paged_equals_plain_softmax(window, seed):
    rng = random.Random(seed)
    lengths = [rng.choice([1, 1, 2, 3, 9, 30, 130]) for _ in range(rng.randint(1, 9))]
    extents = [(rng.choice([0, 0, 1, 4, 31, 150]), length) for length in lengths]
    case = PagedCase(extents, seed)
    torch.testing.assert_close(case.run(window), case.expected(window), atol=2e-6, rtol=1e-5)


def test_long_prefix_is_copied_in_pieces(monkeypatch):
    monkeypatch.setattr("wavepp.kernels.torch_attention.PREFIX_KEYS", 16)
    case = PagedCase([(50, 20), (70, 20), (3, 1)])
    torch.testing.assert_close(case.run(None), case.expected(None), atol=2e-6, rtol=1e-5)


def test_long_prefixes_in_adjacent_blocks_are_read_in_pieces(monkeypatch):
    monkeypatch.setattr("wavepp.kernels.torch_attention.PREFIX_KEYS", 24)
    case = PagedCase([(32, 4), (32, 4)])
    blocks = torch.from_numpy(np.concatenate(case.tables)).long()
    moved = torch.tensor([*range(8), 16, *range(8, 16), 17])
    for pool in case.pools:
        pool[moved] = pool[blocks]
    case.tables = [part.numpy().astype(np.int32) for part in moved.split(9)]
    torch.testing.assert_close(case.run(None), case.expected(None), atol=2e-6, rtol=1e-5)


def test_write_paged_puts_rows_where_the_tables_say():
    case = PagedCase([(3, 6), (0, 5)])
    case.run(None)
    for (start, length), table, k in zip(case.extents, case.tables, case.keys, strict=True):
        stored = case.pools[0][torch.from_numpy(table).long()].flatten(0, 1)
        torch.testing.assert_close(stored[: start + length], k, atol=0, rtol=0)
    assert int(case.pools[0].isnan().any(-1).any(-1).logical_not().sum()) == 9 + 5


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("tile", [1, 7, 1 << 24])
def test_attend_equals_its_tiled_form(monkeypatch, causal, tile):
    monkeypatch.setattr("wavepp.kernels.torch_attention.SCORES_MAX", tile * 2 * HEADS * 40)
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 40, HEADS, DIM, generator=generator)
    k, v = (torch.randn(2, 40, KV_HEADS, DIM, generator=generator) for _ in "kv")
    mask = None
    if not causal:
        mask = torch.rand(2, 1, 1, 40, generator=generator) < 0.7
        mask[..., 0] = True
    fused = attend(q, k, v, causal=causal, mask=mask, scale=0.3)
    tiled = attend_tiled(q, k, v, causal=causal, mask=mask, scale=0.3)
    torch.testing.assert_close(fused[0], tiled[0], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(fused[1], tiled[1], atol=2e-6, rtol=1e-5)


def test_merge_of_key_halves_is_the_whole():
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(1, 5, HEADS, DIM, generator=generator)
    k, v = (torch.randn(1, 30, KV_HEADS, DIM, generator=generator) for _ in "kv")
    parts = [
        attend(q, k[:, at], v[:, at], causal=False, mask=None, scale=0.3)
        for at in (slice(0, 11), slice(11, 30))
    ]
    whole = attend(q, k, v, causal=False, mask=None, scale=0.3)
    for merged, expected in zip(merge(*parts), whole, strict=True):
        torch.testing.assert_close(merged, expected, atol=2e-6, rtol=1e-5)


def plan_of(extents: list[tuple[int, int]], window: int | None = None, block: int = 64):
    tables, free = [], 0
    for start, length in extents:
        count = -(-(start + length) // block)
        tables.append(np.arange(free, free + 2 * count, 2, dtype=np.int32))
        free += 2 * count
    return plan_attention(extents, tables, block, window=window, device=CPU)


def test_equal_short_spans_are_one_call():
    assert len(plan_of([(0, 64)] * 32).batches) == 1
    assert len(plan_of([(640, 1)] * 16).batches) == 1
    assert len(plan_of([(1024, 128)] * 8).batches) == 1


def test_nearly_equal_spans_are_few_calls_and_little_padding():
    rng = random.Random(0)
    extents = [(0, rng.randint(40, 60)) for _ in range(40)]
    plan = plan_of(extents)
    assert len(plan.batches) <= 3
    padded = sum(batch.size * batch.length**2 / 2 for batch in plan.batches)
    real = sum(length**2 / 2 for _, length in extents)
    assert padded <= 1.25 * real + len(plan.batches) * PADDING_FREE


def test_unlike_spans_do_not_share_a_call():
    assert len(plan_of([(0, 2000), (0, 30), (4096, 512)]).batches) == 3


def test_adjacent_blocks_are_read_without_a_copy():
    table = np.arange(5, 40, dtype=np.int32)
    plan = plan_attention([(1024, 256)], [table], 64, window=None, device=CPU)
    assert plan.slots.index is None
    assert plan.batches[0].prefix is not None
    assert plan.batches[0].prefix.slots.index is None


@pytest.mark.parametrize("window", [None, 512])
def test_no_mask_grows_with_tokens_times_context(window):
    """A plan for 2,048 tokens after 30,000 holds far less than a [T, context] mask."""
    plan = plan_of([(30000, 2048), (100, 7)], window)
    masks = [b.prefix.mask for b in plan.batches if b.prefix and b.prefix.mask is not None]
    assert sum(mask.numel() for mask in masks) == 0
    for band in plan.bands:
        assert band.tile * (band.tile + band.window) <= 256 * (256 + 512)
    slots = sum(b.prefix.slots.count for b in plan.batches if b.prefix)
    slots += sum(band.keys.count for band in plan.bands)
    assert slots <= (32148 if window is None else 2048 + 3 * 512 + 107)


def test_sliding_plan_never_names_blocks_before_the_window():
    table = np.full(40, -(10**6), dtype=np.int32)
    table[-5:] = [3, 9, 1, 7, 4]  # positions 2240..2559; the window reaches back 100 tokens
    plan = plan_attention([(2400, 150)], [table], 64, window=100, device=CPU)
    assert plan.batches == ()
    for band in plan.bands:
        assert band.keys.index is not None
        assert int(band.keys.index.min()) >= 0


def test_short_table_is_a_broken_contract():
    with pytest.raises(AssertionError):
        plan_attention([(60, 10)], [np.zeros(1, dtype=np.int32)], 64, window=None, device=CPU)
