"""The values that go into and come out of one stage's cache: prompts, group specs, votes,
outcomes, effects.

Owns no state and decides nothing. Endpoints and limits are prefix lengths in tokens, always
multiples of B (the tokens of a block); 0 is an endpoint every window can use. Paper, section on
admission.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from wavepp.errors import ConfigError
from wavepp.units import RequestId, ceil_div

Int32Array = npt.NDArray[np.int32]
IntArray = npt.NDArray[np.integer[Any]]
BoolArray = npt.NDArray[np.bool_]
WindowKind = Literal["attention", "sliding", "recurrent"]
Reservation = Literal["none", "lease", "escrow"]

TOKEN_BYTES = 4
NO_UNIT = -1  # in a block table: nothing is there (before a sliding window); in the tree: not held


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """One window (cache group) of a stage and the size of its pool.

    Attributes:
        units: blocks (attention, sliding) or snapshots (recurrent) on the device.
        host_units: the same on the host tier; 0: no host tier for this group.
        window: tokens a sliding window looks back on; None for the other kinds.
    """

    name: str
    kind: WindowKind
    units: int
    host_units: int = 0
    window: int | None = None

    def __post_init__(self) -> None:
        if self.units < 0 or self.host_units < 0:
            raise ConfigError(
                f"group {self.name!r}: units {self.units}, host_units {self.host_units}: "
                "neither may be negative"
            )
        if (self.kind == "sliding") != (self.window is not None):
            raise ConfigError(f"group {self.name!r}: kind {self.kind}, window {self.window}")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"group {self.name!r}: window {self.window} must be at least 1")

    @property
    def paged(self) -> bool:
        """Whether its units are blocks of B tokens (else snapshots at block boundaries)."""
        return self.kind != "recurrent"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Everything a StageCache is built from.

    Attributes:
        slots: working slots of recurrent layers, one a running request (`max_num_seqs`).
        headroom_tokens: 2PM; what admission leaves free, at most a quarter of each pool. 0 is
        allowed. snapshot_interval: tokens between periodic snapshots, a multiple of B; None: none.
        max_snapshots_per_path: beyond it the middle of a path is thinned out.
        enable_prefix_caching: False: nothing is kept for reuse, every vote is 0.
        hint_shards: shards of the hint index, a power of two.
        reservation: what an admitted request holds before it is materialised. escrow: its prefix is
        pinned and its suffix has room. lease: pins only. none: nothing. With less than an escrow
        room is claimed when the request is materialised, which may fail.
    """

    block_size: int
    groups: tuple[GroupSpec, ...]
    slots: int
    headroom_tokens: int = 0
    snapshot_interval: int | None = None
    max_snapshots_per_path: int = 16
    enable_prefix_caching: bool = True
    hint_shards: int = 16
    reservation: Reservation = "escrow"

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size {self.block_size} must be at least 1")
        if self.slots < 1:
            raise ConfigError(f"slots {self.slots} must be at least 1")
        if self.headroom_tokens < 0:
            raise ConfigError(f"headroom_tokens {self.headroom_tokens} must not be negative")
        if self.max_snapshots_per_path < 1:
            raise ConfigError(f"max_snapshots_per_path {self.max_snapshots_per_path}: at least 1")
        interval = self.snapshot_interval
        if interval is not None and (interval < 1 or interval % self.block_size):
            raise ConfigError(
                f"snapshot_interval {interval} is no multiple of block_size {self.block_size}"
            )
        if self.hint_shards < 1 or self.hint_shards & (self.hint_shards - 1):
            raise ConfigError(f"hint_shards {self.hint_shards} is no power of two")
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            raise ConfigError(f"groups {names}: names must differ")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """A prompt as the cache sees it; built by `keys.make_prompt`, outside any lock.

    Attributes:
        namespace: from `keys.encode_namespace`; prefixes are shared within one namespace only.
        tokens: int32 [n].
        raw: the same tokens as little-endian int32 bytes (compared on the walk).
        keys: one chained key for each full block, `n // B` of them.
        tail: B * floor((n - 1) / B), the highest endpoint that leaves a token to compute.
        reuse_cap: the highest endpoint this prompt may reuse: its tail, or 0 when nothing may be
        reused (`prompt_logprobs`). room_tokens: tokens beyond the prompt that need cache (local
        decoding: max_tokens - 1).
    """

    namespace: bytes
    tokens: Int32Array
    raw: bytes
    keys: Sequence[bytes]
    block_size: int
    tail: int
    reuse_cap: int
    room_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """n."""
        return len(self.tokens)

    @property
    def blocks_total(self) -> int:
        """Blocks that hold the prompt and the room after it."""
        return ceil_div(self.num_tokens + self.room_tokens, self.block_size)


class ReuseVote(NamedTuple):  # made in a fifth of the time of a frozen dataclass: one a probe
    """All endpoints one stage can use, at or below the limit it was asked for. None is "no limit".

    Attributes:
        attention: the highest endpoint of the attention windows; every multiple of B below it is
        usable. snapshots: endpoints with a snapshot in every recurrent window, ascending, 0 not
        listed. sliding: inclusive ranges (lowest, highest) of endpoints whose last w tokens are
        all there, ascending.
    """

    attention: int | None = None
    snapshots: tuple[int, ...] | None = None
    sliding: tuple[tuple[int, int], ...] | None = None

    def highest(self, limit: int) -> int:
        """The highest endpoint <= limit that this stage can use; 0 if there is no other."""
        assert limit >= 0, limit
        endpoint = limit
        while endpoint > 0:
            lower = self._step_down(endpoint)
            if lower == endpoint:
                return endpoint
            endpoint = lower
        return 0

    def usable(self, endpoint: int) -> bool:
        """Whether this stage can use exactly this endpoint."""
        return self.highest(endpoint) == endpoint

    def _step_down(self, endpoint: int) -> int:
        """One pass of every rule: the same endpoint when all agree, else a lower bound of the
        answer's upper bound."""
        if self.attention is not None:
            endpoint = min(endpoint, self.attention)
        if self.snapshots is not None:
            at = bisect_right(self.snapshots, endpoint)
            endpoint = self.snapshots[at - 1] if at else 0
        if self.sliding is not None:
            at = bisect_right(self.sliding, endpoint, key=lambda span: span[0])
            endpoint = min(endpoint, self.sliding[at - 1][1]) if at else 0
        return endpoint


