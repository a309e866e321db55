"""StageCache: the only door to what one stage caches.

Owns the pools, the tree, the hint index and every lease, escrow and sequence of the stage.
Synchronous, no clock, no thread: one caller at a time (the caller holds the stage's tree mutex),
except `hint`, `settle` and `hint_version`, which touch the sharded hint index only, and `foresee`,
which only reads. Paper, section on admission.

    announce    hint             owns nothing
    admit       foresee          the walk, without the mutex; owns nothing
                claim            lease, prepare and, if the lease kept the limit, commit
    retry       move             new acquired before old released, all or nothing
    undo        undo             escrow first, then lease
    first wave  install          what was not reserved is claimed now, or the request is refused
                materialize      the sequence owns its units; then escrow, then lease are released
    each span   snapshot_orders -> execute -> publish -> snapshot_taken
    end         free             after the fence, whatever state the request is in
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from wavepp.cache import audit, snapshots
from wavepp.cache import escrow as escrows
from wavepp.cache import lease as leases
from wavepp.cache import pledge as pledges
from wavepp.cache import sequence as sequences
from wavepp.cache.blocks import joined
from wavepp.cache.escrow import Escrow
from wavepp.cache.hints import Locks
from wavepp.cache.lease import Foresight, Lease, Shift
from wavepp.cache.lru import EMPTY
from wavepp.cache.parts import build_parts
from wavepp.cache.pledge import Pledge
from wavepp.cache.reclaim import wipe
from wavepp.cache.sequence import Sequence as RunningSequence
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
    ReuseVote,
    SnapshotOrders,
)
from wavepp.cache.windows import demand_of_all, never_fits
from wavepp.errors import LocalProtocolError
from wavepp.units import RequestId


@dataclass(slots=True)
class _Holding:
    """What one request holds here; `late`: room is claimed when the headroom matters no more."""

    pledge: Pledge | None = None
    lease: Lease | None = None
    escrow: Escrow | None = None
    sequence: RunningSequence | None = None
    oversized: bool = False
    late: bool = False


class StageCache:
    """What one stage retains, evicts, leases and reserves.

    Args:
        config: groups, pools and limits.
        shard_locks: one lock a shard of the hint index (`config.hint_shards` of them); None: none.

    Broken contracts (a second lease for a request, materialize without a committed escrow, an
    unknown request) raise LocalProtocolError. Expected outcomes (no capacity, a lower endpoint)
    are values.
    """

    def __init__(self, config: CacheConfig, *, shard_locks: Locks | None = None) -> None:
        self.config = config
        self._parts = build_parts(config, shard_locks)
        self._holdings: dict[RequestId, _Holding] = {}

    # -- before admission ------------------------------------------------------------------------

    def fits(self, prompt: Prompt) -> Refusal | None:
        """None when an empty cache could hold the prompt; else why not (refuse it on arrival)."""
        return never_fits(self.config, prompt)

    def hint(self, prompt: Prompt) -> HintVote:
        """All endpoints <= prompt.reuse_cap that the hint index knows; owns nothing.

        Needs no tree mutex. The version is read first, so a change meanwhile shows as stale.
        """
        hints = self._parts.hints
        hints.settle()
        version = hints.version
        if not self.config.enable_prefix_caching:
            return HintVote(ReuseVote(attention=0), version)
        return HintVote(hints.look_up(prompt), version)

    def settle(self) -> None:
        """Lets the hint index follow what was evicted. Call it after a hold; `hint` does too."""
        self._parts.hints.settle()

    def walk(self, prompt: Prompt) -> HintVote:
        """As `hint`, by the exact walk: for those who do not trust the index. Needs the mutex."""
        return HintVote(leases.look(self._parts, prompt, len(prompt.keys)), self.hint_version)

    @property
    def hint_version(self) -> int:
        """Grows whenever the hint index changes."""
        return self._parts.hints.version

    @property
    def releases(self) -> int:
        """Grows whenever something was given back: a refused head is worth another try then."""
        return self._parts.slots.releases + sum(pool.releases for pool in self._parts.pools)

    # -- admission -------------------------------------------------------------------------------

    def foresee(self, prompt: Prompt, limit: int) -> Foresight | None:
        """Walks before the claim. Needs no mutex: the claim walks again if the tree has changed."""
        if not self.config.enable_prefix_caching or self.config.reservation != "escrow":
            return None
        return leases.foresee(self._parts, prompt, self._blocks(limit))

    def claim(
        self,
        request_id: RequestId,
        attempt: int,
        prompt: Prompt,
        limit: int,
        *,
        oversized: bool = False,
        foresight: Foresight | None = None,
    ) -> LeaseVote:
        """Lease, prepare, and commit if the lease kept the limit: the common admission.

        Args:
            limit: the agreed candidate, a multiple of B; min(limit, prompt.reuse_cap) counts.
            oversized: ignore the headroom; honoured only while no other request holds a lease
                or an escrow here.
            foresight: of the same prompt and limit, made a moment ago.

        Returns:
            a vote; with a refusal the lease is held and no escrow is: the caller undoes it.
        """
        if self.config.reservation != "escrow":
            return self._claim_unreserved(request_id, attempt, prompt, limit)
        vote = self.lease(request_id, attempt, prompt, limit, foresight)
        outcome = self.prepare(request_id, oversized=oversized)
        if outcome.refusal is not None:
            return replace(vote, refusal=outcome.refusal)
        if vote.endpoint == min(limit, prompt.reuse_cap):
            outcome = self.commit(request_id, vote.endpoint)
        return replace(vote, committed=outcome.committed, refusal=outcome.refusal)

    def lease(
        self,
        request_id: RequestId,
        attempt: int,
        prompt: Prompt,
        limit: int,
        foresight: Foresight | None = None,
    ) -> LeaseVote:
        """Walks the tree by tokens and pins the highest usable endpoint <= limit.

        Pins that would break a floor are not taken: the endpoint is lower then.
        """
        if request_id in self._holdings:
            raise LocalProtocolError(f"{request_id} already holds something on this stage")
        lease, reuse = leases.acquire(self._parts, attempt, prompt, self._blocks(limit), foresight)
        self._holdings[request_id] = _Holding(lease=lease)
        return self._vote(request_id, lease, reuse)

    def trim(self, request_id: RequestId, endpoint: int) -> LeaseVote:
        """Lowers a lease (no escrow yet) to the highest usable endpoint <= endpoint.

        For recurrent windows the earlier snapshot is pinned before the later one is released.
        """
        holding = self._holding(request_id)
        lease = self._lease(holding, request_id)
        if holding.escrow is not None:
            raise LocalProtocolError(f"{request_id} has an escrow: move it, don't trim it")
        reuse = leases.usable_below(self._parts, lease, self._blocks(endpoint))
        leases.trim(self._parts, lease, reuse, self._blocks(endpoint))
        return self._vote(request_id, lease, reuse)

    def prepare(self, request_id: RequestId, *, oversized: bool = False) -> EscrowOutcome:
        """Reserves what the suffix needs in every window: free units, then victims in order."""
        holding = self._holding(request_id)
        lease = self._lease(holding, request_id)
        if holding.escrow is not None:
            raise LocalProtocolError(f"{request_id} has an escrow already")
        holding.oversized = oversized
        escrow = escrows.empty_escrow(self._parts)
        outcome = self._reserve(holding, lease.endpoint, escrow, None)
        if outcome.refusal is None:
            holding.escrow = escrow
        return outcome

    def commit(self, request_id: RequestId, endpoint: int) -> EscrowOutcome:
        """Recomputes the demand at the lease's endpoint and publishes all or nothing.

        Victims that someone claimed are replaced first. On a refusal the reservation stands.

        Args:
            endpoint: the final endpoint; must equal the lease's.
        """
        holding = self._holding(request_id)
        lease = self._lease(holding, request_id)
        if holding.escrow is None or endpoint != lease.endpoint * self._size:
            held = "held" if holding.escrow else "missing"
            raise LocalProtocolError(f"{request_id}: commit at {endpoint}, escrow {held}: {lease}")
        outcome = self._reserve(holding, lease.endpoint, holding.escrow, None)
        if outcome.refusal is None:
            holding.escrow.committed = True
        return replace(outcome, committed=holding.escrow.committed)

    def move(self, request_id: RequestId, attempt: int, limit: int) -> LeaseVote:
        """Moves lease and escrow to the highest usable endpoint <= limit and commits there.

        The new is acquired before the old is released, under this one call. On a refusal all is
        as before but the attempt's number. An escrow that was refused before is tried again.
        """
        if self.config.reservation != "escrow":
            return self._move_unreserved(request_id, attempt, limit)
        holding = self._holding(request_id)
        lease = self._lease(holding, request_id)
        if attempt <= lease.attempt:
            raise LocalProtocolError(f"{request_id}: attempt {attempt} after {lease.attempt}")
        lease.attempt = attempt
        reuse = leases.usable_below(self._parts, lease, self._blocks(limit))
        target = self._blocks(reuse.highest(min(limit, lease.endpoint * self._size)))
        shift = None
        if target < lease.endpoint:
            shift = leases.plan_shift(self._parts, lease, target)
            leases.pin_new(self._parts, shift)
        escrow = holding.escrow or escrows.empty_escrow(self._parts)
        outcome = self._reserve(holding, target, escrow, shift)
        if outcome.refusal is None:
            escrow.committed = True
            holding.escrow = escrow
        if shift is not None and outcome.refusal is None:
            leases.unpin_old(self._parts, lease, shift)
        elif shift is not None:
            leases.unpin_new(self._parts, shift)
        vote = self._vote(request_id, lease, reuse)
        return replace(vote, committed=outcome.refusal is None, refusal=outcome.refusal)

    def release_escrow(self, request_id: RequestId) -> None:
        """Gives the reservation back. No effect without one."""
        holding = self._holdings.get(request_id)
        if holding is not None and holding.escrow is not None:
            escrows.release(self._parts, holding.escrow)
            holding.escrow = None

    def release_lease(self, request_id: RequestId) -> None:
        """Unpins, or takes a pledge back. The escrow must be gone. No effect without a lease."""
        holding = self._holdings.get(request_id)
        if holding is None or holding.sequence is not None:
            return
        if holding.escrow is not None:
            raise LocalProtocolError(f"{request_id}: the escrow is released before the lease")
        if holding.lease is not None:
            leases.release(self._parts, holding.lease)
        del self._holdings[request_id]

    def undo(self, request_id: RequestId) -> None:
        """Escrow first, then lease. No effect for an unknown request."""
        self.release_escrow(request_id)
        self.release_lease(request_id)

    # -- execution -------------------------------------------------------------------------------

    def install(self, request_id: RequestId) -> Materialized | Refusal:
        """Materialises an admitted request; what was not reserved before is claimed first.

        Returns:
            a refusal (never where escrows are made): nothing has changed, `free` is still to come.
        """
        if self.config.reservation == "escrow":
            return self.materialize(request_id)
        holding, pledge = self._holding(request_id), None
        if holding.pledge is not None:
            lease = pledges.redeem(self._parts, holding.pledge)
            if isinstance(lease, Refusal):
                return lease
            holding.lease, holding.pledge, pledge = lease, None, holding.pledge
        assert holding.lease is not None, request_id
        escrow = escrows.empty_escrow(self._parts)
        holding.late = True
        outcome = self._reserve(holding, holding.lease.endpoint, escrow, None)
        if outcome.refusal is None:
            escrow.committed = True
            holding.escrow = escrow
            return self.materialize(request_id)
        if pledge is not None:
            leases.release(self._parts, holding.lease)
            holding.lease, holding.pledge = None, pledge
        return outcome.refusal

    def materialize(self, request_id: RequestId) -> Materialized:
        """Makes the sequence own its units; then releases escrow, then lease.

        Never fails for space on a committed request: an AssertionError here is a bug.
        """
        holding = self._holding(request_id)
        lease = self._lease(holding, request_id)
        if holding.escrow is None or not holding.escrow.committed:
            raise LocalProtocolError(f"{request_id} has no committed escrow")
        sequence, effects = sequences.materialize(self._parts, lease, holding.escrow)
        self._holdings[request_id] = _Holding(sequence=sequence)
        return replace(sequences.describe(self._parts, request_id, sequence), effects=effects)

    def sequence(self, request_id: RequestId) -> Materialized | None:
        """The materialised sequence (without effects), or None."""
        holding = self._holdings.get(request_id)
        if holding is None or holding.sequence is None:
            return None
        return sequences.describe(self._parts, request_id, holding.sequence)

    def snapshot_orders(
        self, request_id: RequestId, positions: Sequence[int], *, junctions: Sequence[int] = ()
    ) -> SnapshotOrders:
        """Units to save the recurrent state into at these positions of the coming span.

        Positions are multiples of B. The tail uses the unit its escrow reserved; others are
        elastic. `junctions` among them are never thinned. Empty without recurrent groups.
        """
        return snapshots.order(self._parts, self._running(request_id), positions, junctions)

    def publish(self, request_id: RequestId, upto: int) -> PublishOutcome:
        """Attaches the full prompt blocks that end at or below `upto` tokens.

        Call it after they were executed here. Blocks of generated tokens are not published.
        """
        sequence = self._running(request_id)
        blocks = min(upto, sequence.prompt.num_tokens) // self._size
        return sequences.publish(self._parts, sequence, blocks)

    def snapshot_taken(self, request_id: RequestId, position: int) -> None:
        """The ordered snapshot at `position` was written: attaches it, and thins its path.

        Blocks up to there are published before.
        """
        snapshots.taken(self._parts, self._running(request_id), position)

    def free(self, request_id: RequestId) -> None:
        """Releases whatever the request holds: escrow, then lease; or sequence and slot.

        After the fence. No effect for an unknown request (an abort may come twice).
        """
        self.undo(request_id)
        holding = self._holdings.pop(request_id, None)
        if holding is not None and holding.sequence is not None:
            sequences.release(self._parts, holding.sequence)

    # -- the whole -------------------------------------------------------------------------------

    def reset(self) -> None:
        """Drops all cached content that no request pins, on device and host. Requests go on."""
        held = [holding.escrow for holding in self._holdings.values() if holding.escrow]
        for group, pool in enumerate(self._parts.pools):
            forgotten = [escrows.forget_content(pool, escrow.holds[group]) for escrow in held]
            wipe(self._parts, group, joined(*forgotten))

    def clear(self) -> None:
        """Frees every request, then resets: a new epoch."""
        for request_id in list(self._holdings):
            self.free(request_id)
        self.reset()

    def held(self) -> tuple[RequestId, ...]:
        """Requests that hold a lease, an escrow or a sequence, oldest first. Empty at idle."""
        return tuple(self._holdings)

    def leftovers(self) -> str | None:
        """What is not given back, for a message; None at idle: free + cached = pool everywhere.

        Looks at sums only, a few numbers a group: asked after every round and wave.
        """
        if self._holdings:
            return f"{len(self._holdings)} requests' leases, escrows or sequences"
        return audit.leftovers(self._parts)

    def stats(self) -> CacheStats:
        """One snapshot of the numbers."""
        holdings = self._holdings.values()
        return audit.count(
            self._parts,
            leases=sum(holding.lease is not None for holding in holdings),
            escrows=sum(holding.escrow is not None for holding in holdings),
            sequences=sum(holding.sequence is not None for holding in holdings),
        )

    def check(self) -> None:
        """Recounts everything and asserts every sum. O(everything): for tests, and when idle."""
        holdings = self._holdings.values()
        audit.check(
            self._parts,
            audit.Owners(
                leases=[holding.lease for holding in holdings if holding.lease],
                escrows=[holding.escrow for holding in holdings if holding.escrow],
                sequences=[holding.sequence for holding in holdings if holding.sequence],
            ),
        )

    # -- inside ----------------------------------------------------------------------------------

    @property
    def _size(self) -> int:
        return self.config.block_size

    def _blocks(self, tokens: int) -> int:
        if tokens < 0 or tokens % self._size:
            raise LocalProtocolError(f"endpoint {tokens} is no multiple of {self._size}")
        return tokens // self._size

    def _holding(self, request_id: RequestId) -> _Holding:
        holding = self._holdings.get(request_id)
        if holding is None:
            raise LocalProtocolError(f"{request_id} holds nothing on this stage")
        return holding

    def _lease(self, holding: _Holding, request_id: RequestId) -> Lease:
        if holding.lease is None:
            raise LocalProtocolError(f"{request_id} has no lease: it is materialised already")
        return holding.lease

    def _running(self, request_id: RequestId) -> RunningSequence:
        sequence = self._holding(request_id).sequence
        if sequence is None:
            raise LocalProtocolError(f"{request_id} is not materialised")
        return sequence

    def _claim_unreserved(
        self, request_id: RequestId, attempt: int, prompt: Prompt, limit: int
    ) -> LeaseVote:
        """A claim that reserves no room: pins alone, or a pledge. Refused only if it never fits."""
        if self.config.reservation == "lease":
            vote = self.lease(request_id, attempt, prompt, limit)
        elif request_id in self._holdings:
            raise LocalProtocolError(f"{request_id} already holds something on this stage")
        else:
            pledge, reuse = pledges.make(self._parts, attempt, prompt, self._blocks(limit))
            self._holdings[request_id] = _Holding(pledge=pledge)
            vote = self._vote(request_id, pledge, reuse)
        refusal = self.fits(prompt)
        kept = vote.endpoint == min(limit, prompt.reuse_cap)
        return replace(vote, committed=kept and refusal is None, refusal=refusal)

    def _move_unreserved(self, request_id: RequestId, attempt: int, limit: int) -> LeaseVote:
        holding = self._holding(request_id)
        held = holding.pledge or self._lease(holding, request_id)
        if attempt <= held.attempt:
            raise LocalProtocolError(f"{request_id}: attempt {attempt} after {held.attempt}")
        held.attempt = attempt
        if isinstance(held, Lease):
            return replace(self.trim(request_id, limit), committed=True)
        reuse = pledges.lower(self._parts, held, self._blocks(limit))
        return replace(self._vote(request_id, held, reuse), committed=True)

    def _reserve(
        self, holding: _Holding, endpoint: int, escrow: Escrow, shift: Shift | None
    ) -> EscrowOutcome:
        """Brings the escrow to the demand at `endpoint` (in blocks), or says why not."""
        parts, lease = self._parts, holding.lease
        assert lease is not None
        host_blocks = leases.host_blocks(parts, lease, endpoint)
        demands = demand_of_all(self.config, lease.prompt, endpoint, host_blocks)
        groups = range(len(parts.pools))
        alone = not any(h.lease is not None for h in self._holdings.values() if h is not holding)
        without = holding.late or holding.escrow is not None or (holding.oversized and alone)
        substituted, refusal = escrows.reserve(
            parts,
            escrow,
            endpoint,
            demands,
            headrooms=[0 if without else parts.headroom(group) for group in groups],
            freed=leases.freed_by(parts, shift) if shift else [EMPTY] * len(groups),
        )
        named = zip(self.config.groups, demands, strict=True)
        return EscrowOutcome(
            endpoint=endpoint * self._size,
            committed=escrow.committed,
            demand={spec.name: units for spec, units in named},
            substituted=substituted,
            refusal=refusal,
        )

    def _vote(self, request_id: RequestId, lease: Lease | Pledge, reuse: ReuseVote) -> LeaseVote:
        return LeaseVote(
            request_id=request_id,
            attempt=lease.attempt,
            endpoint=lease.endpoint * self._size,
            reuse=reuse,
        )
