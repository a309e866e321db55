"""DriverControl: everything the driver decides, as a pure machine. Facts in, effects out.

Owns: the live requests, the decision log, admission, the ring, rounds. May not: know a clock, a
thread or a network. Life of a request here: arrived -> announced (its tokens travel in a round) ->
ready (every stage has them) -> admitted (FCFS, a lane and room) -> planned into waves -> completed.
Leases, escrows and agreement take the place of `Admission`'s accounting between ready and admitted;
nothing else changes.

After every fact comes a *turn*: admit, plan waves while the ring has room, send a round if one is
due. A failing request fails alone: when a wave fails and nobody can say whose fault it was, all its
requests are tried again, each in waves of its own, so that the next failure names its culprit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wavepp.control.admission import Admission
from wavepp.control.facts import (
    AbortRequested,
    Arrival,
    Arrived,
    Effect,
    Fact,
    Finish,
    LaunchWave,
    RoundAnswered,
    SendRound,
    WaveCompleted,
)
from wavepp.control.limits import Limits, build_limits, refusal
from wavepp.control.log import DecisionLog
from wavepp.control.rounds import Rounds
from wavepp.control.states import Phase, RequestState
from wavepp.control.work import ErrorRecord, SpanOutput, StageFacts
from wavepp.errors import QueueFullError, RequestError
from wavepp.planner.packing import Cut
from wavepp.planner.planner import GreedyPlanner
from wavepp.planner.ring import Ring
from wavepp.protocol.messages import (
    Abort,
    Admit,
    Announce,
    Free,
    LogEntry,
    SpanPlan,
    Undo,
    WaveSchedule,
)
from wavepp.requests import FinishReason
from wavepp.units import LogNumber, RequestId

ATTEMPTS_MAX = 3
"""A request that was in this many failed waves is failed, whoever was at fault."""

ANNOUNCED_PER_LANE = 4
"""Requests announced ahead of admission, per lane: bounds the tokens that stages hold for waiting
requests.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverOptions:
    """The configuration as numbers; names as in EngineConfig. `ring_depth` is R, `wave_tokens_max`
    is M.
    """

    ring_depth: int
    wave_tokens_max: int
    max_num_seqs: int
    max_model_len: int | None = None
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    epoch: int = 1


@dataclass(slots=True)
class Counters:
    """What happened since the start."""

    finished: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0


