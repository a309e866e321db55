"""What a round asks of every stage, what a stage answers, and the decisions that follow from it.

Owns: the wire shapes of hints, claims and votes. May not: decide, or know how they travel: they
ride in `RoundMessage.ask`, `RoundReply.answer`, `StageAck.counters`. Paper, section on admission.

    RoundAsk     hints   "what could you reuse of these?"      owns nothing
                 claims  "lease and reserve these, in this order"
    RoundAnswer  hints   one reply per request still known
                 votes   one per claim, and one per Retry applied since the last answer

A vote names its attempt; a vote of an older attempt is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

from wavepp.cache.types import HintVote, LeaseVote, Refusal, ReuseVote
from wavepp.units import RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Decision: move lease and escrow to the highest usable endpoint <= limit and vote again.

    `attempt` is the new attempt's number. Limits of one claim only fall.
    """

    request_id: RequestId
    attempt: int
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Junction:
    """Decision: the admitted attempt passes a point that others share; keep a snapshot there.

    `position` is in tokens, a multiple of B, ahead of every span planned so far.
    """

    request_id: RequestId
    attempt: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCounters:
    """Two numbers a stage reports with each acknowledgement. Both only grow.

    Attributes:
        releases: grows when something was given back here: a refused head is worth another try
            then. The undo of a request that this stage had refused counts as exactly one, so that
            a request can tell its own undo from what others gave back.
        hint_version: grows when the hint index changes: a hint of another version may be stale.
    """

    releases: int = 0
    hint_version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Lease up to `limit`, reserve the rest, commit if the lease kept the limit.

    Attributes:
        limit: the candidate, in tokens, a multiple of B.
        oversized: ignore the headroom (one request at a time, when no other holds a lease).
    """

    request_id: RequestId
    attempt: int
    limit: int
    oversized: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundAsk:
    """What one round asks of every stage; `claims` are acted on in their order.

    `exact`: hints come from a walk of the tree under its mutex, not from the index.
    """

    hints: tuple[RequestId, ...] = ()
    claims: tuple[Claim, ...] = ()
    exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HintReply:
    """One stage's hint for one request."""

    request_id: RequestId
    hint: HintVote


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimVote:
    """One stage's word on one attempt.

    Attributes:
        lease: what is pinned, and whether it was committed or refused. None: not tried, because
            this stage had refused an earlier request of the round for capacity.
        alone: nobody else held anything here when this was refused.
        releases: the stage's count of releases at that time.
    """

    request_id: RequestId
    attempt: int
    lease: LeaseVote | None
    alone: bool = False
    releases: int = 0

    @property
    def is_committed(self) -> bool:
        """An escrow is committed at `endpoint`."""
        return self.lease is not None and self.lease.committed

    @property
    def refusal(self) -> Refusal | None:
        """Why no escrow could be had; None: it was had, or not tried."""
        return None if self.lease is None else self.lease.refusal

    @property
    def endpoint(self) -> int:
        """What the lease covers; 0 when not tried."""
        return 0 if self.lease is None else self.lease.endpoint

    @property
    def reuse(self) -> ReuseVote:
        """Every endpoint at or below the limit that the stage can use. It was tried."""
        assert self.lease is not None, self
        return self.lease.reuse


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundAnswer:
    """One stage's answer to a RoundAsk."""

    hints: tuple[HintReply, ...] = ()
    votes: tuple[ClaimVote, ...] = ()


NO_COUNTERS = StageCounters()
NOTHING_ASKED = RoundAsk()
NOTHING_ANSWERED = RoundAnswer()
