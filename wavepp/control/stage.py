"""StageControl: one stage's side, as a pure machine. Applies decisions once, in number order; never
decides.

Owns: the applied log, the stage's cache with the machine that speaks for it, the admitted
sequences, wave numbers. May not: compute, know a clock or a network. Two callers meet here: WAVE
brings rounds (`handle`), LOOP brings waves (`prepare`, `finished`). Both take the handed-in tree
lock for each operation on shared state, for microseconds: a decision, a claim, a span. Payloads are
unpacked, hints looked up and the tree walked for a claim without it.

    wave w:  prepare(w) -> StageWork      requests named for the first time are materialised
             ... effects, then spans ...
             finished(w) -> StageAck      computed blocks are published; fences up to w fall
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from wavepp.cache.hints import Locks
from wavepp.cache.store import StageCache
from wavepp.cache.types import Effect, Refusal
from wavepp.control.log import AppliedLog
from wavepp.control.options import CacheOptions, cache_config
from wavepp.control.sequences import Asked, AttemptKey, SequenceTable, StageSequence, unpack
from wavepp.control.work import ErrorRecord, Rollback, SpanWork, StageFacts, StageWork
from wavepp.errors import RemoteProtocolError
from wavepp.protocol.messages import (
    Abort,
    Admit,
    Decision,
    Ending,
    Free,
    LogEntry,
    PromptRecord,
    RoundMessage,
    RoundReply,
    SpanPlan,
    StageAck,
    Undo,
    WaveSchedule,
)
from wavepp.protocol.stage import StageMachine
from wavepp.protocol.votes import Claim, ClaimVote, HintReply, RoundAnswer, RoundAsk
from wavepp.units import LogNumber, RequestId, StageIndex, WaveNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedWave:
    """What this stage is to do for a wave.

    Attributes:
        work: every span that has its place here, failed requests' too (the activations may hold
            them; their results are ignored).
        errors: spans of requests that have failed here, now or in an earlier wave.
    """

    schedule: WaveSchedule
    work: StageWork
    errors: tuple[ErrorRecord, ...]


class StageControl:
    """One stage of one pipeline epoch.

    Args:
        tree_lock: taken for each operation; None: there is one caller only.
        shard_locks: as StageCache; `cache_config(...).hint_shards` of them.
    """

    def __init__(
        self,
        facts: StageFacts,
        options: CacheOptions,
        *,
        epoch: int = 1,
        tree_lock: AbstractContextManager[Any] | None = None,
        shard_locks: Locks | None = None,
    ) -> None:
        self.stage = StageIndex(facts.stage)
        self.epoch = epoch
        self.prepared = WaveNumber(0)
        self.finished_wave = WaveNumber(0)
        self.cache = StageCache(cache_config(facts, options), shard_locks=shard_locks)
        self.machine = StageMachine(self.stage, self.cache)
        self.sequences = SequenceTable(self.cache)
        self.violations = 0
        self.violation: str | None = None  # the latest one
        self._lock = tree_lock if tree_lock is not None else nullcontext()
        self._log = AppliedLog(self.stage)
        self._asked: dict[RequestId, Asked] = {}

    # -- rounds (WAVE) ---------------------------------------------------------------------------

    def handle(self, message: RoundMessage, *, now: float) -> RoundReply:
        """Applies a round: decisions first, then payloads, then what it asks.

        Raises:
            RemoteProtocolError: a gap in the log, a divergence, or another epoch. This stage must
                stop.
        """
        del now  # nothing on a stage depends on time
        if not isinstance(message, RoundMessage):
            raise TypeError(message)
        self._check_epoch(message.epoch)
        self._catch_up(message.entries, message.apply_to)
        for record in message.prompts:
            asked = unpack(record, self.cache.config.block_size)
            with self._lock:
                self._store(record, asked)
        answer = self._answer(message.ask)
        with self._lock:
            self._check_idle()
            return RoundReply(
                epoch=self.epoch,
                round_number=message.round_number,
                ack=self._ack(),
                answer=answer,
            )

    def _answer(self, ask: RoundAsk) -> RoundAnswer:
        """Claims in their order, then hints, then the votes that Retry decisions made."""
        votes = [vote for claim in ask.claims if (vote := self._claim(claim)) is not None]
        hints = [self._hint(name, exact=ask.exact) for name in ask.hints]
        with self._lock:
            return RoundAnswer(
                hints=tuple(hint for hint in hints if hint is not None),
                votes=(*self.machine.end_round(), *votes),
            )

    def _claim(self, claim: Claim) -> ClaimVote | None:
        """The walk is made before the lock is taken for good."""
        with self._lock:
            prompt = self.machine.prompt_to_claim(claim)
        foresight = None if prompt is None else self.cache.foresee(prompt, claim.limit)
        with self._lock:
            return self.machine.claim(claim, foresight)

    def _hint(self, name: RequestId, *, exact: bool) -> HintReply | None:
        """None: it ended meanwhile. Only the exact walk is done under the lock."""
        with self._lock:
            prompt = self.machine.prompt_to_hint(name)
            if prompt is None:
                return None
            if exact:
                return HintReply(request_id=name, hint=self.cache.walk(prompt))
        return HintReply(request_id=name, hint=self.cache.hint(prompt))

    def _store(self, record: PromptRecord, asked: Asked) -> None:
        assert record.announced <= self._log.applied, (record.announced, self._log.applied)
        if self.machine.store(record.request_id, asked.prompt):
            self._asked[record.request_id] = asked

    # -- waves (LOOP) ----------------------------------------------------------------------------

    def prepare(self, schedule: WaveSchedule) -> PreparedWave:
        """Materialises a wave: decisions it brings, blocks for its spans, position checks.

        Raises:
            ProtocolError: the wave is not the next one, the log has a gap, or a span names what is
                not admitted.
        """
        self._check_epoch(schedule.epoch)
        if schedule.wave != self.prepared + 1:
            raise RemoteProtocolError(
                f"stage {self.stage} got wave {schedule.wave} after wave {self.prepared}"
            )
        self._catch_up(schedule.entries, schedule.apply_to)
        self.prepared = schedule.wave
        works: list[SpanWork] = []
        effects: list[Effect] = []
        errors: list[ErrorRecord] = []
        for span in schedule.spans:
            with self._lock:
                sequence = self._admitted(span)
                if sequence.position != span.start:
                    errors.append(self._misplaced(sequence, span))
                    continue
                junctions = self.machine.junctions(span.request_id)
                made = self.sequences.extend(sequence, span, junctions=junctions)
                if isinstance(made, Refusal):
                    errors.append(self._rolled_back(sequence, span, made))
                    continue
            self.cache.settle()
            work, copies = made
            works.append(work)
            effects.extend(copies)
            if sequence.failure is not None:
                errors.append(self._error(span, sequence.failure, guilty=False))
        work_all = StageWork(wave=schedule.wave, spans=tuple(works), effects=tuple(effects))
        return PreparedWave(schedule=schedule, work=work_all, errors=tuple(errors))

    def finished(self, prepared: PreparedWave, failures: Collection[ErrorRecord]) -> StageAck:
        """Ends a wave: what was computed is published, and everything fenced by the wave goes.

        Args:
            failures: spans that were not computed here; nothing of them is published.
        """
        schedule = prepared.schedule
        if schedule.wave != self.finished_wave + 1:
            raise RemoteProtocolError(
                f"stage {self.stage} finished wave {schedule.wave} after {self.finished_wave}"
            )
        failed = {record.request_id: record.message for record in failures}
        works = {work.request_id: work for work in prepared.work.spans}
        for span in schedule.spans:
            with self._lock:
                self._end_span(span, works.get(span.request_id), failed.get(span.request_id))
        with self._lock:
            self.finished_wave = schedule.wave
            due = self.sequences.due(self.finished_wave)
        for key in due:
            ended = self.sequences.get(key)
            with self._lock:
                self._close(key)
            del ended  # as in `_catch_up`
        with self._lock:
            self._check_idle()
            return self._ack()

    def _end_span(self, span: SpanPlan, work: SpanWork | None, failure: str | None) -> None:
        sequence = self.sequences.get(AttemptKey(span.request_id, span.attempt))
        assert sequence is not None, f"{span} went before its wave was executed"
        if failure is not None:
            sequence.failure = failure
        if sequence.failure is None:
            assert work is not None, span
            self.sequences.publish(work)

    # -- the whole -------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Nothing is announced, admitted, fenced, owed or under way."""
        return (
            self.machine.is_idle and not len(self.sequences) and self.prepared == self.finished_wave
        )

    def reset(self) -> bool:
        """Drops all cached content that no request uses. True: nothing is cached any more."""
        with self._lock:
            self.cache.reset()
            groups = self.cache.stats().groups
        self.cache.settle()
        return not any(group.cached or group.host_cached for group in groups)

    def check(self) -> None:
        """Asserts that all sums agree, and that an idle stage holds nothing. O(everything)."""
        self.machine.check()
        self.cache.check()
        self.sequences.check()
        assert set(self._asked) == {name for name in self._asked if self.machine.knows(name)}
        self._check_idle()
        assert not self.violations, self.violation

    def _check_idle(self) -> None:
        """An idle stage holds nothing. Cheap: it is asked after every round and wave."""
        if not self.is_idle:
            return
        left = self.cache.leftovers()
        if left is not None:
            self.violations += 1
            self.violation = f"stage {self.stage} is idle and holds {left}"

    def _ack(self) -> StageAck:
        ack = self._log.ack
        return StageAck(
            stage=ack.stage,
            applied=ack.applied,
            digest=ack.digest,
            counters=self.machine.counters,
        )

    def _catch_up(self, entries: Collection[LogEntry], apply_to: LogNumber) -> None:
        """Applies the log, one lock hold a decision. The other plane may bring the same entries
        meanwhile: each is applied once."""
        for entry in entries:
            with self._lock:
                decision = self._log.take(entry)
                ended = None if decision is None else self._apply(decision)
            del ended  # a long prompt: giving its memory back takes longer than all the rest
        self._log.require(apply_to)

    def _apply(self, decision: Decision) -> Asked | None:
        """Returns what the request had asked for when it ended."""
        request_id = decision.request_id
        self.machine.apply(decision)
        match decision:
            case Admit(attempt=attempt, endpoint=endpoint):
                key = AttemptKey(request_id, attempt)
                self.sequences.open(key, self._asked[request_id], endpoint=endpoint)
            case Undo():
                self._end_attempt(decision)
            case Abort() | Free():
                self._end_attempt(decision)
                return self._asked.pop(request_id, None)
        return None

    def _end_attempt(self, ending: Ending) -> None:
        """Gives back now, or behind the last wave that names the attempt (it may still be written
        to). What was never admitted the machine has undone.
        """
        key = AttemptKey(ending.request_id, ending.attempt)
        sequence = self.sequences.get(key)
        if sequence is None:
            return
        assert sequence.fence is None, key
        if ending.fence_wave <= self.finished_wave:
            self._close(key)
        else:
            sequence.fence = ending.fence_wave

    def _close(self, key: AttemptKey) -> None:
        self.sequences.close(key)
        self.machine.release(key.request_id)

    def _admitted(self, span: SpanPlan) -> StageSequence:
        sequence = self.sequences.get(AttemptKey(span.request_id, span.attempt))
        if sequence is None:
            raise RemoteProtocolError(
                f"stage {self.stage}: wave {self.prepared} names {span.request_id} "
                f"attempt {span.attempt}, which is not admitted here"
            )
        return sequence

    def _misplaced(self, sequence: StageSequence, span: SpanPlan) -> ErrorRecord:
        message = f"the span starts at token {span.start}, the sequence is at {sequence.position}"
        first = sequence.failure is None
        sequence.failure = message if sequence.failure is None else sequence.failure
        return self._error(span, sequence.failure, guilty=first)

    def _rolled_back(
        self, sequence: StageSequence, span: SpanPlan, refusal: Refusal
    ) -> ErrorRecord:
        """The request had reserved too little. What it holds goes behind its fence."""
        self.machine.rolled_back(span.request_id)
        sequence.failure = f"rolled back: {refusal}"
        return ErrorRecord(
            request_id=span.request_id,
            stage=self.stage,
            message=sequence.failure,
            guilty=False,
            rollback=Rollback(
                refusal=refusal,
                releases=self.machine.counters.releases,
                alone=self.cache.held() == (span.request_id,),
            ),
        )

    def _error(self, span: SpanPlan, message: str, *, guilty: bool) -> ErrorRecord:
        return ErrorRecord(
            request_id=span.request_id, stage=self.stage, message=message, guilty=guilty
        )

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise RemoteProtocolError(
                f"stage {self.stage} is in epoch {self.epoch}, the message is of epoch {epoch}"
            )
