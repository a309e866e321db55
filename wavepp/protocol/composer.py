"""What the next round carries: announcements, hints to refresh, claims in order, deferrals.

Owns the order in which requests may claim and the waits for others' prefixes. May not: take
answers. First come, first served among the ready ones. Paper, section on admission.

In serial admission a round is one step of one request: a walk, or a walk that pins.
"""

from __future__ import annotations

from collections.abc import Sequence

from wavepp.protocol.admission import has_release
from wavepp.protocol.books import Books
from wavepp.protocol.deferral import Donor, find_donor, has_computed
from wavepp.protocol.facts import RoundPlan
from wavepp.protocol.messages import Announce, Decision
from wavepp.protocol.record import Record
from wavepp.protocol.states import ADMITTED, QUEUED, UNDECIDED, Event, Phase
from wavepp.protocol.votes import Claim, Junction, RoundAsk


class RoundComposer:
    """Composes rounds out of the leader's books."""

    def __init__(self, books: Books) -> None:
        self._books = books

    # -- rounds ----------------------------------------------------------------------------------

    def compose(
        self, *, now: float, work_wanted: int, flush: bool = False, nobody_new: bool = False
    ) -> RoundPlan | None:
        """See `LeaderMachine.next_round`."""
        decisions: list[Decision] = []
        under_way = sum(_suffix(r) for r in self._books.gate.holders if r.phase in UNDECIDED)
        self._wake(self._books.near(), now, work_wanted - under_way)
        near = () if nobody_new or not self._has_lane() else self._books.near()
        newcomers = [record for record in near if record.phase is Phase.ARRIVED]
        claims, stale = self._select(near, now, work_wanted - under_way, decisions)
        awaited = any(record.phase is Phase.RETRYING for record in self._books.gate.holders)
        if not (newcomers or claims or decisions or stale or awaited or flush):
            return None
        for record in newcomers:
            record.life.move(Event.ANNOUNCE, now=now)
        hints = [*newcomers, *self._outdated(near, stale)]
        self._books.rounds += 1
        self._books.tally.hints += len(hints)
        self._books.tally.claims += len(claims)
        return RoundPlan(
            decisions=tuple(decisions),
            announce=tuple(
                Announce(
                    request_id=record.request_id,
                    attempt=record.attempt,
                    num_tokens=record.arrival.num_tokens,
                )
                for record in newcomers
            ),
            ask=RoundAsk(
                hints=tuple(record.request_id for record in hints),
                claims=tuple(claims),
                exact=self._is_serial,
            ),
        )

    @property
    def _is_serial(self) -> bool:
        return self._books.options.admission == "serial"

    def _has_lane(self) -> bool:
        """Serial admission looks at nobody before there is a lane; hints are for any time."""
        return not self._is_serial or self._books.gate.lanes_free > 0

    def _outdated(self, near: Sequence[Record], stale: Record | None) -> list[Record]:
        """Who needs a new hint: the next to claim if its hint is stale, and whoever is hinted and
        near the front, one a lane, when some stage's index has changed since."""
        if self._is_serial:
            return [] if stale is None else [stale]
        hinted = [r for r in near if r.phase in QUEUED or r.phase is Phase.DEFERRED]
        first = hinted[: self._books.options.lanes_max]
        return [r for r in hinted if r is stale or (r in first and not self._is_current(r))]

    def _is_current(self, record: Record) -> bool:
        return not self._is_serial and all(
            hint.version == self._books.counters[stage].hint_version
            for stage, hint in record.hints.items()
        )

    def _select(
        self, near: Sequence[Record], now: float, wanted: int, decisions: list[Decision]
    ) -> tuple[list[Claim], Record | None]:
        """Who claims now, in order; and who would be the next one if its hints were fresh.

        Hints of the latest round are fresh enough: while work runs, indices change all the time.
        """
        claims: list[Claim] = []
        for record in near:
            if record.phase not in QUEUED:
                continue  # not ready: it is passed
            if self._books.gate.is_draining(record.request_id):
                if record.phase is Phase.WAITING:
                    break  # rolled back: a head that waits for capacity, even so early
                continue
            if not self._books.gate.admits(record):
                break
            if not self._books.gate.is_worth_a_try(record, self._books.counters):
                break  # nobody passes a head that waits for capacity
            if record.phase is Phase.WAITING:
                self._revive(record, now)
            if record.hinted_in != self._books.rounds and not self._is_current(record):
                return claims, record
            found = self._donor(record) if wanted <= 0 or record.has_snapshots else None
            if found is not None:
                self._mark_shared(record, found, decisions)
                if wanted <= 0 and self._defer(record, found, now):
                    continue
            claims.append(self._claim(record, now))
            wanted -= _suffix(record)
        return claims, None

    def _revive(self, record: Record, now: float) -> None:
        record.claim.waited_idle = not has_release(record, self._books.counters)
        record.claim.refused = {}
        record.life.move(Event.REVIVE, now=now)

    def _claim(self, record: Record, now: float) -> Claim:
        claim = record.claim
        claim.candidate = claim.limit = record.best_hint()
        claim.adjustments = 0
        claim.since_s = now
        assert not claim.votes, claim
        self._books.waiting.remove(record)
        self._books.gate.take(record)
        record.life.move(Event.CLAIM, now=now)
        return Claim(
            request_id=record.request_id,
            attempt=record.attempt,
            limit=claim.limit,
            oversized=claim.oversized,
        )

    # -- deferral --------------------------------------------------------------------------------

    def _donor(self, record: Record) -> Donor | None:
        """Who computes most of the prefix that this request lacks, and up to where."""
        holders, size = self._books.gate.holders, self._books.options.block_size
        return find_donor(record, holders, block_size=size)

    def _defer(self, record: Record, found: Donor, now: float) -> bool:
        """Lets a request wait for the one that computes the prefix it lacks."""
        until = record.wait.until
        if not self._books.options.defer_shared_prefix or (until is not None and now >= until):
            return False
        donor, target = found
        record.wait.until = now + self._books.options.defer_max_s if until is None else until
        record.wait.donor, record.wait.target = donor.request_id, target
        record.life.move(Event.DEFER, now=now)
        self._books.tally.deferred += 1
        return True

    def _mark_shared(self, record: Record, found: Donor, decisions: list[Decision]) -> None:
        """The donor keeps a snapshot where this request parts from it, also for those who can't
        wait: later ones will share that prefix as well."""
        donor, target = found
        if not record.has_snapshots or target in donor.shared:
            return
        donor.shared.add(target)  # one that is not admitted yet is told with its admission
        if donor.phase in ADMITTED:
            decisions.append(
                Junction(request_id=donor.request_id, attempt=donor.attempt, position=target)
            )

    def _wake(self, near: Sequence[Record], now: float, wanted: int) -> None:
        """Ends deferrals: the prefix is there, nobody computes it any more, it took too long, or
        the ring lacks work."""
        for record in near:
            if record.phase is not Phase.DEFERRED:
                continue
            if wanted > 0 or not self._should_wait(record, now):
                record.wait.donor = None
                record.life.move(Event.WAKE, now=now)
                wanted -= record.arrival.num_tokens - record.best_hint()

    def _should_wait(self, record: Record, now: float) -> bool:
        wait = record.wait
        assert wait.donor is not None, record.request_id
        assert wait.until is not None, record.request_id
        if now >= wait.until or not self._books.gate.holds(wait.donor):
            return False
        return not has_computed(self._books.records[wait.donor], wait.target)


def _suffix(record: Record) -> int:
    """Tokens a claim will have to compute."""
    return record.arrival.num_tokens - record.claim.limit
