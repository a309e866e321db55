"""The decision log, from both sides: the driver appends and remembers, a stage applies once and in
order.

Owns: numbers, the running digest, what still has to be sent. May not: know what a decision does.
Equal logs have equal digests; unequal digests at equal numbers stop the pipeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import xxhash

from wavepp.errors import RemoteProtocolError
from wavepp.protocol.messages import Decision, LogEntry, StageAck
from wavepp.units import LogNumber, StageIndex

APPLIED_REMEMBERED_MAX = 4096
"""Applied entries a stage can still compare with one that is sent again."""


def next_digest(digest: int, entry: LogEntry) -> int:
    """The digest after `entry`; starts at 0. Entries hold only ints and strings, so their text is
    stable.
    """
    text = f"{digest:x}|{entry.number}|{entry.decision!r}"
    return xxhash.xxh3_64_intdigest(text.encode())


class DecisionLog:
    """The driver's side: appends decisions, keeps each until every stage has acknowledged it."""

    def __init__(self, num_stages: int) -> None:
        assert num_stages >= 1, num_stages
        self.last = LogNumber(0)
        self._entries: deque[LogEntry] = deque()  # consecutive, ends at `last`
        self._digests: deque[int] = deque([0])  # _digests[0] is the digest before _entries[0]
        self._acked = [LogNumber(0)] * num_stages

    @property
    def acked_min(self) -> LogNumber:
        """Every stage has applied the log up to here."""
        return min(self._acked)

    @property
    def acked(self) -> tuple[LogNumber, ...]:
        """How far each stage is known to have applied the log."""
        return tuple(self._acked)

    def append(self, decision: Decision) -> LogNumber:
        """Makes `decision` the next entry."""
        self.last = LogNumber(self.last + 1)
        entry = LogEntry(number=self.last, decision=decision)
        self._entries.append(entry)
        self._digests.append(next_digest(self._digests[-1], entry))
        return self.last

    def unacked(self, stage: StageIndex | None = None) -> tuple[LogEntry, ...]:
        """What one stage (None: some stage) has not acknowledged, in order."""
        known = self.acked_min if stage is None else self._acked[stage]
        skip = known - self._base
        assert 0 <= skip <= len(self._entries), (known, self._base, len(self._entries))
        return tuple(self._entries)[skip:]

    def acknowledge(self, ack: StageAck) -> None:
        """Takes a stage's word for what it applied. Older words than the latest one say nothing
        new.

        Raises:
            RemoteProtocolError: the stage applied something else than this log, or more than there
                is.
        """
        if ack.applied > self.last:
            raise RemoteProtocolError(
                f"stage {ack.stage} applied decision {ack.applied}, the log ends at {self.last}"
            )
        if ack.applied < self._acked[ack.stage] or ack.applied < self._base:
            return
        expected = self._digests[ack.applied - self._base]
        if ack.digest != expected:
            raise RemoteProtocolError(
                f"stage {ack.stage} diverged at decision {ack.applied}: digest {ack.digest:x}, "
                f"expected {expected:x}; log since {self._base}: {list(self._entries)}"
            )
        self._acked[ack.stage] = ack.applied
        self._trim()

    @property
    def _base(self) -> LogNumber:
        """The number before the oldest entry kept."""
        return LogNumber(self.last - len(self._entries))

    def _trim(self) -> None:
        while self._entries and self._entries[0].number <= self.acked_min:
            self._entries.popleft()
            self._digests.popleft()
        assert len(self._digests) == len(self._entries) + 1


class AppliedLog:
    """A stage's side: says which entries of a message are new, and keeps the digest of all applied
    ones.
    """

    def __init__(self, stage: StageIndex) -> None:
        self.stage = stage
        self.applied = LogNumber(0)
        self.digest = 0
        self._recent: deque[LogEntry] = deque(maxlen=APPLIED_REMEMBERED_MAX)

    @property
    def ack(self) -> StageAck:
        """What this stage tells the driver."""
        return StageAck(stage=self.stage, applied=self.applied, digest=self.digest)

    def take_new(self, entries: Iterable[LogEntry], *, apply_to: LogNumber) -> list[Decision]:
        """The decisions to apply now, in order; they count as applied when this returns.

        Raises:
            RemoteProtocolError: a gap, an entry that differs from the one applied under its number,
                or a message that does not reach `apply_to`.
        """
        new = [decision for entry in entries if (decision := self.take(entry)) is not None]
        self.require(apply_to)
        return new

    def take(self, entry: LogEntry) -> Decision | None:
        """The entry's decision, to be applied now; None when it was applied before.

        Raises:
            RemoteProtocolError: a gap, or another entry was applied under its number.
        """
        if entry.number <= self.applied:
            self._compare(entry)
            return None
        if entry.number != self.applied + 1:
            raise RemoteProtocolError(
                f"stage {self.stage} got decision {entry.number} after {self.applied}"
            )
        self.applied = entry.number
        self.digest = next_digest(self.digest, entry)
        self._recent.append(entry)
        return entry.decision

    def require(self, number: LogNumber) -> None:
        """
        Raises:
            RemoteProtocolError: a message relies on decisions that it did not bring.
        """
        if self.applied < number:
            raise RemoteProtocolError(
                f"stage {self.stage} has decisions up to {self.applied}, the message needs {number}"
            )

    def _compare(self, entry: LogEntry) -> None:
        index = entry.number - 1 - (self.applied - len(self._recent))
        if index >= 0 and self._recent[index] != entry:
            raise RemoteProtocolError(
                f"stage {self.stage}: decision {entry.number} was {self._recent[index].decision}, "
                f"now it is {entry.decision}"
            )
