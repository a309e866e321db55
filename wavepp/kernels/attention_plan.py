"""Which attention calls a wave needs: few batches of spans, and never a [T, context] mask.

Every span is cut by what its tokens may see:

    full      a token sees all before it: causal over the span itself, unmasked over the cached
              prefix; the two are merged by their log-sum-exp. Without a prefix there is no merge.
              A span of one token is its own prefix's last: one unmasked call.
    banded    (sliding window w, positions >= w) a token sees exactly w keys: tiles of queries over
              their own stretch of keys, one small band mask for all tiles.
    sparse    (top_k, positions >= top_k) a token sees chosen keys only: named, not planned.

Spans of like shape share one call; padded rows repeat a real one and their results are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

PADDING_MAX = 1.25  # padded work a batch may have, relative to its real work
PADDING_FREE = 4096.0  # score elements that cost less than a call of their own
BAND_TILE_MIN = 64
BAND_TILE_MAX = 256


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a flat [R, ...] tensor: a contiguous run, or an index with the given shape."""

    begin: int
    count: int
    index: Tensor | None

    def take(self, flat: Tensor) -> Tensor:
        """[count, ...]: a view of a run, a copy otherwise."""
        if self.index is None:
            return flat[self.begin : self.begin + self.count]
        return flat.index_select(0, self.index)


@dataclass(frozen=True, slots=True)
class Prefix:
    """Cached keys of a batch: N sequences of S slots each, padded if their lengths differ."""

    slots: Rows
    size: int
    mask: Tensor | None  # bool [N, 1, 1, S], True where a key is real; None: all are

    def slots_of(self, count: int, begin: int, end: int) -> Rows:
        """Slots of keys [begin, end) of each of the `count` sequences."""
        if end - begin == self.size:
            return self.slots
        if self.slots.index is None:
            assert count == 1, "only a single sequence's slots may be a run"
            return Rows(self.slots.begin + begin, end - begin, None)
        index = self.slots.index.view(count, self.size)[:, begin:end].reshape(-1)
        return Rows(0, len(index), index)


@dataclass(frozen=True, slots=True)
class SpanBatch:
    """N spans of L rows each. `chunk`: causal among themselves. `keep`: flat rows that are real.

    `out_rows`/`keep` are None when rows are one run without padding: results go straight back.
    """

    size: int
    length: int
    rows: Rows
    chunk: bool
    prefix: Prefix | None
    keep: Tensor | None
    out_rows: Tensor | None


@dataclass(frozen=True, slots=True)
class BandBatch:
    """`tiles` query tiles of `tile` rows from flat row `begin`; keys: window - 1 + rows slots."""

    begin: int
    tile: int
    tiles: int
    window: int
    keys: Rows


@dataclass(frozen=True, slots=True)
class SparseRows:
    """`count` flat rows from `row` at positions [start, ...); keys: slots of positions 0 .. end."""

    row: int
    start: int
    count: int
    keys: Rows