def best_endpoint(votes: Sequence[ReuseVote], limit: int) -> int:
    """The greatest endpoint <= limit that every stage can use (the agreement of a round).

    Args:
        limit: a multiple of B.
    """
    endpoint = limit
    while endpoint > 0:
        lower = endpoint
        for vote in votes:
            lower = vote.highest(lower)
        if lower == endpoint:
            return endpoint
        endpoint = lower
    return 0


def junction_of(votes: Sequence[ReuseVote], endpoint: int) -> int | None:
    """Where a snapshot should be taken because others share that prefix: the all-stage minimum of
    the attention endpoints, when it lies above the agreed endpoint; else None."""
    limits = [vote.attention for vote in votes if vote.attention is not None]
    if not limits:
        return None
    lowest = min(limits)
    return lowest if lowest > endpoint else None


class HintVote(NamedTuple):  # as above
    """What a stage could reuse by its hint index alone. It owns nothing and may be wrong in both
    directions.

    `version` is the index's version at the look-up: an unequal `StageCache.hint_version` means it
    may be stale.
    """

    reuse: ReuseVote
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a claim was refused, with both numbers (units of the group; working slots for reason
    "slots").

    capacity: other requests hold too much; try again when `StageCache.releases` has grown.
    slots: every working slot is taken or promised.
    never_fits: not even an empty pool would do.
    gone: the agreed prefix, which nobody pinned, is not there any more (blocks of it).
    """

    reason: Literal["capacity", "slots", "never_fits", "gone"]
    group: str
    needed: int
    available: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseVote:
    """Outcome of a lease, trim, claim or move.

    Attributes:
        endpoint: what is pinned now (after a refusal: what was pinned before and still is).
        reuse: every endpoint at or below the limit that the exact walk found usable within the
        floors. committed: an escrow is committed at `endpoint`.
        refusal: why no escrow could be prepared or committed; None otherwise.
    """

    request_id: RequestId
    attempt: int
    endpoint: int
    reuse: ReuseVote
    committed: bool = False
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EscrowOutcome:
    """Outcome of prepare or commit. On a refusal nothing changed.

    Attributes:
        demand: units reserved in each group, by group name.
        substituted: victims that someone had claimed and that were replaced.
    """

    endpoint: int
    committed: bool
    demand: Mapping[str, int] = field(default_factory=dict)
    substituted: int = 0
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Offload:
    """Copy blocks (snapshots) device -> host, before their device units are written. int32 [k]
    each."""

    group: str
    device: Int32Array
    host: Int32Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BringBack:
    """Copy blocks host -> device, after all offloads. int32 [k] each."""

    group: str
    host: Int32Array
    device: Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreSnapshot:
    """Copy a snapshot into a working slot. `snapshot` counts device snapshots, or host ones if
    `from_host`."""

    group: str
    snapshot: int
    slot: int
    from_host: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroSlot:
    """Set a working slot to the empty state: the request starts at 0 and the slot held another's
    state."""

    group: str
    slot: int


Effect = Offload | BringBack | RestoreSnapshot | ZeroSlot


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Materialized:
    """A sequence that now owns its blocks. The executor performs `effects` in order before the
    first span.

    Attributes:
        endpoint: the sequence's position: its first span must start here.
        block_tables: paged group -> int32 [blocks_total]; table[i] holds tokens [iB, (i+1)B);
        NO_UNIT before a
            sliding window. Constant for the life of the sequence.
        slot: working slot, the same number in every recurrent group; None without recurrent groups.
    """

    request_id: RequestId
    endpoint: int
    block_tables: Mapping[str, Int32Array]
    slot: int | None
    effects: tuple[Effect, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotOrder:
    """Save the working slot when the recurrent state stands exactly at `position` tokens.

    `units` maps recurrent group -> device snapshot to write. Offloads in `effects` come first.
    """

    position: int
    slot: int
    units: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotOrders:
    """Orders for one span, ascending; `skipped` positions had no room (elastic, counted, never a
    refusal)."""

    orders: tuple[SnapshotOrder, ...] = ()
    skipped: tuple[int, ...] = ()
    effects: tuple[Effect, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOutcome:
    """Blocks attached by one publish (all groups), and those that were there already (the older
    copy is kept)."""

    attached: int
    duplicates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """One pool now. free + cached + private = units; `reserved` units of free and cached back
    escrows. `paged`: of blocks, not snapshots."""

    name: str
    paged: bool
    units: int
    free: int
    cached: int
    private: int
    reclaimable: int
    reserved: int
    host_units: int
    host_free: int
    host_cached: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """One stage's cache now, and counts since it was built."""

    groups: tuple[GroupStats, ...]
    leases: int
    escrows: int
    sequences: int
    slots_free: int
    hint_version: int
    evicted: int
    offloaded: int
    brought_back: int
    substituted: int
    snapshots_taken: int
    snapshots_skipped: int
    snapshots_thinned: int
