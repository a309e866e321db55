"""LeaderMachine: the deciding side of admission. Facts in, decisions out; nobody else decides.

Owns every live request's lifecycle, its votes and verdicts, and the decisions that follow. May not:
know a clock (time is an argument), a network, a block, or what is in a wave. Paper, section on
admission.

    handle(fact, now)          one fact; returns decisions for the log, in order
    next_round(now, ...)       None, or what the next round carries; called when no round is out

    arrived -> announced -> ready -> claiming (-> retrying) -> admitted -> running -> completing
    round 1: announcement, tokens, hint     round 2: lease + escrow + commit + vote     admitted

A round, as composed by `next_round` (`RoundComposer`):
    announce    requests near the front that stages do not know
    hints       for those, and for requests near the front whose hints some stage has outdated
    claims      first come, first served among the ready ones, within the limits (`AdmissionGate`)
    nothing     when it only fetches votes on Retry decisions, or must carry the log

A round never blocks planning: between its sending and its answers the driver goes on, and whatever
happens meanwhile (a cancellation, a wave) is a fact like any other. Answers that name an attempt
that is over change nothing.
"""

from __future__ import annotations

from wavepp.cache.types import Refusal, junction_of
from wavepp.errors import LocalProtocolError, RemoteProtocolError
from wavepp.protocol import agreement
from wavepp.protocol.books import Books, LeaderOptions
from wavepp.protocol.composer import RoundComposer
from wavepp.protocol.facts import (
    AttemptFailed,
    LeaderEffect,
    LeaderFact,
    Refused,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestServed,
    RolledBack,
    RoundPlan,
    SpanPlanned,
    StageAnswered,
    StageCounted,
    WaveReturned,
)
from wavepp.protocol.messages import Abort, Admit, Decision, Free, Undo
from wavepp.protocol.record import ClaimState, Record, RunState
from wavepp.protocol.states import ADMITTED, ENDED, HOLDING, UNDECIDED, Event, Lifecycle, Phase
from wavepp.protocol.votes import ClaimVote, HintReply, Junction, Retry, StageCounters
from wavepp.units import RequestId, StageIndex


