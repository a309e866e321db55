"""Who waits, and who may hold a lease now.

Owns: the queue in order of arrival, the requests that hold a lease or a lane, and the lanes of
ended attempts whose last wave is still under way. May not: write decisions. Paper, section on
admission:

    1. fewer than `lanes_max` requests hold a lease or a lane;
    2. first come, first served among those that are ready; nobody passes a head that waits for
       capacity, and it is tried again when a refusing stage released something;
    3. one oversized request at a time may ignore the headroom, when no other holds a lease;
    4. a request that was rolled back too often (which escrows make impossible) is admitted when
       nobody else has still to be materialised, and nobody is beside it until it is.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from wavepp.protocol.messages import NO_WAVE
from wavepp.protocol.record import Record
from wavepp.protocol.states import UNDECIDED
from wavepp.protocol.votes import StageCounters
from wavepp.units import RequestId, WaveNumber


class WaitingQueue:
    """Live requests that hold nothing, in order of arrival."""

    def __init__(self) -> None:
        self._records: list[Record] = []  # by serial
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: Record) -> None:
        """Puts a request (back) at its place by arrival."""
        bisect.insort(self._records, record, key=lambda other: other.serial)
        self.tokens += record.arrival.num_tokens

    def remove(self, record: Record) -> None:
        """Takes a request out."""
        at = bisect.bisect_left(self._records, record.serial, key=lambda other: other.serial)
        assert self._records[at] is record, record.request_id
        del self._records[at]
        self.tokens -= record.arrival.num_tokens
        assert self.tokens >= 0, self.tokens

    def first(self, count: int) -> tuple[Record, ...]:
        """The first `count` requests."""
        return tuple(self._records[:count])

    def check(self) -> None:
        """Asserts order and sums."""
        serials = [record.serial for record in self._records]
        assert serials == sorted(set(serials)), serials
        assert self.tokens == sum(record.arrival.num_tokens for record in self._records)


class AdmissionGate:
    """Leases and lanes in use, against `lanes_max` (`max_num_seqs`)."""

    def __init__(self, *, lanes_max: int) -> None:
        assert lanes_max >= 1, lanes_max
        self.lanes_max = lanes_max
        self.waves_done = NO_WAVE
        self._holders: dict[RequestId, Record] = {}
        self._draining: dict[RequestId, WaveNumber] = {}  # ended attempt -> its last wave

    @property
    def holders(self) -> tuple[Record, ...]:
        """Requests with a lease or a lane, in order of arrival."""
        return tuple(sorted(self._holders.values(), key=lambda record: record.serial))

    def holds(self, request_id: RequestId | None) -> bool:
        """The request has a lease or a lane."""
        return request_id in self._holders

    def is_draining(self, request_id: RequestId) -> bool:
        """An ended attempt of the request is still in a wave under way."""
        return request_id in self._draining

    @property
    def is_idle(self) -> bool:
        """Nothing is held by anyone."""
        return not self._holders and not self._draining

    @property
    def lanes_free(self) -> int:
        """Requests that could claim now, were there no other limits."""
        return self.lanes_max - len(self._holders) - len(self._draining)

    def take(self, record: Record) -> None:
        """The request starts to claim."""
        assert record.request_id not in self._holders, record.request_id
        assert self.admits(record), record.request_id
        self._holders[record.request_id] = record

    def release(self, record: Record) -> None:
        """The attempt ended; its lane is free once its last wave was executed everywhere."""
        del self._holders[record.request_id]
        if record.run.last_wave > self.waves_done:
            self._draining[record.request_id] = record.run.last_wave

    def wave_returned(self, wave: WaveNumber) -> None:
        """Every stage has executed the waves up to this one."""
        assert wave >= self.waves_done, (wave, self.waves_done)
        self.waves_done = wave
        for request_id in [name for name, fence in self._draining.items() if fence <= wave]:
            del self._draining[request_id]

    def admits(self, record: Record) -> bool:
        """Whether the limits let this request claim now, were it the next one."""
        if self.lanes_free <= 0:
            return False
        others = self._holders.values()
        if any(other.claim.oversized and other.phase in UNDECIDED for other in others):
            return False  # the exception stands only while no other holds a lease
        if any(other.claim.goes_alone and not other.run.materialized for other in others):
            return False
        if record.claim.goes_alone and not all(other.run.materialized for other in others):
            return False
        if not record.claim.oversized:
            return True
        return all(other.run.materialized and not other.claim.oversized for other in others)

    def is_worth_a_try(self, record: Record, counters: Sequence[StageCounters]) -> bool:
        """Whether a request may fit now: every stage that refused it for capacity, if any, has
        released something since, or nobody holds anything at all."""
        if has_release(record, counters):
            return True
        return self.is_idle and not record.claim.waited_idle

    def check(self) -> None:
        """Asserts the limits."""
        assert len(self._holders) <= self.lanes_max, len(self._holders)
        oversized = [record for record in self._holders.values() if record.claim.oversized]
        assert len(oversized) <= 1, oversized
        assert all(fence > self.waves_done for fence in self._draining.values()), self._draining


def has_release(record: Record, counters: Sequence[StageCounters]) -> bool:
    """Every stage that refused the request has released something since."""
    return all(counters[stage].releases > count for stage, count in record.claim.refused.items())
