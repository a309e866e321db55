"""What the steps of one stage's cache share: the pools, the tree, the hint index, the working
slots, the counters.

Owns no rule. `StageCache` builds one `Parts`; leases, escrows and sequences are handed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from wavepp.cache.blocks import BlockPool
from wavepp.cache.hints import HintIndex, Locks
from wavepp.cache.tree import PrefixTree
from wavepp.cache.types import CacheConfig, GroupSpec
from wavepp.units import ceil_div

HEADROOM_POOL_SHARE = 4  # headroom is at most a quarter of a pool


@dataclass(slots=True)
class Counters:
    """What happened since the cache was built."""

    evicted: int = 0
    offloaded: int = 0
    brought_back: int = 0
    substituted: int = 0
    snapshots_taken: int = 0
    snapshots_skipped: int = 0
    snapshots_thinned: int = 0


@dataclass(slots=True)
class SlotPool:
    """Working slots of the recurrent layers: lowest free first; promised to escrows by count."""

    total: int
    free: list[int] = field(init=False)
    promised: int = 0
    releases: int = 0

    def __post_init__(self) -> None:
        self.free = list(range(self.total))
        heapify(self.free)

    @property
    def spare(self) -> int:
        """Slots that are neither taken nor promised."""
        return len(self.free) - self.promised

    def take(self) -> int:
        """The lowest free slot, for a request that was promised one."""
        assert self.free, "a promised working slot is missing"
        return heappop(self.free)

    def give(self, slot: int) -> None:
        """Gives a slot back."""
        assert 0 <= slot < self.total, slot
        assert slot not in self.free, f"working slot {slot} was given back twice"
        heappush(self.free, slot)
        self.releases += 1


@dataclass(slots=True)
class Parts:
    """One stage's cache in parts. `pools[i]` belongs to `specs[i]`."""

    config: CacheConfig
    specs: tuple[GroupSpec, ...]
    pools: tuple[BlockPool, ...]
    tree: PrefixTree
    hints: HintIndex
    slots: SlotPool
    counters: Counters

    @property
    def block_size(self) -> int:
        """B."""
        return self.config.block_size

    @property
    def recurrent(self) -> bool:
        """Whether requests need a working slot here."""
        return any(spec.kind == "recurrent" for spec in self.specs)

    def headroom(self, group: int) -> int:
        """Units of a pool that admission leaves free: min(2PM tokens, a quarter of the pool); 0
        for snapshots."""
        spec = self.specs[group]
        if not spec.paged:
            return 0
        blocks = ceil_div(self.config.headroom_tokens, self.block_size)
        return min(blocks, spec.units // HEADROOM_POOL_SHARE)


def build_parts(config: CacheConfig, shard_locks: Locks | None) -> Parts:
    """An empty stage cache."""
    pools: Sequence[BlockPool] = [BlockPool(spec) for spec in config.groups]
    hints = HintIndex(config.groups, config.hint_shards, shard_locks)
    return Parts(
        config=config,
        specs=config.groups,
        pools=tuple(pools),
        tree=PrefixTree(config.block_size, pools, hints),
        hints=hints,
        slots=SlotPool(config.slots),
        counters=Counters(),
    )
