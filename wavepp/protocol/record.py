"""What the leader knows of one request. Mutable; owned by LeaderMachine, which alone decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from wavepp.cache.types import HintVote, ReuseVote, best_endpoint
from wavepp.protocol.facts import RequestArrived
from wavepp.protocol.messages import NO_WAVE
from wavepp.protocol.states import Lifecycle, Phase
from wavepp.protocol.votes import ClaimVote
from wavepp.units import RequestId, WaveNumber

ROLLBACKS_MAX = 2
"""Rolled back so often, a request is admitted alone: then it can't happen for ever."""


@dataclass(slots=True, eq=False)
class ClaimState:
    """The claim of one request: the current attempt's limit and votes, and the last refusal.

    Attributes:
        reuse_max: highest endpoint worth claiming; 0 once the reuse itself did not fit.
        candidate: the limit of the first attempt of the current claim.
        adjustments: Retry decisions of the current claim.
        since_s: when the current claim was made.
        oversized: it can't be held beside the headroom: it needs the exception.
        refused: stage -> count of releases that must be passed before another try.
        waited_idle: it was tried once with nothing else held, without that count being passed.
        rollbacks: how often some stage had no room for it after it was admitted.
    """

    reuse_max: int
    limit: int = 0
    candidate: int = 0
    adjustments: int = 0
    since_s: float = 0.0
    oversized: bool = False
    votes: dict[int, ClaimVote] = field(default_factory=dict)
    refused: Mapping[int, int] = field(default_factory=dict)
    waited_idle: bool = False
    rollbacks: int = 0

    @property
    def goes_alone(self) -> bool:
        """Others took its room too often: until it is materialised nobody else is admitted."""
        return self.rollbacks >= ROLLBACKS_MAX


@dataclass(slots=True, eq=False)
class RunState:
    """The admitted attempt: [0, endpoint) reused, planned and computed so far, its last wave.

    `materialized`: a wave of it came back, so no stage holds a lease for it any more.
    """

    endpoint: int = 0
    planned: int = 0
    computed: int = 0
    last_wave: WaveNumber = NO_WAVE
    materialized: bool = False


@dataclass(slots=True, eq=False)
class Wait:
    """A deferral: `donor` computes [.., target). `until`: latest end of all deferrals together."""

    until: float | None = None
    donor: RequestId | None = None
    target: int = 0


@dataclass(slots=True, eq=False)
class Record:
    """One live request.

    Attributes:
        shared: where prompts that came while it computed theirs part from it.
    """

    arrival: RequestArrived
    life: Lifecycle
    claim: ClaimState
    attempt: int = 1
    hints: dict[int, HintVote] = field(default_factory=dict)
    hinted_in: int = 0  # the latest round that brought a hint
    run: RunState = field(default_factory=RunState)
    wait: Wait = field(default_factory=Wait)
    shared: set[int] = field(default_factory=set)

    @property
    def request_id(self) -> RequestId:
        """Its name."""
        return self.arrival.request_id

    @property
    def serial(self) -> int:
        """Order of arrival."""
        return self.arrival.serial

    @property
    def phase(self) -> Phase:
        """Where it is."""
        return self.life.phase

    def reuses(self) -> list[ReuseVote]:
        """All stages' hints, in stage order."""
        return [self.hints[stage].reuse for stage in sorted(self.hints)]

    def best_hint(self) -> int:
        """The greatest endpoint that every stage can use by its hint: the candidate."""
        assert self.hints, self.request_id
        return best_endpoint(self.reuses(), min(self.arrival.reuse_cap, self.claim.reuse_max))

    @property
    def has_snapshots(self) -> bool:
        """Some stage has recurrent windows, so reuse needs a snapshot at the endpoint."""
        return any(vote.reuse.snapshots is not None for vote in self.hints.values())

    def next_attempt(self) -> None:
        """What was voted so far counts no more."""
        self.attempt += 1
        self.claim.votes.clear()
