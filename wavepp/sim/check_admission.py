"""Checkers of admission: agreement, falling endpoints, first come first served.

Own nothing; see `watch`. What a stage could use is worked out here a second time, from its tree.
"""

from __future__ import annotations

from collections.abc import Sequence

from wavepp.cache.lease import Lease
from wavepp.cache.store import StageCache
from wavepp.cache.types import GroupSpec, LeaseVote, Prompt, Refusal
from wavepp.protocol.messages import Admit, Decision, RoundMessage, RoundReply, WaveSchedule
from wavepp.protocol.record import Record
from wavepp.protocol.states import ADMITTED, HOLDING, UNDECIDED, Phase
from wavepp.protocol.votes import ClaimVote, Retry
from wavepp.sim.stage import SimStage
from wavepp.sim.watch import Checker, tap
from wavepp.sim.world import World
from wavepp.units import RequestId, ceil_div


def blocks_needed(spec: GroupSpec, endpoint: int, block_size: int) -> range:
    """The blocks that a window must hold to go on at an endpoint (in blocks)."""
    if spec.kind == "recurrent":
        return range(max(endpoint - 1, 0), endpoint)
    first = 0
    if spec.window is not None:
        first = max(endpoint * block_size - spec.window, 0) // block_size
    return range(min(first, endpoint), endpoint)


def usable_endpoints(cache: StageCache, prompt: Prompt, limit: int) -> set[int]:
    """Every endpoint <= limit (tokens) that the stage's tree could serve, floors aside."""
    size = cache.config.block_size
    if not cache.config.enable_prefix_caching:
        return {0}
    most = min(limit, prompt.reuse_cap) // size
    places = cache._parts.tree.walk(prompt, most).places
    found = {0}
    for endpoint in range(1, places.shape[1] + 1):
        needs = [blocks_needed(spec, endpoint, size) for spec in cache.config.groups]
        if all((places[group, list(need)] >= 0).all() for group, need in enumerate(needs)):
            found.add(endpoint * size)
    return found


class Agreement(Checker):
    """1: at admission all stages hold the same endpoint, committed, usable in every window and not
    above the candidate; a vote names every endpoint; a Retry goes to the best that all have.

    Without escrows nothing is committed; without leases nothing need be usable any more.
    """

    name = "1 agreement"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._votes: dict[tuple[RequestId, int], dict[int, ClaimVote]] = {}
        self._limits: dict[RequestId, int] = {}
        for stage in world.stages:
            self._tap(stage)

    def _tap(self, stage: SimStage) -> None:
        cache = stage.control.cache
        usable: dict[RequestId, set[int]] = {}

        def look(request_id: RequestId, attempt: int, prompt: Prompt, limit: int) -> None:
            usable[request_id] = usable_endpoints(cache, prompt, limit)

        def compare(
            vote: LeaseVote, request_id: RequestId, attempt: int, prompt: Prompt, limit: int
        ) -> None:
            expected, size = usable.pop(request_id), cache.config.block_size
            spare = min((pool.spare for pool in cache._parts.pools), default=0)
            if spare < 0 or limit // size > spare:
                return  # floors may forbid some of them
            voted = {0} | {e for e in range(0, limit + 1, size) if vote.reuse.usable(e)}
            self.require(
                voted - {e for e in voted if e > prompt.reuse_cap} >= expected,
                f"stage {stage.index} did not name all it could use of {request_id}",
                expected,
                voted,
            )

        tap(cache, "claim", before=look, after=compare)

    def sent(self, messages: Sequence[RoundMessage]) -> None:
        self._limits.update((claim.request_id, claim.limit) for claim in messages[0].ask.claims)

    def replied(self, reply: RoundReply) -> None:
        for vote in reply.answer.votes:
            self._votes.setdefault((vote.request_id, vote.attempt), {})[reply.ack.stage] = vote

    def logged(self, decision: Decision) -> None:
        match decision:
            case Retry(request_id=request_id, attempt=attempt, limit=limit):
                votes = self._votes[request_id, attempt - 1]
                self._best(request_id, votes, limit)
                self._limits[request_id] = limit
            case Admit():
                self._admitted(decision)

    def _best(self, request_id: RequestId, votes: dict[int, ClaimVote], limit: int) -> None:
        size, before = self.world.options.block_size, self._limits[request_id]
        common = [
            endpoint
            for endpoint in range(0, before + 1, size)
            if all(vote.reuse.usable(endpoint) for vote in votes.values())
        ]
        best = max(common, default=0)
        is_set = self.world.options.agreement == "set"
        self.require(
            limit == best if is_set else limit >= best,
            f"{request_id} goes to {limit}, all stages could use {best}",
        )

    def _admitted(self, admit: Admit) -> None:
        request_id, endpoint = admit.request_id, admit.endpoint
        record = self.world.driver.leader.record(request_id)
        assert record is not None
        self.require(endpoint <= record.claim.candidate, "above the candidate", admit)
        for stage in self.world.stages:
            cache = stage.control.cache
            holding = cache._holdings.get(request_id)
            self.require(holding is not None, f"stage {stage.index} holds nothing", admit)
            assert holding is not None
            if self.world.options.reservation == "none":
                # Nothing is pinned, so the prefix may be gone again; only the word is checked.
                pledge = holding.pledge
                assert pledge is not None, admit
                at = pledge.endpoint * cache.config.block_size
                self.require(at == endpoint, f"stage {stage.index} pledged {at}", admit)
                continue
            lease, escrow = holding.lease, holding.escrow
            reserved = self.world.options.reservation == "escrow"
            room = not reserved or (escrow is not None and escrow.committed)
            self.require(lease is not None and room, f"stage {stage.index} did not commit", admit)
            assert lease is not None
            at = lease.endpoint * cache.config.block_size
            self.require(at == endpoint, f"stage {stage.index} holds {at}", admit)
            self.require(
                endpoint in usable_endpoints(cache, lease.prompt, endpoint),
                f"stage {stage.index} can't use it",
                admit,
            )


