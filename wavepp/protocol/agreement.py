"""From the votes of all stages on one attempt to what happens next. A pure function.

Owns the rule of agreement, in two spellings that end at the same endpoint:

    set        the greatest endpoint that every stage said it can use, in one step
    stepwise   everybody drops to the lowest pinned endpoint; recurrent windows may fall further;
               repeat (the paper's own way)

    snapshots at 64, 72, 90 on stage 0 and 64, 80 on stage 1, candidate 80:
    set 80 -> 64      stepwise 80 -> 72 -> 64

Limits only fall, by a block at least, so it ends. May not: know who else waits. Paper, section on
admission.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from wavepp.cache.types import Refusal, best_endpoint
from wavepp.errors import RemoteProtocolError
from wavepp.protocol.votes import ClaimVote

Agreement = Literal["set", "stepwise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """Every stage committed at this endpoint."""

    endpoint: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lower:
    """Every stage moves to this limit and votes again."""

    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRoom:
    """Some stages refused for capacity.

    Attributes:
        refused: stage -> its count of releases at that time.
        alone: every one of them held nothing else.
        stage, refusal: the first refusal, for whoever must be told.
    """

    refused: Mapping[int, int]
    alone: bool
    stage: int
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class NotTried:
    """Nobody refused it, but some stage had refused somebody before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Impossible:
    """A stage could not hold it in an empty cache."""

    stage: int
    refusal: Refusal


Verdict = Agreed | Lower | NoRoom | NotTried | Impossible


def judge(votes: Sequence[ClaimVote], *, limit: int, agreement: Agreement) -> Verdict:
    """What the votes of all stages, in stage order, on one attempt at `limit` amount to.

    Raises:
        RemoteProtocolError: a stage pinned more than it was asked to, or kept the limit and
            neither committed nor refused.
    """
    refusals = [(stage, vote) for stage, vote in enumerate(votes) if vote.refusal is not None]
    for stage, vote in refusals:
        assert vote.refusal is not None
        if vote.refusal.reason == "never_fits":
            return Impossible(stage=stage, refusal=vote.refusal)
    if refusals:
        stage, first = refusals[0]
        assert first.refusal is not None
        return NoRoom(
            refused={stage: vote.releases for stage, vote in refusals},
            alone=all(vote.alone for _, vote in refusals),
            stage=stage,
            refusal=first.refusal,
        )
    if any(vote.lease is None for vote in votes):
        return NotTried()
    for stage, vote in enumerate(votes):
        if vote.endpoint > limit or (vote.endpoint == limit and not vote.is_committed):
            raise RemoteProtocolError(f"stage {stage} voted {vote} on a limit of {limit}")
    endpoint = votes[0].endpoint
    if all(vote.is_committed and vote.endpoint == endpoint for vote in votes):
        return Agreed(endpoint=endpoint)
    return Lower(limit=_lower(votes, limit, agreement))


def differ(votes: Sequence[ClaimVote]) -> bool:
    """Whether stages that hold a lease each got to unequal endpoints."""
    return len({vote.endpoint for vote in votes if vote.lease is not None}) > 1


def _lower(votes: Sequence[ClaimVote], limit: int, agreement: Agreement) -> int:
    if agreement == "set":
        lower = best_endpoint([vote.reuse for vote in votes], limit)
    else:
        lower = min(vote.endpoint for vote in votes)
    assert 0 <= lower < limit, (lower, limit, votes)
    return lower