class LeaderMachine:
    """The leader of one pipeline epoch. A new epoch gets a new one; everything arrives again."""

    def __init__(self, options: LeaderOptions) -> None:
        self.options = options
        self.books = Books(options)
        self._composer = RoundComposer(self.books)

    # -- what others may know --------------------------------------------------------------------

    def record(self, request_id: RequestId) -> Record | None:
        """A live request, to read; None when it has ended."""
        return self.books.records.get(request_id)

    @property
    def admitted(self) -> tuple[Record, ...]:
        """Requests that can be planned, in order of arrival."""
        return tuple(record for record in self.books.gate.holders if record.phase in ADMITTED)

    @property
    def num_waiting(self) -> int:
        """Requests that hold nothing yet."""
        return len(self.books.waiting)

    @property
    def tokens_waiting(self) -> int:
        """Prompt tokens of those."""
        return self.books.waiting.tokens

    @property
    def unadmitted(self) -> tuple[int, int]:
        """Requests that may join a wave soon: stages vote on them, or hints are on the way and
        there is a lane; those behind a head that waits for capacity only wait. And how many only
        wait.
        """
        gate = self.books.gate
        voting = sum(record.phase in UNDECIDED for record in gate.holders)
        coming, lanes = 0, gate.lanes_free
        for record in self.books.near() if lanes > 0 else ():
            if coming == lanes or record.phase is Phase.WAITING:
                break
            coming += record.phase is not Phase.DEFERRED
        return voting + coming, self.num_waiting - coming

    def lease_times(self) -> list[float]:
        """When each lease that is not materialised everywhere was asked for."""
        holders = self.books.gate.holders
        return [record.claim.since_s for record in holders if not record.run.materialized]

    def next_timer(self) -> float | None:
        """When the earliest deferral ends by itself; a round may be due then."""
        deferred = [
            record.wait.until
            for record in self.books.near()
            if record.phase is Phase.DEFERRED and record.wait.until is not None
        ]
        return min(deferred, default=None)

    def next_round(
        self, *, now: float, work_wanted: int, flush: bool = False, nobody_new: bool = False
    ) -> RoundPlan | None:
        """What the next round carries, or None when there is nothing to say. Call it when no round
        is out; log its decisions, then its announcements, then send it.

        Args:
            work_wanted: tokens of admitted work that the ring lacks; while it is above 0, nobody
                waits for another's prefix. What is being claimed counts as work to come.
            flush: the log has to reach the stages, and no wave will bring it.
            nobody_new: in serial admission, another request is still being admitted.
        """
        return self._composer.compose(
            now=now, work_wanted=work_wanted, flush=flush, nobody_new=nobody_new
        )

    # -- facts -----------------------------------------------------------------------------------

    def handle(self, fact: LeaderFact, *, now: float) -> list[LeaderEffect]:
        """Takes one fact; returns decisions, in log order, and refusals to tell.

        Raises:
            LocalProtocolError: a fact that can't be, such as a span of a request not admitted.
            RemoteProtocolError: a stage's vote breaks the protocol.
        """
        match fact:
            case RequestArrived():
                self._arrived(fact)
            case RequestCancelled(request_id=request_id):
                record = self.books.records.get(request_id)
                return [] if record is None else self._end(record, Event.ABORT, now)
            case StageAnswered():
                return self._answered(fact, now)
            case StageCounted(stage=stage, counters=counters):
                self._counted(stage, counters)
            case SpanPlanned():
                self._planned(fact, now)
            case WaveReturned():
                self._wave_returned(fact)
            case RequestServed(request_id=request_id):
                return self._end(self._live(request_id), Event.FINISH, now)
            case RequestFailed(request_id=request_id):
                return self._end(self._live(request_id), Event.FAIL, now)
            case AttemptFailed(request_id=request_id):
                return self._restart(self._live(request_id), now)
            case RolledBack():
                return self._rolled_back(fact, now)
            case _:
                raise TypeError(fact)
        return []

    def check(self) -> None:
        """Asserts that queue, lanes and records agree, and that nothing ended is left."""
        self.books.waiting.check()
        self.books.gate.check()
        waiting = self.books.waiting.first(len(self.books.waiting))
        names = [record.request_id for record in (*waiting, *self.books.gate.holders)]
        assert sorted(names) == sorted(self.books.records), names
        for record in self.books.records.values():
            assert record.phase not in ENDED, record.life.story()
            assert (record.phase in HOLDING) == self.books.gate.holds(record.request_id), (
                record.phase
            )
            assert record.claim.limit <= record.claim.candidate, record.claim
            assert (record.phase is Phase.DEFERRED) == (record.wait.donor is not None), record.wait

    def _arrived(self, fact: RequestArrived) -> None:
        if fact.request_id in self.books.records:
            raise LocalProtocolError(f"{fact.request_id} arrived twice")
        record = Record(
            arrival=fact,
            life=Lifecycle(fact.request_id, self.books.edges),
            claim=ClaimState(reuse_max=fact.reuse_cap),
        )
        limit = self.options.oversized_over
        record.claim.oversized = limit is not None and fact.num_tokens + fact.room_tokens > limit
        self.books.records[fact.request_id] = record
        self.books.waiting.add(record)

    def _counted(self, stage: StageIndex, counters: StageCounters) -> None:
        known = self.books.counters[stage]
        self.books.counters[stage] = StageCounters(
            releases=max(known.releases, counters.releases),
            hint_version=max(known.hint_version, counters.hint_version),
        )

    def _planned(self, fact: SpanPlanned, now: float) -> None:
        record = self._live(fact.request_id)
        if fact.end <= record.run.planned or fact.wave < record.run.last_wave:
            raise LocalProtocolError(f"{fact} after {record.run}. Story: {record.life.story()}")
        record.life.move(Event.PLAN_LAST if fact.last else Event.PLAN, now=now)
        record.run.planned = fact.end
        record.run.last_wave = fact.wave

    def _wave_returned(self, fact: WaveReturned) -> None:
        self.books.gate.wave_returned(fact.wave)
        for request_id, computed in fact.computed:
            record = self.books.records.get(request_id)
            if record is not None and record.phase in ADMITTED:
                assert computed <= record.run.planned, (fact, record.run)
                record.run.computed = max(record.run.computed, computed)
                record.run.materialized = True

    def _live(self, request_id: RequestId) -> Record:
        record = self.books.records.get(request_id)
        if record is None:
            raise LocalProtocolError(f"{request_id} is not live")
        return record

    # -- endings ---------------------------------------------------------------------------------

    def _end(self, record: Record, event: Event, now: float) -> list[LeaderEffect]:
        """The request leaves, from any phase; stages give back behind its last wave."""
        known = record.phase is not Phase.ARRIVED  # else no stage has heard of it
        self._leave(record)
        record.life.move(event, now=now)
        del self.books.records[record.request_id]
        if not known:
            return []
        ending = Abort if event is Event.ABORT else Free
        return [
            ending(
                request_id=record.request_id,
                attempt=record.attempt,
                fence_wave=record.run.last_wave,
            )
        ]

    def _restart(self, record: Record, now: float) -> list[LeaderEffect]:
        """This attempt ends behind its last wave; the request is ready for another."""
        undo = self._undo(record, Event.RESTART, now)
        record.run = RunState()
        return [undo]

    def _rolled_back(self, fact: RolledBack, now: float) -> list[LeaderEffect]:
        """As a restart, but it waits for a release on the stage that had no room. A prefix that is
        gone needs no waiting: the next claim finds a lower endpoint."""
        self.books.tally.rolled_back += 1
        record = self._live(fact.request_id)
        claim = record.claim
        claim.rollbacks += 1
        # The stage counts giving back what it refused as one release.
        claim.refused = {} if fact.refusal.reason == "gone" else {fact.stage: fact.releases + 1}
        undo = self._undo(record, Event.ROLL_BACK, now)
        record.run = RunState()
        return [undo]

    def _undo(self, record: Record, event: Event, now: float) -> Decision:
        """Back into the queue: escrow, then lease, on every stage."""
        undo = Undo(
            request_id=record.request_id,
            attempt=record.attempt,
            fence_wave=record.run.last_wave,
        )
        self.books.gate.release(record)
        record.life.move(event, now=now)
        record.next_attempt()
        self.books.waiting.add(record)
        return undo

    def _leave(self, record: Record) -> None:
        if record.phase in HOLDING:
            self.books.gate.release(record)
        else:
            self.books.waiting.remove(record)

    # -- answers ---------------------------------------------------------------------------------

    def _answered(self, fact: StageAnswered, now: float) -> list[LeaderEffect]:
        for reply in fact.answer.hints:
            self._hinted(fact.stage, reply, now)
        effects: list[LeaderEffect] = []
        for vote in fact.answer.votes:
            effects += self._voted(fact.stage, vote, now)
        return effects

    def _hinted(self, stage: StageIndex, reply: HintReply, now: float) -> None:
        record = self.books.records.get(reply.request_id)
        known = None if record is None else record.hints.get(stage)
        if record is None or (known is not None and known.version > reply.hint.version):
            self.books.tally.answers_ignored += 1
            return
        record.hints[stage] = reply.hint
        record.hinted_in = self.books.rounds
        self._counted(stage, StageCounters(hint_version=reply.hint.version))
        if record.phase is Phase.ANNOUNCED and len(record.hints) == self.options.num_stages:
            record.life.move(Event.HINT, now=now)

    def _voted(self, stage: StageIndex, vote: ClaimVote, now: float) -> list[LeaderEffect]:
        """Counts a vote; the last one of an attempt decides it. Others' words are ignored."""
        record = self.books.records.get(vote.request_id)
        if (
            record is None
            or record.phase not in UNDECIDED
            or vote.attempt < record.attempt
            or stage in record.claim.votes
        ):
            self.books.tally.answers_ignored += 1
            return []
        if vote.attempt > record.attempt:
            raise RemoteProtocolError(
                f"stage {stage} voted {vote}; the attempt is {record.attempt}. "
                f"Story: {record.life.story()}"
            )
        record.claim.votes[stage] = vote
        if len(record.claim.votes) < self.options.num_stages:
            return []
        votes = [record.claim.votes[index] for index in range(self.options.num_stages)]
        self.books.tally.mismatches += agreement.differ(votes)
        verdict = agreement.judge(votes, limit=record.claim.limit, agreement=self.options.agreement)
        return self._decide(record, verdict, now)

    def _decide(self, record: Record, verdict: agreement.Verdict, now: float) -> list[LeaderEffect]:
        match verdict:
            case agreement.Agreed(endpoint=endpoint):
                return self._admit(record, endpoint, now)
            case agreement.Lower(limit=limit):
                return [self._retry(record, limit, now)]
            case agreement.NotTried():
                self.books.tally.not_tried += 1
                record.claim.waited_idle = False
                return [self._undo(record, Event.NOT_TRIED, now)]
            case agreement.NoRoom():
                return self._no_room(record, verdict, now)
            case agreement.Impossible(stage=stage, refusal=refusal):
                if record.phase is Phase.CLAIMING:
                    return self._refuse(record, stage, refusal, now)
                record.claim.reuse_max = 0
                record.claim.refused = {}
                return [self._undo(record, Event.NO_ROOM, now)]

    def _admit(self, record: Record, endpoint: int, now: float) -> list[LeaderEffect]:
        self.books.tally.admitted += 1
        self.books.tally.candidate_tokens += record.claim.candidate
        self.books.tally.endpoint_tokens += endpoint
        record.run = RunState(endpoint=endpoint, planned=endpoint, computed=endpoint)
        record.life.move(Event.ADMIT, now=now)
        request_id, attempt = record.request_id, record.attempt
        effects: list[LeaderEffect] = [
            Admit(request_id=request_id, attempt=attempt, endpoint=endpoint)
        ]
        for position in self._junctions(record):
            effects.append(Junction(request_id=request_id, attempt=attempt, position=position))
        return effects

    def _junctions(self, record: Record) -> list[int]:
        """Where others share this prompt's prefix: what the stages' attention windows still hold
        above the endpoint, and where requests part from it that came meanwhile."""
        if not record.has_snapshots:
            return []
        points = set(record.shared)
        shared = junction_of(record.reuses(), record.run.endpoint)
        if shared is not None:
            points.add(shared)
        return sorted(point for point in points if point > record.run.endpoint)

    def _retry(self, record: Record, limit: int, now: float) -> Decision:
        self.books.tally.retries += 1
        assert limit < record.claim.limit, (limit, record.claim)
        record.life.move(Event.RETRY, now=now)
        record.next_attempt()
        record.claim.limit = limit
        record.claim.adjustments += 1
        return Retry(request_id=record.request_id, attempt=record.attempt, limit=limit)

    def _no_room(self, record: Record, verdict: agreement.NoRoom, now: float) -> list[LeaderEffect]:
        """Undone everywhere; it waits for releases. Refused with nothing else held, it need not
        wait: it may ignore the headroom, then give up its reuse, then it is refused for good."""
        self.books.tally.no_room += 1
        claim = record.claim
        last_resort = claim.oversized and claim.limit == 0 and record.phase is Phase.CLAIMING
        if verdict.alone and last_resort:
            return self._refuse(record, verdict.stage, verdict.refusal, now)
        # A stage counts the undo of what it refused as one release.
        claim.refused = {stage: releases + 1 for stage, releases in verdict.refused.items()}
        if verdict.alone:
            claim.refused = {}
            claim.reuse_max = 0 if claim.oversized else claim.reuse_max
            claim.oversized = True
        return [self._undo(record, Event.NO_ROOM, now)]

    def _refuse(
        self, record: Record, stage: int, refusal: Refusal, now: float
    ) -> list[LeaderEffect]:
        self.books.tally.refused += 1
        ending = self._end(record, Event.REFUSE, now)
        return [*ending, Refused(request_id=record.request_id, stage=stage, refusal=refusal)]