class Monotone(Checker):
    """2: within an attempt, and from attempt to attempt of one claim, an endpoint never rises."""

    name = "2 monotone"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._limits: dict[RequestId, int] = {}
        self._leases: list[dict[RequestId, tuple[Lease, int]]] = [{} for _ in world.stages]

    def sent(self, messages: Sequence[RoundMessage]) -> None:
        for claim in messages[0].ask.claims:
            self._limits[claim.request_id] = claim.limit

    def logged(self, decision: Decision) -> None:
        match decision:
            case Retry(request_id=request_id, limit=limit):
                before = self._limits[request_id]
                self.require(limit < before, f"a limit of {before} is followed by", decision)
                self._limits[request_id] = limit
            case Admit(request_id=request_id, endpoint=endpoint):
                self.require(endpoint <= self._limits[request_id], "above the limit", decision)

    def held(self, stage: SimStage) -> None:
        known, now = self._leases[stage.index], {}
        for request_id, holding in stage.control.cache._holdings.items():
            lease = holding.lease
            if lease is None:
                continue
            before = known.get(request_id)
            if before is not None and before[0] is lease:
                self.require(
                    lease.endpoint <= before[1], f"stage {stage.index}: {request_id} rose", before
                )
            now[request_id] = (lease, lease.endpoint)
        self._leases[stage.index] = now