@dataclass(frozen=True, slots=True)
class PagedSpans:
    """The spans as they were given, for kernels that read block tables themselves.

    Attributes:
        extents: (start, length) of every span.
        tables: block ids of every span; block i of it holds tokens [iB, (i+1)B).
        window: sliding window in tokens; None sees everything.
    """

    extents: tuple[tuple[int, int], ...]
    tables: tuple[Int32Array, ...]
    block_size: int
    window: int | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One cache group's part of a wave: the slot each row is written to, and the calls to make."""

    spans: PagedSpans
    slots: Rows
    batches: tuple[SpanBatch, ...]
    bands: tuple[BandBatch, ...]
    sparse: tuple[SparseRows, ...] = ()


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows [row, row + length) at positions [start, ...), with the slots of all keys before."""

    row: int
    start: int
    length: int
    table: Int32Array

    @property
    def is_single(self) -> bool:
        return self.length == 1

    @property
    def prefix_size(self) -> int:
        """Cached keys; a single row is written before it attends, so it counts itself."""
        return self.start + 1 if self.is_single else self.start


def plan_attention(
    extents: Sequence[tuple[int, int]],
    tables: Sequence[Int32Array],
    block_size: int,
    *,
    window: int | None,
    top_k: int | None = None,
    device: torch.device,
) -> AttentionPlan:
    """The plan of one group.

    Args:
        extents: (start, length) of every span, in flat row order.
        tables: block ids of every span; block i of it holds tokens [iB, (i+1)B).
        window: sliding window in tokens; None sees everything.
        top_k: keys that sparse attention chooses; not with a window.
    """
    assert window is None or top_k is None
    limit = top_k if window is None else window
    pieces: list[_Piece] = []
    bands: list[BandBatch] = []
    sparse: list[SparseRows] = []
    written: list[Int64Array] = []
    row = 0
    for (start, length), table in zip(extents, tables, strict=True):
        assert len(table) * block_size >= start + length, (len(table), start, length)
        end = start + length
        written.append(_slots(table, start, end, block_size))
        full_end = end if limit is None else max(start, min(end, limit))
        if full_end > start:
            pieces.append(_Piece(row, start, full_end - start, table))
        at = row + full_end - start
        if full_end < end and window is None:
            keys = _rows(_slots(table, 0, end, block_size), device)
            sparse.append(SparseRows(at, full_end, end - full_end, keys))
        elif full_end < end:
            assert window is not None
            bands.extend(_bands(at, full_end, end, (window, block_size), table, device=device))
        row += length
    batches = [_batch(group, block_size, device) for group in _gather(pieces)]
    return AttentionPlan(
        PagedSpans(tuple(extents), tuple(tables), block_size, window),
        _rows(np.concatenate(written), device),
        tuple(batches),
        tuple(bands),
        tuple(sparse),
    )


def _slots(table: Int32Array, begin: int, end: int, block_size: int) -> Int64Array:
    """Cache slots of tokens [begin, end) of one sequence."""
    first, last = begin // block_size, -(-end // block_size)
    blocks = table[first:last].astype(np.int64) * block_size
    slots: Int64Array = (blocks[:, None] + np.arange(block_size)).reshape(-1)
    return slots[begin - first * block_size : end - first * block_size]


def _rows(index: Int64Array, device: torch.device) -> Rows:
    """A run where the index is one, which saves the copy."""
    count = len(index)
    begin = int(index[0])
    if int(index[-1]) - begin == count - 1 and bool(np.all(np.diff(index) == 1)):
        return Rows(begin, count, None)
    return Rows(begin, count, torch.from_numpy(index).to(device))


def _gather(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """Groups of pieces that share a call, greedily along like shapes."""
    groups: list[list[_Piece]] = []
    order = sorted(pieces, key=lambda p: (p.is_single, p.prefix_size > 0, p.length, p.prefix_size))
    real = 0.0
    longest = prefix = 0
    for piece in order:
        work = _work(1, piece.length, piece.prefix_size)
        if groups and _alike(groups[-1][0], piece):
            longest_then = max(longest, piece.length)
            prefix_then = max(prefix, piece.prefix_size)
            padded = _work(len(groups[-1]) + 1, longest_then, prefix_then)
            if padded <= PADDING_MAX * (real + work) + PADDING_FREE:
                groups[-1].append(piece)
                real, longest, prefix = real + work, longest_then, prefix_then
                continue
        groups.append([piece])
        real, longest, prefix = work, piece.length, piece.prefix_size
    return [sorted(group, key=lambda p: p.row) for group in groups]


def _alike(one: _Piece, other: _Piece) -> bool:
    same_kind = one.is_single == other.is_single
    return same_kind and (one.prefix_size > 0) == (other.prefix_size > 0)


def _work(count: int, length: int, prefix: int) -> float:
    """Score elements of a padded batch."""
    return count * length * (length / 2 + prefix)


def _batch(pieces: list[_Piece], block_size: int, device: torch.device) -> SpanBatch:
    """Rows, padding and cached keys of pieces that share a call."""
    length = max(piece.length for piece in pieces)
    lengths = np.array([piece.length for piece in pieces])
    first = np.array([piece.row for piece in pieces], dtype=np.int64)
    offsets = np.minimum(np.arange(length)[None, :], lengths[:, None] - 1)
    rows = _rows((first[:, None] + offsets).reshape(-1), device)
    keep = out_rows = None
    if rows.index is not None:
        real = (np.arange(length)[None, :] < lengths[:, None]).reshape(-1)
        out_rows = rows.index
        if not real.all():
            keep = torch.from_numpy(np.flatnonzero(real)).to(device)
            out_rows = rows.index.index_select(0, keep)
    single = pieces[0].is_single
    prefix = _prefix(pieces, block_size, device) if pieces[0].prefix_size else None
    return SpanBatch(len(pieces), length, rows, not single, prefix, keep, out_rows)


def _prefix(pieces: list[_Piece], block_size: int, device: torch.device) -> Prefix:
    """Cached keys of pieces, padded with each sequence's own first slot."""
    sizes = np.array([piece.prefix_size for piece in pieces])
    size = int(sizes.max())
    index = np.empty((len(pieces), size), dtype=np.int64)
    for i, piece in enumerate(pieces):
        slots = _slots(piece.table, 0, piece.prefix_size, block_size)
        index[i, : len(slots)] = slots
        index[i, len(slots) :] = slots[0]
    mask = None
    if (sizes != size).any():
        real = np.arange(size)[None, :] < sizes[:, None]
        mask = torch.from_numpy(real).to(device)[:, None, None, :]
    flat = index.reshape(-1)
    if len(pieces) == 1:
        return Prefix(_rows(flat, device), size, mask)
    # Several sequences keep their index even if it is one run: parts of it are taken per sequence.
    return Prefix(Rows(0, len(flat), torch.from_numpy(flat).to(device)), size, mask)


def _bands(
    row: int,
    begin: int,
    end: int,
    shape: tuple[int, int],
    table: Int32Array,
    *,
    device: torch.device,
) -> list[BandBatch]:
    """Tiles over positions [begin, end), none below the window: whole tiles, then the rest."""
    window, block_size = shape
    assert begin >= window, (begin, window)
    tile = min(end - begin, max(BAND_TILE_MIN, min(window, BAND_TILE_MAX)))
    tiles = (end - begin) // tile
    cuts = [(begin, tile, tiles)]
    rest = (end - begin) - tile * tiles
    if rest:
        cuts.append((begin + tile * tiles, rest, 1))
    bands = []
    for first, size, count in cuts:
        keys = _slots(table, first - window + 1, first + size * count, block_size)
        bands.append(BandBatch(row + first - begin, size, count, window, _rows(keys, device)))
    return bands
