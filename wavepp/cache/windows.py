"""The three kinds of windows: what each needs at an endpoint, and where each is usable.

Pure functions over arrays whose index is the block's position on a path; e is an endpoint in
blocks.

    attention    needs every block of [0, e)
    sliding(w)   needs the blocks that cover [eB - w, eB)
    recurrent    needs the one snapshot at e, which hangs on block e - 1; the empty state at 0
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from wavepp.cache.types import BoolArray, CacheConfig, GroupSpec, Prompt, Refusal, ReuseVote

Int64Array = npt.NDArray[np.int64]


def needed(spec: GroupSpec, endpoint: int, block_size: int) -> tuple[int, int]:
    """The range [lowest, highest) of blocks that must be held to resume at `endpoint` (in
    blocks)."""
    assert endpoint >= 0, endpoint
    if spec.kind == "attention":
        return 0, endpoint
    if spec.kind == "recurrent":
        return max(endpoint - 1, 0), endpoint
    assert spec.window is not None
    return max(endpoint * block_size - spec.window, 0) // block_size, endpoint


def _lowest(spec: GroupSpec, count: int, block_size: int) -> Int64Array:
    """`needed(...)[0]` for every endpoint 0..count."""
    endpoints = np.arange(count + 1, dtype=np.int64)
    if spec.kind == "attention":
        return np.zeros(count + 1, dtype=np.int64)
    if spec.kind == "recurrent":
        return np.maximum(endpoints - 1, 0)
    assert spec.window is not None
    return np.maximum(endpoints * block_size - spec.window, 0) // block_size


def usable(spec: GroupSpec, present: BoolArray, block_size: int) -> BoolArray:
    """bool [n + 1]: the endpoints 0..n (in blocks) at which the window could resume, given which
    blocks are held."""
    count = len(present)
    mask: BoolArray = np.ones(count + 1, dtype=np.bool_)
    if spec.kind == "recurrent":
        mask[1:] = present
        return mask
    holes = np.flatnonzero(~present)
    if not len(holes):
        return mask
    if spec.kind == "attention":
        mask[holes[0] + 1 :] = False
        return mask
    last_hole = np.full(count + 1, -1, dtype=np.int64)
    last_hole[holes + 1] = holes
    np.maximum.accumulate(last_hole, out=last_hole)
    return _lowest(spec, count, block_size) > last_hole


def within_floor(spec: GroupSpec, fresh: BoolArray, spare: int, block_size: int) -> BoolArray:
    """bool [n + 1]: the endpoints whose pins would take at most `spare` units out of what is
    available."""
    count = len(fresh)
    if spare >= count:
        return np.ones(count + 1, dtype=np.bool_)
    sums = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(fresh, out=sums[1:])
    lowest = np.minimum(_lowest(spec, count, block_size), np.arange(count + 1))
    return (sums - sums[lowest]) <= spare


def make_vote(specs: Sequence[GroupSpec], masks: Sequence[BoolArray], block_size: int) -> ReuseVote:
    """The vote of a stage from the usable endpoints of each of its windows (all masks equally
    long)."""
    attention: int | None = None
    merged: dict[str, BoolArray] = {}
    for spec, mask in zip(specs, masks, strict=True):
        if spec.kind == "attention":
            highest = int(np.flatnonzero(mask)[-1]) * block_size
            attention = highest if attention is None else min(attention, highest)
        else:
            merged[spec.kind] = merged[spec.kind] & mask if spec.kind in merged else mask
    snapshots = sliding = None
    if "recurrent" in merged:
        points = np.flatnonzero(merged["recurrent"]) * block_size
        snapshots = tuple(points[points > 0].tolist())
    if "sliding" in merged:
        sliding = _ranges(merged["sliding"], block_size)
    return ReuseVote(attention=attention, snapshots=snapshots, sliding=sliding)


def _ranges(mask: BoolArray, block_size: int) -> tuple[tuple[int, int], ...]:
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)) * block_size
    return tuple(
        (int(start), int(end) - block_size)
        for start, end in zip(edges[::2], edges[1::2], strict=True)
    )


def demand(
    spec: GroupSpec, prompt: Prompt, endpoint: int, host_blocks: int, *, caching: bool
) -> int:
    """Units a request needs beyond what its lease pins on the device.

    Args:
        endpoint: in blocks.
        host_blocks: leased blocks that are on the host and must be brought back.
        caching: False: no tail snapshot is kept.
    """
    if spec.paged:
        return prompt.blocks_total - endpoint + host_blocks
    # The leased snapshot keeps a unit of its own until it was copied: with one unit in all there
    # is no other to promise, and the tail's snapshot is elastic like the rest.
    beside_lease = spec.units - (1 if endpoint > 0 else 0)
    takes_tail = caching and beside_lease > 0 and prompt.tail // prompt.block_size > endpoint
    return 1 if takes_tail else 0


def demand_of_all(
    config: CacheConfig, prompt: Prompt, endpoint: int, host_blocks: Sequence[int]
) -> list[int]:
    """`demand` of every group."""
    caching = config.enable_prefix_caching
    return [
        demand(spec, prompt, endpoint, host, caching=caching)
        for spec, host in zip(config.groups, host_blocks, strict=True)
    ]


def never_fits(config: CacheConfig, prompt: Prompt) -> Refusal | None:
    """Why a prompt does not fit into an empty cache; None: it does."""
    demands = demand_of_all(config, prompt, 0, [0] * len(config.groups))
    for spec, units in zip(config.groups, demands, strict=True):
        if units > spec.units:
            return Refusal(reason="never_fits", group=spec.name, needed=units, available=spec.units)
    return None