class Order(Checker):
    """9: first come, first served among the ready; nobody passes a head that waits for capacity;
    lanes, headroom and the one oversized exception as the limits say; nobody is deferred past his
    time."""

    name = "9 admission"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        for stage in world.stages:
            self._tap(stage)

    def _tap(self, stage: SimStage) -> None:
        cache = stage.control.cache

        def granted(vote: LeaseVote, request_id: RequestId, *rest: object) -> None:
            holding = cache._holdings[request_id]
            if holding.escrow is None or holding.oversized:
                return
            for group, pool in enumerate(cache._parts.pools):
                self.require(
                    pool.promised + headroom(cache, group) <= pool.available,
                    f"stage {stage.index} granted {request_id} what the headroom of "
                    f"{pool.spec.name} needs",
                )

        tap(cache, "claim", after=granted)

    def sent(self, messages: Sequence[RoundMessage]) -> None:
        claims = messages[0].ask.claims
        books = self.world.driver.leader.books
        records = list(books.records.values())
        holders = [record for record in records if record.phase in HOLDING]
        lanes = len(holders) + len(books.gate._draining)
        self.require(lanes <= self.world.options.max_num_seqs, "lanes in use:", lanes)
        self._one_oversized(holders)
        if not claims:
            return
        serials = [books.records[claim.request_id].serial for claim in claims]
        self.require(serials == sorted(serials), "claims out of order:", serials)
        for record in records:
            self.require(
                record.phase is not Phase.WAITING or record.serial > serials[-1],
                f"{record.request_id} waits for capacity and is passed by",
                claims[-1],
            )
            behind = record.phase is Phase.READY and record.serial < serials[-1]
            self.require(
                not behind or books.gate.is_draining(record.request_id),
                f"{record.request_id} is ready and is passed by",
                claims[-1],
            )

    def _one_oversized(self, holders: Sequence[Record]) -> None:
        large = [record for record in holders if record.claim.oversized]
        self.require(len(large) <= 1, "two oversized requests hold something:", len(large))
        for record in large:
            others = [other for other in holders if other is not record]
            if record.phase in UNDECIDED:
                self.require(
                    all(other.run.materialized for other in others),
                    f"{record.request_id} ignores the headroom while another holds a lease",
                )

    def turned(self) -> None:
        driver = self.world.driver
        if driver.rounds.is_out:
            return
        for record in driver.leader.books.near():
            until = record.wait.until
            self.require(
                record.phase is not Phase.DEFERRED or until is None or self.world.clock.now < until,
                f"{record.request_id} is deferred past",
                until,
            )

    def replied(self, reply: RoundReply) -> None:
        refused: tuple[RequestId, Refusal] | None = None
        for vote in reply.answer.votes:
            claimed = vote.request_id
            if refused is not None and not self._is_retry(vote):
                self.require(
                    vote.lease is None,
                    f"stage {reply.ack.stage} tried {claimed} after it refused",
                    refused,
                )
            if vote.refusal is not None and vote.refusal.reason != "never_fits":
                refused = refused or (claimed, vote.refusal)

    def _is_retry(self, vote: ClaimVote) -> bool:
        record = self.world.driver.leader.record(vote.request_id)
        return record is not None and record.phase is Phase.RETRYING


def being_admitted(world: World) -> set[RequestId]:
    """Requests that stages were asked about and that are not enqueued on every stage yet."""
    driver = world.driver
    acked = driver.log.acked_min
    return {
        record.request_id
        for record in driver.leader.books.records.values()
        if record.request_id in world.asked
        or record.phase in (*UNDECIDED, Phase.ANNOUNCED)
        or (record.phase in ADMITTED and acked < driver._by_id[record.request_id].admitted_as)
    }


class OneByOne(Checker):
    """14, of serial admission: a round asks about one request, by walks; while a request is being
    admitted no other is, and no wave goes out before every stage has acknowledged it. (With wave
    admission there is nothing to see.)"""

    name = "14 serial"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._applies = world.options.admission == "serial"
        self._before: dict[RequestId, int] = {}  # request -> attempt

    def sent(self, messages: Sequence[RoundMessage]) -> None:
        ask = messages[0].ask
        names = {*ask.hints, *(claim.request_id for claim in ask.claims)}
        if not self._applies or not names:
            return
        self.require(len(names) == 1, "a round about several:", names)
        self.require(ask.exact, "a hint from the index:", ask)
        others = being_admitted(self.world) - names
        self.require(not others, f"{names} while another is being admitted:", others)

    def launched(self, schedule: WaveSchedule) -> None:
        if self._applies:
            still = self._before.keys() & being_admitted(self.world)
            again = {name for name in still if self._had_to_wait(name)}
            self.require(still == again, "a wave while somebody is being admitted:", still - again)

    def _had_to_wait(self, request_id: RequestId) -> bool:
        """It was deferred or undone for a moment, in which waves were planned, and is asked about
        anew: the round that does so is not sent yet."""
        record = self.world.driver.leader.record(request_id)
        if record is None or request_id in self.world.asked:
            return False
        return record.wait.until is not None or record.attempt > self._before[request_id]

    def turned(self) -> None:
        """The same turn may launch a wave and then ask about the next request."""
        if self._applies:
            records = self.world.driver.leader.books.records
            self._before = {name: records[name].attempt for name in being_admitted(self.world)}


def headroom(cache: StageCache, group: int) -> int:
    """Units that admission leaves free: 2PM tokens, at most a quarter of the pool."""
    spec = cache.config.groups[group]
    if not spec.paged:
        return 0
    wanted = ceil_div(cache.config.headroom_tokens, cache.config.block_size)
    return min(wanted, spec.units // 4)
