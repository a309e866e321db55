"""StageControl: one stage's side, as a pure machine. Applies decisions once, in number order; never
decides.

Owns: the applied log, announced prompts, the admitted sequences and their units, wave numbers. May
not: compute, lock, know a clock or a network. Two callers meet here, under the tree lock of
`actors/stage.py`: WAVE brings rounds (`handle`), LOOP brings waves (`prepare`, `finished`).

    wave w:  prepare(w) -> StageWork      units are taken, positions move
             ... compute ...
             finished(w) -> StageAck      fences up to w fall; here finished blocks will be
             published
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from wavepp.control.log import AppliedLog
from wavepp.control.sequences import AttemptKey, SequenceTable, StageSequence
from wavepp.control.work import ErrorRecord, SpanWork, StageFacts, StageWork
from wavepp.errors import RemoteProtocolError
from wavepp.protocol.messages import (
    Abort,
    Admit,
    Announce,
    Decision,
    Ending,
    Free,
    PromptRecord,
    RoundMessage,
    RoundReply,
    SpanPlan,
    StageAck,
    Undo,
    WaveSchedule,
)
from wavepp.units import RequestId, StageIndex, WaveNumber


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
    """One stage of one pipeline epoch."""

    def __init__(self, facts: StageFacts, *, epoch: int = 1) -> None:
        self.stage = StageIndex(facts.stage)
        self.epoch = epoch
        self.prepared = WaveNumber(0)
        self.finished_wave = WaveNumber(0)
        self.sequences = SequenceTable(facts.groups, block_size=facts.block_size)
        self._log = AppliedLog(self.stage)
        self._announced: dict[RequestId, PromptRecord | None] = {}  # None: its record is to come

    def handle(self, message: RoundMessage, *, now: float) -> RoundReply:
        """Applies a round: decisions first, then new prompts.

        Raises:
            RemoteProtocolError: a gap in the log, a divergence, or another epoch. This stage must
                stop.
        """
        del now  # nothing on a stage depends on time; requests for leases will carry theirs
        if not isinstance(message, RoundMessage):
            raise TypeError(message)
        self._check_epoch(message.epoch)
        for decision in self._log.take_new(message.entries, apply_to=message.apply_to):
            self._apply(decision)
        for record in message.prompts:
            self._store(record)
        self._check_idle()
        return RoundReply(epoch=self.epoch, round_number=message.round_number, ack=self._log.ack)

    def prepare(self, schedule: WaveSchedule) -> PreparedWave:
        """Materialises a wave: decisions it brings, units for its spans, position checks.

        Raises:
            ProtocolError: the wave is not the next one, the log has a gap, or an admitted request
                finds no room.
        """
        self._check_epoch(schedule.epoch)
        if schedule.wave != self.prepared + 1:
            raise RemoteProtocolError(
                f"stage {self.stage} got wave {schedule.wave} after wave {self.prepared}"
            )
        for decision in self._log.take_new(schedule.entries, apply_to=schedule.apply_to):
            self._apply(decision)
        self.prepared = schedule.wave
        works: list[SpanWork] = []
        errors: list[ErrorRecord] = []
        for span in schedule.spans:
            sequence = self._admitted(span)
            if sequence.position != span.start:
                errors.append(self._misplaced(sequence, span))
                continue
            works.append(self.sequences.extend(sequence, span))
            if sequence.failure is not None:
                errors.append(self._error(span, sequence.failure, guilty=False))
        work = StageWork(wave=schedule.wave, spans=tuple(works))
        return PreparedWave(schedule=schedule, work=work, errors=tuple(errors))

    def finished(self, prepared: PreparedWave, failures: Collection[ErrorRecord]) -> StageAck:
        """Ends a wave: spans named in `failures` were not computed here; everything fenced by it
        goes.
        """
        schedule = prepared.schedule
        if schedule.wave != self.finished_wave + 1:
            raise RemoteProtocolError(
                f"stage {self.stage} finished wave {schedule.wave} after {self.finished_wave}"
            )
        failed = {record.request_id: record.message for record in failures}
        for span in schedule.spans:
            sequence = self.sequences.get(AttemptKey(span.request_id, span.attempt))
            if span.request_id in failed and sequence is not None:
                sequence.failure = failed[span.request_id]
        self.finished_wave = schedule.wave
        for key in self.sequences.due(self.finished_wave):
            self.sequences.close(key)
        self._check_idle()
        return self._log.ack

    @property
    def is_idle(self) -> bool:
        """Nothing is announced, admitted, fenced or under way."""
        return (
            not self._announced and not len(self.sequences) and self.prepared == self.finished_wave
        )

    def units(self) -> tuple[int, int]:
        """(units in all pools, units in use)."""
        total = sum(pool.units for pool in self.sequences.pools.values())
        free = sum(pool.free for pool in self.sequences.pools.values())
        return total, total - free

    def check(self) -> None:
        """Asserts that all sums agree, and that an idle stage holds nothing."""
        self.sequences.check()
        self._check_idle()

    def _check_idle(self) -> None:
        """An idle stage holds nothing. Cheap: it is asked after every round and wave."""
        if self.is_idle:
            total, used = self.units()
            assert used == 0, f"stage {self.stage} is idle and holds {used} of {total} units"

    def _apply(self, decision: Decision) -> None:
        match decision:
            case Announce(request_id=request_id):
                assert request_id not in self._announced, request_id
                self._announced[request_id] = None
            case Admit(request_id=request_id, attempt=attempt, endpoint=endpoint):
                record = self._announced.get(request_id)
                if record is None:
                    raise RemoteProtocolError(
                        f"stage {self.stage}: {request_id} was admitted before its tokens came"
                    )
                self.sequences.open(AttemptKey(request_id, attempt), record, endpoint=endpoint)
            case Undo():
                self._end_attempt(decision)
            case Abort() | Free():
                self._end_attempt(decision)
                del self._announced[decision.request_id]
            case _:
                raise TypeError(decision)

    def _end_attempt(self, ending: Ending) -> None:
        """Gives back now, or behind the last wave that names the attempt (it may still be written
        to).
        """
        key = AttemptKey(ending.request_id, ending.attempt)
        sequence = self.sequences.get(key)
        if sequence is None:
            return  # the attempt was never admitted
        assert sequence.fence is None, key
        if ending.fence_wave <= self.finished_wave:
            self.sequences.close(key)
        else:
            sequence.fence = ending.fence_wave

    def _store(self, record: PromptRecord) -> None:
        if record.request_id not in self._announced:
            assert record.announced <= self._log.applied, record.announced
            return  # the request ended before its tokens came
        assert self._announced[record.request_id] is None, record.request_id
        self._announced[record.request_id] = record

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

    def _error(self, span: SpanPlan, message: str, *, guilty: bool) -> ErrorRecord:
        return ErrorRecord(
            request_id=span.request_id, stage=self.stage, message=message, guilty=guilty
        )

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise RemoteProtocolError(
                f"stage {self.stage} is in epoch {self.epoch}, the message is of epoch {epoch}"
            )
