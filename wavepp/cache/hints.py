"""HintIndex: (window, key) -> count, so that a queued request learns what could be reused without
touching the tree.

Owns no block. Changed only when the tree changes: +1 when a block is attached, -1 when it is
detached (a little later, outside the tree mutex), gone at 0. Moving a block between device and host
changes nothing here. Sharded by the first key of the path, so one look-up takes one shard's lock
once, and so does one change. The locks are handed in. Paper, section on admission (reuse hints).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice, repeat
from typing import Any

import numpy as np

from wavepp.cache.types import BoolArray, GroupSpec, Prompt, ReuseVote
from wavepp.cache.windows import make_vote, usable

Locks = Sequence[AbstractContextManager[Any]]

GALLOP = 8
"""Each probe on the way to the first miss goes so many times deeper than the one before."""


class HintIndex:
    """Counts of keys for each window.

    Args:
        specs: the stage's groups.
        shards: a power of two.
        locks: one context manager a shard; None: none needed.
    """

    def __init__(self, specs: Sequence[GroupSpec], shards: int, locks: Locks | None = None) -> None:
        assert shards & (shards - 1) == 0, shards
        assert locks is None or len(locks) == shards, "one lock a shard"
        self._specs = tuple(specs)
        self._groups = range(len(self._specs))
        self._mask = shards - 1
        self._all_attention = bool(specs) and all(spec.kind == "attention" for spec in specs)
        self._locks = tuple(locks) if locks is not None else (nullcontext(),) * shards
        self._tables: list[list[dict[bytes, int]]] = [
            [{} for _ in self._specs] for _ in range(shards)
        ]
        self._owed: deque[tuple[int, int, list[bytes]]] = deque()
        self.version = 0

    def shard_of(self, first_key: bytes) -> int:
        """The shard of every path that starts with this key."""
        return first_key[0] & self._mask

    def add(self, shard: int, group: int, keys: list[bytes]) -> None:
        """Counts attached blocks of one path."""
        if not keys:
            return
        table = self._tables[shard][group]
        with self._locks[shard]:
            known = len(table)
            deque(map(table.setdefault, keys, repeat(1)), maxlen=0)
            if len(table) - known != len(keys):
                _count_again(table, keys, len(table) - known)
            self.version += 1

    def remove_later(self, shard: int, group: int, keys: list[bytes]) -> None:
        """Uncounts detached blocks of one path when `settle` is called.

        Thousands of keys take as long as all else that eviction does, and a hint may be stale: so
        the tree mutex need not be held for it.
        """
        self._owed.append((shard, group, keys))

    def settle(self) -> None:
        """Uncounts what was detached. Needs no tree mutex."""
        while self._owed:
            try:
                shard, group, keys = self._owed.popleft()
            except IndexError:  # the other thread was faster
                return
            self.remove(shard, group, keys)

    def remove(self, shard: int, group: int, keys: Sequence[bytes]) -> None:
        """Uncounts detached blocks of one path."""
        if not keys:
            return
        table = self._tables[shard][group]
        with self._locks[shard]:
            counts = list(map(table.pop, keys, repeat(0)))
            if counts.count(1) != len(counts):
                _put_back(table, keys, counts)
            self.version += 1

    def probe(self, group: int, keys: Sequence[bytes], count: int) -> int:
        """How many leading keys are there, if that is monotone: the last, or gallop to the first
        miss, then bisect. O(log n)."""
        if not count:
            return 0
        shard = keys[0][0] & self._mask  # as `shard_of`, without a call: a probe is mostly calls
        table, last = self._tables[shard][group], keys[count - 1]
        with self._locks[shard]:
            return count if last in table else _gallop(table, keys, count)

    def present(self, group: int, keys: Sequence[bytes], count: int) -> BoolArray:
        """bool [count]: which of the leading keys are there. O(n), for windows that are not
        monotone."""
        if not count:
            return np.zeros(0, dtype=np.bool_)
        shard = self.shard_of(keys[0])
        table = self._tables[shard][group]
        with self._locks[shard]:
            found = list(map(table.__contains__, keys[:count]))
        return np.array(found, dtype=np.bool_)

    def look_up(self, prompt: Prompt) -> ReuseVote:
        """All endpoints at or below the prompt's cap that the index knows."""
        size = prompt.block_size
        count = prompt.reuse_cap // size
        if self._all_attention:
            for group in self._groups:
                count = self.probe(group, prompt.keys, count)
            return ReuseVote(count * size)
        for group, spec in enumerate(self._specs):
            if spec.kind == "attention":
                count = self.probe(group, prompt.keys, count)
        specs: list[GroupSpec] = []
        masks: list[BoolArray] = []
        for group, spec in enumerate(self._specs):
            if spec.kind == "attention":
                continue
            specs.append(spec)
            masks.append(usable(spec, self.present(group, prompt.keys, count), size))
        vote = make_vote(specs, masks, size)
        if len(specs) == len(self._specs):
            return vote
        return ReuseVote(attention=count * size, snapshots=vote.snapshots, sliding=vote.sliding)

    def counts(self) -> dict[tuple[int, int], dict[bytes, int]]:
        """(shard, group) -> its non-empty table, copied: for checks, one caller at a time."""
        self.settle()
        return {
            (shard, group): dict(table)
            for shard, tables in enumerate(self._tables)
            for group, table in enumerate(tables)
            if table
        }


def _gallop(table: dict[bytes, int], keys: Sequence[bytes], count: int) -> int:
    """Leading keys in the table, of which the last is not there (that was tried: the usual hit is a
    whole one): depths 1, 8, 64, ... to the first miss, and bisection. Each probe misses the near
    caches: few are wanted."""
    known, probe = 0, 1
    while probe < count and keys[probe - 1] in table:
        known, probe = probe, GALLOP * probe
    missed = min(probe, count)
    while missed - known > 1:
        middle = (known + missed) // 2
        if keys[middle - 1] in table:
            known = middle
        else:
            missed = middle
    return known


def _count_again(table: dict[bytes, int], keys: Iterable[bytes], new: int) -> None:
    """After every key was put in where it was missing, `new` of them: counts the others."""
    added = set(islice(reversed(table), new))
    for key in keys:
        if key in added:
            added.discard(key)
        else:
            table[key] += 1


def _put_back(table: dict[bytes, int], keys: Sequence[bytes], counts: Sequence[int]) -> None:
    """After every key was taken out (0: it was not there any more): what others still hold."""
    left = {key: count for key, count in zip(keys, counts, strict=True) if count}
    for key in keys:
        assert left.get(key), "a detached block was not in the hint index"
        left[key] -= 1
    table.update((key, count) for key, count in left.items() if count)
