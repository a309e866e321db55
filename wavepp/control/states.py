"""One live request as the driver sees it, beside the leader's record of it.

Owns: what the caller asked for and what was produced. May not: decide, or know phases, endpoints
and positions: those are in the leader's `Record`.

    known = prompt + produced tokens
    |---- reused ----|---- computed ----|---- planned (in the ring) ----|---- remaining ----|
    0             endpoint          computed                         planned              known
"""

from __future__ import annotations

from dataclasses import dataclass, field

from wavepp.cache.keys import Hash, encode_namespace, make_prompt
from wavepp.cache.types import Prompt
from wavepp.control.facts import Arrival
from wavepp.planner.packing import Piece
from wavepp.protocol.facts import RequestArrived
from wavepp.requests import FinishReason, PositionLogprobs, PrefillResult, RequestTimings
from wavepp.units import RequestId


@dataclass(slots=True)
class Counters:
    """What happened since the start. Tokens; `prefix_*` at admission, the others at the end.

    `past_waves`, `past_rounds`: of the epochs before this one.
    """

    finished: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    past_waves: int = 0
    past_rounds: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """Mutable; owned by DriverControl.

    Attributes:
        request_id: the name inside the pipeline; never used twice, unlike the user's.
        prompt: tokens and block keys, made once.
        serial: of its arrival, over all epochs.
        failures: failed waves it was in.
        losses: times it was being computed when a stage died.
        produced: stays when an attempt fails: the caller may have been told of it.
        prompt_logprobs: scores of prompt tokens 1, 2, ... gathered so far.
        admitted_as: the log number of its latest admission.
    """

    request_id: RequestId
    arrival: Arrival
    prompt: Prompt
    queued_s: float
    serial: int
    failures: int = 0
    losses: int = 0
    produced: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    hint_s: float | None = None
    admitted_s: float | None = None
    admitted_as: int = 0
    first_wave_s: float | None = None
    first_token_s: float | None = None

    @property
    def known(self) -> int:
        """Tokens that can be computed: the prompt, and what was produced so far."""
        return self.prompt.num_tokens + len(self.produced)

    @property
    def wants_tokens(self) -> bool:
        """More tokens are to be produced."""
        return len(self.produced) < self.arrival.max_tokens

    def arrived(self) -> RequestArrived:
        """What the leader is told of it."""
        return RequestArrived(
            request_id=self.request_id,
            serial=self.serial,
            num_tokens=self.prompt.num_tokens,
            room_tokens=self.prompt.room_tokens,
            keys=self.prompt.keys,
            reuse_cap=self.prompt.reuse_cap,
        )

    def piece(self, planned: int) -> Piece | None:
        """What is left to plan, or None. A request that failed before shares no wave."""
        assert planned <= self.known, (planned, self.known)
        if planned == self.known:
            return None
        return Piece(
            request_id=self.request_id,
            start=planned,
            remaining=self.known - planned,
            solo=self.failures > 0,
        )

    def produced_in(self, start: int, length: int) -> tuple[int, ...]:
        """Tokens of [start, start + length) that are not the prompt's."""
        count = self.prompt.num_tokens
        return tuple(self.produced[max(start - count, 0) : max(start + length - count, 0)])

    def restart(self, *, failed: bool = True) -> None:
        """A new attempt: what was computed so far is computed again, with the tokens produced so
        far behind the prompt. `failed`: a wave of the last attempt did."""
        self.failures += failed
        self.prompt_logprobs.clear()

    def lost_too_often(self) -> str:
        """Why it is not tried again."""
        return f"this request was being computed each of the {self.losses} times that a stage died"

    def result(
        self, reason: FinishReason, *, cached: int, now: float, error: str | None = None
    ) -> PrefillResult:
        """What the caller gets; `cached`: prompt tokens reused on every stage."""
        served = reason in ("stop", "length")
        sampling = self.arrival.sampling
        last = self.produced[-1] if self.produced and reason == "stop" else None
        return PrefillResult(
            request_id=self.arrival.user_id,
            token_ids=tuple(self.produced) if served else (),
            finish_reason=reason,
            num_prompt_tokens=self.prompt.num_tokens,
            num_cached_tokens=cached,
            timings=RequestTimings(
                queued_s=self.queued_s,
                hint_s=self.hint_s,
                admitted_s=self.admitted_s,
                first_wave_s=self.first_wave_s,
                first_token_s=self.first_token_s,
                done_s=now,
            ),
            logprobs=tuple(self.logprobs) if served and sampling.logprobs is not None else None,
            prompt_logprobs=(
                (None, *self.prompt_logprobs[: self.prompt.num_tokens - 1])
                if served and sampling.prompt_logprobs is not None
                else None
            ),
            error=error,
            stop_reason=last if last in self.arrival.stop_token_ids else None,
        )


def make_state(
    arrival: Arrival, *, serial: int, block_size: int, hash_bytes: Hash, now: float
) -> RequestState:
    """A request that has arrived, with its block keys."""
    prompt = make_prompt(
        arrival.token_ids,
        block_size,
        namespace=encode_namespace(arrival.namespace),
        room_tokens=max(arrival.max_tokens - 1, 0),
        reusable=arrival.sampling.prompt_logprobs is None,
        hash_bytes=hash_bytes,
    )
    name = RequestId(f"{arrival.user_id}#{serial}")
    return RequestState(
        request_id=name, arrival=arrival, prompt=prompt, queued_s=now, serial=serial
    )
