"""One request as the driver sees it.

Owns: the phases a request goes through and what is known of it. May not: decide; DriverControl
does.

    known = prompt + produced tokens
    |---- computed (waves came back) ----|---- planned (in the ring) ----|---- remaining ----|
    0                                 computed                        planned              known
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from wavepp.control.facts import Arrival
from wavepp.planner.packing import Piece
from wavepp.protocol.messages import NO_WAVE, Int32Array
from wavepp.requests import (
    FinishReason,
    PositionLogprobs,
    PrefillResult,
    RequestTimings,
)
from wavepp.units import RequestId, WaveNumber


class Phase(enum.Enum):
    """Where a live request is."""

    QUEUED = "queued"  # only the driver knows it
    ANNOUNCED = "announced"  # its tokens are on the way to the stages
    READY = "ready"  # every stage has its tokens
    ADMITTED = "admitted"  # it holds a lane and room on every stage
    DONE = "done"  # the caller has the result


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.QUEUED: frozenset({Phase.ANNOUNCED, Phase.DONE}),
    Phase.ANNOUNCED: frozenset({Phase.READY, Phase.DONE}),
    Phase.READY: frozenset({Phase.ADMITTED, Phase.DONE}),
    Phase.ADMITTED: frozenset({Phase.READY, Phase.DONE}),
    Phase.DONE: frozenset(),
}


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """Mutable; owned by DriverControl.

    Attributes:
        request_id: the name inside the pipeline; never used twice, unlike the user's.
        serial: order of arrival; FCFS is by this.
        endpoint: prompt tokens reused on every stage, not computed. Always 0 until stages keep
            prefixes.
        last_wave: the last wave that names the current attempt.
        prompt_logprobs: scores of prompt tokens 1, 2, ... gathered so far.
    """

    request_id: RequestId
    serial: int
    arrival: Arrival
    tokens: Int32Array
    queued_s: float
    phase: Phase = Phase.QUEUED
    attempt: int = 1
    endpoint: int = 0
    planned: int = 0
    computed: int = 0
    last_wave: WaveNumber = NO_WAVE
    produced: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    admitted_s: float | None = None
    first_wave_s: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """n."""
        return len(self.tokens)

    @property
    def known(self) -> int:
        """Tokens that can be computed: the prompt, and what was produced so far."""
        return self.num_prompt_tokens + len(self.produced)

    @property
    def wants_tokens(self) -> bool:
        """More tokens are to be produced."""
        return len(self.produced) < self.arrival.max_tokens

    def enter(self, phase: Phase) -> None:
        """Moves on; a move outside TRANSITIONS is a bug."""
        assert phase in TRANSITIONS[self.phase], f"{self.request_id}: {self.phase} -> {phase}"
        self.phase = phase

    def piece(self) -> Piece | None:
        """What is left to plan, or None. A request that failed before shares no wave."""
        assert self.endpoint <= self.planned <= self.known, (self.planned, self.known)
        if self.planned == self.known:
            return None
        return Piece(
            request_id=self.request_id,
            start=self.planned,
            remaining=self.known - self.planned,
            solo=self.attempt > 1,
        )

    def produced_in(self, start: int, length: int) -> tuple[int, ...]:
        """Tokens of [start, start + length) that are not the prompt's."""
        first = max(start - self.num_prompt_tokens, 0)
        return tuple(self.produced[first : max(start + length - self.num_prompt_tokens, 0)])

    def restart(self) -> None:
        """A new attempt: nothing computed so far counts."""
        self.enter(Phase.READY)
        self.attempt += 1
        self.endpoint = self.planned = self.computed = 0
        self.last_wave = NO_WAVE
        self.produced.clear()
        self.logprobs.clear()
        self.prompt_logprobs.clear()

    def result(
        self, reason: FinishReason, *, now: float, error: str | None = None
    ) -> PrefillResult:
        """What the caller gets."""
        served = reason in ("stop", "length")
        sampling = self.arrival.sampling
        return PrefillResult(
            request_id=self.arrival.user_id,
            token_ids=tuple(self.produced) if served else (),
            finish_reason=reason,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.endpoint,
            timings=RequestTimings(
                queued_s=self.queued_s,
                admitted_s=self.admitted_s,
                first_wave_s=self.first_wave_s,
                done_s=now,
            ),
            logprobs=tuple(self.logprobs) if served and sampling.logprobs is not None else None,
            prompt_logprobs=(
                (None, *self.prompt_logprobs)
                if served and sampling.prompt_logprobs is not None
                else None
            ),
            error=error,
        )