class DriverControl:
    """The deciding side of one pipeline epoch."""

    def __init__(self, facts: Sequence[StageFacts], options: DriverOptions) -> None:
        """
        Raises:
            ConfigError: the stages disagree on what must be equal.
        """
        self.limits: Limits = build_limits(facts, max_model_len=options.max_model_len)
        self.options = options
        self.log = DecisionLog(len(facts))
        self.rounds = Rounds(self.log, num_stages=len(facts), epoch=options.epoch)
        self.ring: Ring[WaveSchedule] = Ring(options.ring_depth)
        self.admission = Admission(self.limits, lanes_max=options.max_num_seqs)
        self.planner = GreedyPlanner(
            wave_tokens_max=options.wave_tokens_max, block_size=self.limits.block_size
        )
        self.counters = Counters()
        self.progress_s = (
            0.0  # when a wave or a round last came back, or the first of them went out
        )
        self._live: dict[str, RequestState] = {}  # by the user's id
        self._by_id: dict[RequestId, RequestState] = {}
        self._serial = 0

    @property
    def num_live(self) -> int:
        """Requests whose caller still waits."""
        return len(self._live)

    @property
    def is_busy(self) -> bool:
        """Something is out that must come back."""
        return len(self.ring) > 0 or self.rounds.is_out

    def refusal(self, arrival: Arrival) -> RequestError | None:
        """Why this request can't be taken (now, or ever), or None."""
        if arrival.user_id in self._live:
            return RequestError(
                f"request_id {arrival.user_id!r} is in use by a request that has not finished",
                code="duplicate_request_id",
                param="request_id",
            )
        return refusal(self.limits, arrival) or self._queue_refusal(arrival)

    def handle(self, fact: Fact, *, now: float) -> list[Effect]:
        """Takes one fact at time `now` (seconds, monotonic); returns what is to be done, in order.

        Raises:
            RemoteProtocolError: a stage or a plane broke the protocol; the pipeline must stop.
        """
        if not self.is_busy:
            self.progress_s = now
        effects: list[Effect] = []
        match fact:
            case Arrived(arrival=arrival):
                self._arrived(arrival, now)
            case AbortRequested(user_id=user_id):
                effects += self._aborted(user_id, now)
            case RoundAnswered(replies=replies):
                self.progress_s = now
                for state in self.rounds.answered(replies):
                    if state.phase is Phase.ANNOUNCED:  # else it was aborted meanwhile
                        state.enter(Phase.READY)
            case WaveCompleted():
                self.progress_s = now
                effects += self._completed(fact, now)
            case _:
                raise TypeError(fact)
        return effects + self._turn(now)

    def check(self) -> None:
        """Asserts that all sums agree; with nothing live and nothing out, that nothing is left."""
        self.ring.check()
        self.admission.check()
        states = (*self.admission.waiting, *self.admission.admitted)
        assert {state.request_id for state in states} == set(self._by_id), states
        assert len(self._live) == len(self._by_id) == len(states), (len(self._live), len(states))
        if not self._live and not self.is_busy:
            assert not self.log.unacked(), self.log.unacked()

    def _queue_refusal(self, arrival: Arrival) -> QueueFullError | None:
        requests_max = self.options.max_num_queued_reqs
        if requests_max is not None and self.admission.num_waiting >= requests_max:
            return QueueFullError(
                f"{self.admission.num_waiting} requests wait; max_num_queued_reqs is "
                f"{requests_max}",
                code="queue_full",
            )
        tokens_max = self.options.max_num_queued_tokens
        tokens = self.admission.tokens_waiting + len(arrival.token_ids)
        if tokens_max is not None and self.admission.num_waiting and tokens > tokens_max:
            return QueueFullError(
                f"{tokens} tokens would wait, max_num_queued_tokens is {tokens_max}",
                code="queue_full",
            )
        return None

    def _arrived(self, arrival: Arrival, now: float) -> None:
        refused = self.refusal(arrival)
        assert refused is None, refused
        self._serial += 1
        state = RequestState(
            request_id=RequestId(f"{arrival.user_id}#{self._serial}"),
            serial=self._serial,
            arrival=arrival,
            tokens=arrival.token_ids.astype(np.int32),
            queued_s=now,
        )
        self._live[arrival.user_id] = state
        self._by_id[state.request_id] = state
        self.admission.enqueue(state)

    def _aborted(self, user_id: str, now: float) -> list[Effect]:
        state = self._live.get(user_id)
        if state is None:
            return []
        return [self._end(state, "abort", now=now)]

    def _completed(self, fact: WaveCompleted, now: float) -> list[Effect]:
        schedule = self.ring.complete(fact.wave)
        for ack in fact.acks:
            self.log.acknowledge(ack)
        failed: dict[RequestId, ErrorRecord] = {}
        for record in fact.errors:
            failed.setdefault(record.request_id, record)  # the first stage to fail says why
        outputs = {output.request_id: output for output in fact.outputs}
        effects: list[Effect] = []
        for span in schedule.spans:
            state = self._by_id.get(span.request_id)
            if state is None or state.attempt != span.attempt or state.phase is not Phase.ADMITTED:
                continue  # aborted, or this attempt was undone, while the wave was under way
            if span.request_id in failed:
                effects += self._failed(state, failed[span.request_id], now)
            else:
                effects += self._advanced(state, span, outputs.get(span.request_id), now)
        return effects

    def _advanced(
        self, state: RequestState, span: SpanPlan, output: SpanOutput | None, now: float
    ) -> list[Effect]:
        assert state.computed == span.start, (state.computed, span)
        state.computed = span.start + span.length
        self.counters.computed_tokens += span.length
        if output is not None:
            state.prompt_logprobs.extend(output.prompt_logprobs)
        if not span.final:
            return []
        if state.wants_tokens:
            assert output is not None, span
            assert output.token_id is not None, span
            state.produced.append(output.token_id)
            if output.logprobs is not None:
                state.logprobs.append(output.logprobs)
            if output.token_id in self.limits.eos_token_ids:
                return [self._end(state, "stop", now=now)]
        if state.wants_tokens:
            return []
        return [self._end(state, "length", now=now)]

    def _failed(self, state: RequestState, record: ErrorRecord, now: float) -> list[Effect]:
        if record.guilty or state.attempt >= ATTEMPTS_MAX:
            message = f"stage {record.stage}: {record.message}"
            return [self._end(state, "error", now=now, error=message)]
        self.log.append(
            Undo(request_id=state.request_id, attempt=state.attempt, fence_wave=state.last_wave)
        )
        self.admission.release(state)
        state.restart()
        self.admission.enqueue(state)
        return []

    def _end(
        self, state: RequestState, reason: FinishReason, *, now: float, error: str | None = None
    ) -> Finish:
        """The request leaves, from any phase; what it holds on stages goes behind its last wave."""
        if state.phase is not Phase.QUEUED:  # stages know it
            ending = Abort if reason == "abort" else Free
            self.log.append(
                ending(
                    request_id=state.request_id, attempt=state.attempt, fence_wave=state.last_wave
                )
            )
        self.admission.release(state)
        state.enter(Phase.DONE)
        del self._live[state.arrival.user_id]
        del self._by_id[state.request_id]
        self.counters.finished += 1
        if reason in ("stop", "length"):
            self.counters.prompt_tokens += state.num_prompt_tokens
            self.counters.cached_tokens += state.endpoint
        result = state.result(reason, now=now, error=error)
        return Finish(user_id=state.arrival.user_id, result=result)

    def _turn(self, now: float) -> list[Effect]:
        while (state := self.admission.admit_head()) is not None:
            state.admitted_s = now
            self.log.append(
                Admit(request_id=state.request_id, attempt=state.attempt, endpoint=state.endpoint)
            )
        effects: list[Effect] = []
        while self.ring.has_room and (schedule := self._plan(now)) is not None:
            effects.append(LaunchWave(schedule=schedule))
        if self._round_due():
            effects.append(SendRound(messages=self.rounds.send(self._announce())))
        return effects

    def _plan(self, now: float) -> WaveSchedule | None:
        pieces = [piece for state in self.admission.admitted if (piece := state.piece())]
        cuts = self.planner.plan(pieces, now=now)
        if not cuts:
            return None
        number = self.ring.next_number
        spans = tuple(self._span(cut, now) for cut in cuts)
        for span in spans:
            self._by_id[span.request_id].last_wave = number
        entries: tuple[LogEntry, ...] = self.log.unacked()
        schedule = WaveSchedule(
            epoch=self.options.epoch,
            wave=number,
            spans=spans,
            apply_to=self.log.last,
            entries=entries,
        )
        self.ring.launch(number, schedule)
        return schedule

    def _span(self, cut: Cut, now: float) -> SpanPlan:
        state = self._by_id[cut.request_id]
        assert state.planned == cut.start, (state.planned, cut)
        state.planned = cut.start + cut.length
        if state.first_wave_s is None:
            state.first_wave_s = now
        return SpanPlan(
            request_id=cut.request_id,
            attempt=state.attempt,
            start=cut.start,
            length=cut.length,
            final=cut.final,
            produced=state.produced_in(cut.start, cut.length),
        )

    def _round_due(self) -> bool:
        """Somebody waits to be announced, or the log must reach the stages and no wave will bring
        it.
        """
        if self.rounds.is_out:
            return False
        return bool(self._to_announce()) or (not len(self.ring) and bool(self.log.unacked()))

    def _to_announce(self) -> list[RequestState]:
        window = self.admission.waiting[: ANNOUNCED_PER_LANE * self.options.max_num_seqs]
        return [state for state in window if state.phase is Phase.QUEUED]

    def _announce(self) -> list[tuple[RequestState, LogNumber]]:
        announced: list[tuple[RequestState, LogNumber]] = []
        for state in self._to_announce():
            state.enter(Phase.ANNOUNCED)
            number = self.log.append(
                Announce(
                    request_id=state.request_id,
                    attempt=state.attempt,
                    num_tokens=state.num_prompt_tokens,
                )
            )
            announced.append((state, number))
        return announced
