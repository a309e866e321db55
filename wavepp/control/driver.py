"""DriverControl: everything the driver decides, as a pure machine. Facts in, effects out.

Owns: the live requests, the decision log, the ring, rounds; the LeaderMachine decides on admission,
the planner on waves. May not: know a clock, a thread or a network. Life of a request: the table in
`protocol/states.py`.

After every fact comes a *turn*: plan waves while the ring has room, send a round if one is due. A
failing request fails alone: when a wave fails and nobody can say whose fault it was, all its
requests are tried again, each in waves of its own, so that the next failure names its culprit.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from wavepp.cache.keys import Hash
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
    TellProduced,
    TimerFired,
    WaveCompleted,
)
from wavepp.control.limits import (
    Limits,
    build_limits,
    id_refusal,
    leader_options,
    queue_refusal,
    refusal,
)
from wavepp.control.log import DecisionLog
from wavepp.control.options import DriverOptions
from wavepp.control.planning import WavePlanning
from wavepp.control.rounds import Rounds, make_record
from wavepp.control.states import Counters, RequestState, make_state
from wavepp.control.work import ErrorRecord, SpanOutput, StageFacts
from wavepp.errors import RequestError
from wavepp.planner.demand import Demand
from wavepp.planner.packing import Cut
from wavepp.protocol.facts import (
    AttemptFailed,
    LeaderEffect,
    LeaderFact,
    Refused,
    RequestCancelled,
    RequestFailed,
    RequestServed,
    RolledBack,
    SpanPlanned,
    StageAnswered,
    StageCounted,
    WaveReturned,
)
from wavepp.protocol.leader import LeaderMachine
from wavepp.protocol.messages import Admit, Decision, SpanPlan, StageAck, WaveSchedule
from wavepp.protocol.states import ADMITTED, QUEUED, Phase
from wavepp.requests import FinishReason, Produced
from wavepp.units import LogNumber, RequestId, WaveNumber

PLANNED = frozenset({Phase.RUNNING, Phase.COMPLETING})
FAILURES_MAX = 3
"""A request that was in this many failed waves is failed, whoever was at fault."""


class DriverControl:
    """The deciding side of one pipeline epoch.

    Args:
        hash_bytes: of block keys; a test may hand in a bad one.

    Raises:
        ConfigError: the stages disagree on what must be equal, or wave sizes do not fit their
            blocks.
    """

    def __init__(
        self,
        facts: Sequence[StageFacts],
        options: DriverOptions,
        *,
        hash_bytes: Hash = xxhash.xxh3_128_digest,
    ) -> None:
        self.limits: Limits = build_limits(
            facts, max_model_len=options.max_model_len, headroom_tokens=options.headroom_tokens
        )
        self.options = options
        self.log = DecisionLog(len(facts))
        self.rounds = Rounds(self.log, num_stages=len(facts), epoch=options.epoch)
        self.waves = WavePlanning(options, block_size=self.limits.block_size, num_stages=len(facts))
        self.ring = self.waves.ring
        self.leader = LeaderMachine(leader_options(options, self.limits, len(facts)))
        self.counters = Counters()
        self.progress_s = 0.0  # when something last came back, or the first of it went out
        self._hash_bytes = hash_bytes
        self._live: dict[str, RequestState] = {}  # by the user's id
        self._by_id: dict[RequestId, RequestState] = {}
        self._serial = 0
        self._admitting: RequestId | None = None  # in serial admission: whom the planner waits for
        self.over: str | None = None  # why this epoch has ended

    @property
    def num_live(self) -> int:
        """Requests whose caller still waits."""
        return len(self._live)

    @property
    def is_busy(self) -> bool:
        """Something is out that must come back."""
        return self.over is None and (len(self.ring) > 0 or self.rounds.is_out)

    @property
    def next_timer(self) -> float | None:
        """When to say TimerFired if nothing else happens before; None: no need to."""
        if self.over is not None:
            return None
        timers = [self.waves.wait_until]
        if not self.rounds.is_out:
            timers.append(self.leader.next_timer())
        return min((timer for timer in timers if timer is not None), default=None)

    def refusal(self, arrival: Arrival) -> RequestError | None:
        """Why this request can't be taken (now, or ever), or None."""
        if arrival.user_id in self._live:
            return id_refusal(arrival)
        waiting = self.leader.num_waiting, self.leader.tokens_waiting
        return refusal(self.limits, arrival) or queue_refusal(self.options, arrival, *waiting)

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
                self.waves.next_turn()
            case AbortRequested(user_id=user_id):
                state = self._live.get(user_id)
                if state is not None:
                    effects.append(self._end(state, "abort", now=now))
            case RoundAnswered(epoch=epoch) | WaveCompleted(epoch=epoch) if (
                self.over is not None or epoch < self.options.epoch
            ):
                return []  # it comes too late
            case RoundAnswered():
                self.progress_s = now
                effects += self._answered(fact, now)
            case WaveCompleted():
                self.progress_s = now
                effects += self._completed(fact, now)
            case TimerFired():
                pass  # the turn looks at the clock
            case _:
                raise TypeError(fact)
        return effects + self._turn(now)

    def stop(self, reason: str) -> None:
        """The epoch is over: a stage died. Requests still come and go; nothing is planned or sent,
        and what comes back is ignored. Those that were being computed have lost one attempt."""
        assert self.over is None, self.over
        self.over = reason
        for state in self._live.values():
            record = self.leader.record(state.request_id)
            state.losses += record is not None and record.phase in PLANNED

    def take_over(self, before: DriverControl, *, now: float) -> list[Effect]:
        """Begins this epoch with what the one before has not finished, as if it arrived now, in
        its order: tokens that were produced follow the prompt. Who was being computed when stages
        died, more often than `max_request_retries`, ends with an error."""
        assert before.over is not None, "two epochs at once"
        assert not self._by_id, "this epoch has begun"
        self.counters, self._serial = before.counters, before._serial
        self.counters.past_waves += before.ring.completed
        self.counters.past_rounds += before.rounds.number
        self.leader.books.tally = before.leader.books.tally
        self.progress_s = now
        effects: list[Effect] = []
        for state in before._live.values():
            state.restart(failed=False)
            refused = refusal(self.limits, state.arrival)
            error = None if refused is None else refused.message
            if state.losses > self.options.max_request_retries:
                error = f"{before.over}; {state.lost_too_often()}"
            self._live[state.arrival.user_id] = self._by_id[state.request_id] = state
            if error is None:
                self._tell(state.arrived(), now)
            else:
                effects.append(self._finish(state, "error", now=now, error=error))
        return effects + self._turn(now)

    def check(self) -> None:
        """Asserts that all sums agree; with nothing live and nothing out, that nothing is left."""
        self.ring.check()
        self.leader.check()
        assert set(self._by_id) == set(self.leader.books.records), set(self._by_id)
        assert {state.request_id for state in self._live.values()} == set(self._by_id)
        if not self._live and not self.is_busy and self.over is None:
            assert not self.log.unacked(), self.log.unacked()
            assert self.leader.books.gate.is_idle

    # -- arrivals and endings --------------------------------------------------------------------

    def _arrived(self, arrival: Arrival, now: float) -> None:
        refused = self.refusal(arrival)
        assert refused is None, refused
        self._serial += 1
        state = make_state(
            arrival,
            serial=self._serial,
            block_size=self.limits.block_size,
            hash_bytes=self._hash_bytes,
            now=now,
        )
        self._live[arrival.user_id] = self._by_id[state.request_id] = state
        self._tell(state.arrived(), now)

    def _end(
        self, state: RequestState, reason: FinishReason, *, now: float, error: str | None = None
    ) -> Finish:
        """The request leaves, from any phase; what it holds on stages goes behind its last wave."""
        record = self.leader.record(state.request_id)
        assert record is not None, state.request_id
        cached = record.run.endpoint
        fact: RequestCancelled | RequestFailed | RequestServed
        if reason == "abort":
            fact = RequestCancelled(request_id=state.request_id)
        elif reason == "error":
            fact = RequestFailed(request_id=state.request_id)
        else:
            fact = RequestServed(request_id=state.request_id)
            self.counters.prompt_tokens += state.prompt.num_tokens
            self.counters.cached_tokens += cached
        self._tell(fact, now)
        return self._finish(state, reason, cached=cached, now=now, error=error)

    def _finish(
        self,
        state: RequestState,
        reason: FinishReason,
        *,
        now: float,
        cached: int = 0,
        error: str | None = None,
    ) -> Finish:
        """The leader knows it no more, and neither do we."""
        del self._live[state.arrival.user_id]
        del self._by_id[state.request_id]
        self.counters.finished += 1
        result = state.result(reason, cached=cached, now=now, error=error)
        return Finish(user_id=state.arrival.user_id, result=result)

    # -- the leader ------------------------------------------------------------------------------

    def _tell(self, fact: LeaderFact, now: float) -> list[Effect]:
        """Tells the leader and logs what it decides; returns refusals for the callers."""
        effects: list[Effect] = []
        for ordered in self.leader.handle(fact, now=now):
            finish = self._perform(ordered, now)
            if finish is not None:
                effects.append(finish)
        return effects

    def _perform(self, ordered: LeaderEffect, now: float) -> Finish | None:
        if not isinstance(ordered, Refused):
            self._log(ordered, now)
            return None
        why = ordered.refusal
        message = (
            f"stage {ordered.stage} can't hold it: {why.needed} units of {why.group} are needed, "
            f"{why.available} are there"
        )
        return self._finish(self._by_id[ordered.request_id], "error", now=now, error=message)

    def _log(self, decision: Decision, now: float) -> LogNumber:
        if isinstance(decision, Admit):
            state = self._by_id[decision.request_id]
            state.admitted_s = now
            self.counters.prefix_queries += state.prompt.num_tokens
            self.counters.prefix_hits += decision.endpoint
            state.admitted_as = self.log.last + 1
        return self.log.append(decision)

    def _answered(self, fact: RoundAnswered, now: float) -> list[Effect]:
        self.rounds.answered(fact.replies)
        effects: list[Effect] = []
        for reply in fact.replies:
            self._counted(reply.ack, now)
            stage = reply.ack.stage
            effects += self._tell(StageAnswered(stage=stage, answer=reply.answer), now)
        for hint in fact.replies[0].answer.hints:
            state = self._by_id.get(hint.request_id)
            if state is not None and state.hint_s is None:
                state.hint_s = now
        return effects

    def _counted(self, ack: StageAck, now: float) -> None:
        self._tell(StageCounted(stage=ack.stage, counters=ack.counters), now)

    # -- waves that came back ----------------------------------------------------------------------

    def _completed(self, fact: WaveCompleted, now: float) -> list[Effect]:
        schedule = self.waves.complete(fact.wave, fact.stage_seconds, failed=bool(fact.errors))
        for ack in fact.acks:
            self.log.acknowledge(ack)
            self._counted(ack, now)
        failed: dict[RequestId, ErrorRecord] = {}
        for record in fact.errors:
            failed.setdefault(record.request_id, record)  # the first stage to fail says why
        spans = [span for span in schedule.spans if self._is_live(span)]
        computed = [span for span in spans if span.request_id not in failed]
        ends = tuple((span.request_id, span.start + span.length) for span in computed)
        for span in computed:
            record_of = self.leader.record(span.request_id)
            assert record_of is not None, span
            assert record_of.run.computed == span.start, (record_of.run, span)
            self.counters.computed_tokens += span.length
        self._tell(WaveReturned(wave=fact.wave, computed=ends), now)
        outputs = {output.request_id: output for output in fact.outputs}
        effects: list[Effect] = []
        for span in spans:
            state = self._by_id[span.request_id]
            if span.request_id in failed:
                effects += self._failed(state, failed[span.request_id], now)
            else:
                effects += self._advanced(state, span, outputs.get(span.request_id), now)
        return effects

    def _is_live(self, span: SpanPlan) -> bool:
        """Not aborted, and this attempt was not undone, while the wave was under way."""
        record = self.leader.record(span.request_id)
        return record is not None and record.attempt == span.attempt and record.phase in ADMITTED

    def _advanced(
        self, state: RequestState, span: SpanPlan, output: SpanOutput | None, now: float
    ) -> list[Effect]:
        if output is not None:
            state.prompt_logprobs.extend(output.prompt_logprobs)
        if not span.final:
            return []
        if not state.wants_tokens:
            return [self._end(state, "length", now=now)]
        assert output is not None, span
        assert output.token_id is not None, span
        state.produced.append(output.token_id)
        if state.first_token_s is None:
            state.first_token_s = now
        if output.logprobs is not None:
            state.logprobs.append(output.logprobs)
        if state.arrival.is_end(output.token_id, self.limits.eos_token_ids):
            return [self._end(state, "stop", now=now)]
        if not state.wants_tokens:
            return [self._end(state, "length", now=now)]
        if not state.arrival.stream:
            return []
        produced = Produced(token_id=output.token_id, logprobs=output.logprobs)
        return [TellProduced(user_id=state.arrival.user_id, produced=produced)]

    def _failed(self, state: RequestState, record: ErrorRecord, now: float) -> list[Effect]:
        why = record.rollback
        if why is not None and (why.refusal.reason == "gone" or not why.alone):
            state.restart(failed=False)
            fact = RolledBack(
                request_id=state.request_id,
                stage=record.stage,
                refusal=why.refusal,
                releases=why.releases,
            )
            return self._tell(fact, now)
        state.restart()
        if record.guilty or why is not None or state.failures >= FAILURES_MAX:
            message = f"stage {record.stage}: {record.message}"
            return [self._end(state, "error", now=now, error=message)]
        return self._tell(AttemptFailed(request_id=state.request_id), now)

    # -- the turn --------------------------------------------------------------------------------

    def _turn(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        self.waves.wait_until = None
        if self.over is not None:
            return effects
        if self._is_admitting_one():
            if not self.rounds.is_out and (step := self._round(now)) is not None:
                effects.append(step)
            if self.rounds.is_out and self._is_admitting_one():
                return effects
        self._admitting = None
        while self.ring.has_room and (launch := self._plan(now)) is not None:
            effects.append(launch)
        if not self.rounds.is_out and (order := self._round(now)) is not None:
            effects.append(order)
        return effects

    def _is_admitting_one(self) -> bool:
        """Serial admission is inside the planning loop: nothing is planned between a request's
        first walk and the word of every stage that it was enqueued, or that it has to wait."""
        if self._admitting is None:
            return False
        record = self.leader.record(self._admitting)
        if record is None or record.phase in (Phase.DEFERRED, Phase.WAITING):
            return False
        is_enqueued = self.log.acked_min >= self._by_id[record.request_id].admitted_as
        return record.phase not in ADMITTED or not is_enqueued

    def _demand(self) -> Demand:
        """What admitted requests have left to plan, first come first served, and what of them is
        under way."""
        left = (
            self._by_id[record.request_id].piece(record.run.planned)
            for record in self.leader.admitted
        )
        in_admission, behind = self.leader.unadmitted
        return self.waves.demand(
            (piece for piece in left if piece is not None),
            self._is_live,
            in_admission=in_admission,
            behind=behind,
        )

    def _plan(self, now: float) -> LaunchWave | None:
        """The next wave. Every span of a plan is accepted: an admitted request has its lane and
        its capacity."""
        plan = self.waves.plan(self._demand(), now=now)
        if not plan.cuts:
            return None
        number = self.ring.next_number
        schedule = WaveSchedule(
            epoch=self.options.epoch,
            wave=number,
            spans=tuple(self._span(cut, number, now) for cut in plan.cuts),
            apply_to=self.log.last,
            entries=self.log.unacked(),
        )
        self.waves.launch(schedule, plan.cuts, now=now)
        return LaunchWave(schedule=schedule, budget=plan.budget)

    def _span(self, cut: Cut, number: WaveNumber, now: float) -> SpanPlan:
        state, record = self._by_id[cut.request_id], self.leader.record(cut.request_id)
        assert record is not None, cut
        assert record.run.planned == cut.start, (record.run, cut)
        end = cut.start + cut.length
        self._tell(
            SpanPlanned(request_id=cut.request_id, wave=number, end=end, last=cut.final), now
        )
        if state.first_wave_s is None:
            state.first_wave_s = now
        return SpanPlan(
            request_id=cut.request_id,
            attempt=record.attempt,
            start=cut.start,
            length=cut.length,
            final=cut.final,
            produced=state.produced_in(cut.start, cut.length),
        )

    def _may_claim(self, request_id: RequestId | None) -> bool:
        record = None if request_id is None else self.leader.record(request_id)
        return record is not None and record.phase in QUEUED

    def _round(self, now: float) -> SendRound | None:
        """The next round, if there is anything to say. The log is flushed when no wave will bring
        it, or when somebody waits for what it gives back."""
        somebody_waits = not len(self.ring) or self.leader.num_waiting > 0
        enqueues = self._is_admitting_one() and not self._may_claim(self._admitting)
        plan = self.leader.next_round(
            now=now,
            work_wanted=self.waves.work_wanted(self._demand()),
            flush=(somebody_waits or enqueues) and bool(self.log.unacked()),
            nobody_new=enqueues,
        )
        if plan is None:
            return None
        if self.options.admission == "serial" and not enqueues:
            self._admitting = plan.subject
        for decision in plan.decisions:
            self._log(decision, now)
        prompts = [
            make_record(self._by_id[announce.request_id], self._log(announce, now))
            for announce in plan.announce
        ]
        return SendRound(messages=self.rounds.send(prompts, plan.ask))
