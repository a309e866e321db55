"""What LeaderMachine is told (facts, past tense) and what it orders. Plain data.

Decisions come back in the order in which they go into the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wavepp.cache.types import Refusal
from wavepp.protocol.messages import Announce, Decision
from wavepp.protocol.votes import NOTHING_ASKED, RoundAnswer, RoundAsk, StageCounters
from wavepp.units import RequestId, StageIndex, WaveNumber


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestArrived:
    """A request that passed the checks on arrival.

    Attributes:
        request_id: never used twice.
        serial: order of arrival; first come, first served goes by this.
        num_tokens: of the prompt.
        room_tokens: tokens beyond the prompt that need cache (`Prompt.room_tokens`).
        keys: the prompt's block keys, made once by the driver; to find who computes the same
            prefix. Empty: nobody does.
        reuse_cap: `Prompt.reuse_cap`.
    """

    request_id: RequestId
    serial: int
    num_tokens: int
    reuse_cap: int
    room_tokens: int = 0
    keys: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCancelled:
    """Nobody wants this request any more; unknown ones are ignored."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAnswered:
    """One stage answered the round that is out (or an old one once more: nothing comes of it)."""

    stage: StageIndex
    answer: RoundAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCounted:
    """A stage's counters, from either plane; older ones than known are ignored."""

    stage: StageIndex
    counters: StageCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanPlanned:
    """Tokens up to `end` of an admitted request are in wave `wave`; `last`: nothing is left."""

    request_id: RequestId
    wave: WaveNumber
    end: int
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveReturned:
    """Every stage has executed the waves up to this one, and published what they completed.

    `computed`: request and how far it is computed now, for the wave's spans that did not fail.
    """

    wave: WaveNumber
    computed: tuple[tuple[RequestId, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestServed:
    """The caller can have the result: the last wave came back."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailed:
    """A stage could not compute it, and it is at fault."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailed:
    """A wave failed and this request may be innocent: it is tried again from the start."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """A stage could not materialise an admitted request that had reserved too little there.

    `releases`: the stage's count then.
    """

    request_id: RequestId
    stage: StageIndex
    refusal: Refusal
    releases: int


LeaderFact = (
    RequestArrived
    | RequestCancelled
    | StageAnswered
    | StageCounted
    | SpanPlanned
    | WaveReturned
    | RequestServed
    | RequestFailed
    | AttemptFailed
    | RolledBack
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Tell the caller that the request can't be held, with both numbers. Its Free is ordered
    before."""

    request_id: RequestId
    stage: int
    refusal: Refusal


LeaderEffect = Decision | Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """The next round: decisions to log first, announcements to log (each with its payload), and
    what to ask of every stage."""

    decisions: tuple[Decision, ...] = ()
    announce: tuple[Announce, ...] = ()
    ask: RoundAsk = NOTHING_ASKED

    @property
    def subject(self) -> RequestId | None:
        """Whom the round asks about, if it asks: in serial admission there is one."""
        names = (*self.ask.hints, *(claim.request_id for claim in self.ask.claims))
        return names[0] if names else None
