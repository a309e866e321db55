"""StageCache: the only door to what one stage caches.

Owns the pools, the tree, the hint index and every lease, escrow and sequence of the stage. Synchronous, no clock, no
thread: one caller at a time (the caller holds the stage's tree mutex), except `hint` and `hint_version`, which touch the
sharded hint index only. Paper, section on admission.

    announce   hint(prompt)                        owns nothing
    admit      claim(...) = lease + prepare [+ commit]      lease: pins; escrow: room, concrete victims
    retry      move(...)                           new acquired before old released, all or nothing
    undo       undo(...)                           escrow first, then lease
    first wave materialize(...)                    the sequence owns its units; then escrow, then lease are released
    each span  snapshot_orders(...) -> execute -> publish(...) -> snapshot_taken(...)
    end        free(...)                           after the fence; whatever state the request is in
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from wavepp.cache.types import (
    CacheConfig,
    CacheStats,
    EscrowOutcome,
    HintVote,
    LeaseVote,
    Materialized,
    Prompt,
    PublishOutcome,
    Refusal,
    SnapshotOrders,
)
from wavepp.units import RequestId


class StageCache:
    """What one stage retains, evicts, leases and reserves.

    Args:
        config: groups, pools and limits.
        shard_locks: one lock a shard of the hint index (`config.hint_shards` of them); None: no locking.

    Contract breaks (a second lease for a request, materialize without a committed escrow, an unknown request) raise
    LocalProtocolError. Expected outcomes (no capacity, lower endpoint) are values.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        shard_locks: Sequence[AbstractContextManager[Any]] | None = None,
    ) -> None:
        raise AssertionError("being written")

    # -- before admission ----------------------------------------------------------------------------------------

    def fits(self, prompt: Prompt) -> Refusal | None:
        """None when an empty cache could hold the prompt; else why not, with both numbers (refuse on arrival)."""
        raise AssertionError("being written")

    def hint(self, prompt: Prompt) -> HintVote:
        """All endpoints <= prompt.reuse_cap that the hint index knows. Needs no tree mutex; owns nothing."""
        raise AssertionError("being written")

    @property
    def hint_version(self) -> int:
        """Grows whenever the hint index changes."""
        raise AssertionError("being written")

    @property
    def releases(self) -> int:
        """Grows whenever something was given back: a refused head is worth another try then, not before."""
        raise AssertionError("being written")

    # -- admission -----------------------------------------------------------------------------------------------

    def claim(
        self,
        request_id: RequestId,
        attempt: int,
        prompt: Prompt,
        limit: int,
        *,
        oversized: bool = False,
    ) -> LeaseVote:
        """Lease, prepare, and commit if the lease kept the limit: the common admission in one call.

        Args:
            limit: the agreed candidate, a multiple of B (min with prompt.reuse_cap is taken; committed at once if the
                lease endpoint equals that).
            oversized: ignore the headroom; honoured only while no other request holds a lease or escrow here.

        Returns:
            a vote; with a refusal the lease is still held and no escrow is: the caller undoes it.
        """
        raise AssertionError("being written")

    def lease(self, request_id: RequestId, attempt: int, prompt: Prompt, limit: int) -> LeaseVote:
        """Walks the tree by tokens and pins what the highest usable endpoint <= limit needs, within the floors."""
        raise AssertionError("being written")

    def trim(self, request_id: RequestId, endpoint: int) -> LeaseVote:
        """Lowers a lease (no escrow yet) to the highest usable endpoint <= endpoint; new pins before old go."""
        raise AssertionError("being written")

    def prepare(self, request_id: RequestId, *, oversized: bool = False) -> EscrowOutcome:
        """Reserves what the suffix needs in every window: free units first, then victims in eviction order."""
        raise AssertionError("being written")

    def commit(self, request_id: RequestId, endpoint: int) -> EscrowOutcome:
        """Recomputes the demand at the lease's endpoint, replaces claimed victims, publishes all or nothing.

        Args:
            endpoint: the final endpoint; must equal the lease's.
        """
        raise AssertionError("being written")

    def move(self, request_id: RequestId, attempt: int, limit: int) -> LeaseVote:
        """Moves lease and escrow to the highest usable endpoint <= limit and commits there, under one call.

        The new is acquired before the old is released. On a refusal everything is as before, but the attempt number.
        Works on a prepared or a committed escrow; prepares one if the claim was refused.
        """
        raise AssertionError("being written")

    def release_escrow(self, request_id: RequestId) -> None:
        """Gives the reservation back. No effect without one."""
        raise AssertionError("being written")

    def release_lease(self, request_id: RequestId) -> None:
        """Unpins. The escrow must be gone. No effect without a lease."""
        raise AssertionError("being written")

    def undo(self, request_id: RequestId) -> None:
        """Escrow first, then lease. No effect for an unknown request."""
        raise AssertionError("being written")

    # -- execution -----------------------------------------------------------------------------------------------

    def materialize(self, request_id: RequestId) -> Materialized:
        """Makes the sequence own its units; then releases escrow, then lease. Never fails on a committed request."""
        raise AssertionError("being written")

    def sequence(self, request_id: RequestId) -> Materialized | None:
        """The materialised sequence (effects empty), or None."""
        raise AssertionError("being written")

    def snapshot_orders(
        self, request_id: RequestId, positions: Sequence[int], *, junctions: Sequence[int] = ()
    ) -> SnapshotOrders:
        """Units to save the recurrent state into at these positions (multiples of B, inside the coming span).

        The prompt's tail uses the unit its escrow reserved; others are elastic. `junctions` among them are never
        thinned. Empty without recurrent groups.
        """
        raise AssertionError("being written")

    def publish(self, request_id: RequestId, upto: int) -> PublishOutcome:
        """Attaches the full prompt blocks that end at or below `upto` tokens. Call it after they were executed."""
        raise AssertionError("being written")

    def snapshot_taken(self, request_id: RequestId, position: int) -> None:
        """The ordered snapshot at `position` was written: attach it (blocks up to there are published) and thin."""
        raise AssertionError("being written")

    def free(self, request_id: RequestId) -> None:
        """Releases whatever the request holds: escrow, then lease, then sequence and slot. After the fence.

        No effect for an unknown request (an abort may come twice).
        """
        raise AssertionError("being written")

    # -- the whole -----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Drops all cached content that no request pins, on the device and the host. Requests go on."""
        raise AssertionError("being written")

    def clear(self) -> None:
        """Frees every request, then resets: a new epoch."""
        raise AssertionError("being written")

    def held(self) -> tuple[RequestId, ...]:
        """Requests that hold a lease, an escrow or a sequence, in the order they came. Empty at idle."""
        raise AssertionError("being written")

    def stats(self) -> CacheStats:
        """One snapshot of the numbers."""
        raise AssertionError("being written")

    def check(self) -> None:
        """Recounts everything and asserts every sum. O(everything): for tests, and when idle."""
        raise AssertionError("being written")
