"""StageMachine: one stage's side of admission, over its own StageCache.

Owns what this stage knows of live requests: prompts, the attempt it holds, the votes it owes, the
tombstones of requests that ended while something about them was still under way. May not: decide,
travel, lock, compute, or end what has run (a fenced ending is the control's). Paper, section on
admission (leases, escrows, votes).

    apply(decision)            from the log, each once, in number order (control.log.AppliedLog)
    store(request, prompt)     the payload; dropped when the request ended before it came
    hint(request)              needs no tree mutex, owns nothing
    prompt_to_claim(claim)     what the cache may walk before the claim, without the tree mutex
    claim(claim)               lease + escrow + commit, one lock hold each, in the round's order
    end_round()                the votes that Retry decisions made since the last round
    release(request)           the fence of an ended attempt fell: everything it held goes

    a round:  apply* store*  claim*  hint*  end_round        `answer` does the last three
    a wave:   apply*  ... materialize, publish ...  release*

Capacity rule: after the first request that this stage refuses for capacity in a round, later claims
of the round are not tried: nobody passes a head that waits for capacity. A Retry that was refused
since the last round counts as one.
"""

from __future__ import annotations

from dataclasses import dataclass

from wavepp.cache.lease import Foresight
from wavepp.cache.store import StageCache
from wavepp.cache.types import LeaseVote, Prompt
from wavepp.errors import RemoteProtocolError
from wavepp.protocol.messages import Abort, Admit, Announce, Decision, Free, Undo
from wavepp.protocol.votes import (
    Claim,
    ClaimVote,
    HintReply,
    Junction,
    Retry,
    RoundAnswer,
    RoundAsk,
    StageCounters,
)
from wavepp.units import RequestId, StageIndex


@dataclass(slots=True, eq=False)
class _Request:
    """A live request here. `attempt` is the latest one heard of; `vote` is this stage's word on it.

    `junctions`: points ahead where a snapshot is worth keeping, ascending.
    """

    attempt: int
    prompt: Prompt | None = None
    vote: ClaimVote | None = None
    admitted: bool = False
    junctions: tuple[int, ...] = ()


class StageMachine:
    """One stage of one pipeline epoch. The cache is this machine's alone but for the executor's
    calls (materialize, publish, snapshots), which come between two calls here."""

    def __init__(self, stage: StageIndex, cache: StageCache) -> None:
        self.stage = stage
        self.cache = cache
        self._requests: dict[RequestId, _Request] = {}
        self._owed: list[ClaimVote] = []  # made by Retry decisions, not yet told
        self._refused = False  # somebody was refused for capacity since the last round ended
        self._given_back = 0  # cache.releases that came from undoing what this stage refused
        self._refused_undone = 0  # how many such undos there were
        self._tombstones: frozenset[RequestId] = frozenset()  # ended before the last round ended
        self._fresh_tombstones: set[RequestId] = set()
        self._ending: set[RequestId] = set()  # admitted attempts that ended, before their fence
        self._rolled_back: set[RequestId] = set()  # admitted, refused when they were materialised

    # -- what the driver may know ----------------------------------------------------------------

    @property
    def counters(self) -> StageCounters:
        """For every acknowledgement, on both planes."""
        return StageCounters(
            releases=self.cache.releases - self._given_back + self._refused_undone,
            hint_version=self.cache.hint_version,
        )

    @property
    def is_idle(self) -> bool:
        """No request is known, none waits for its fence, no vote is owed."""
        return not self._requests and not self._ending and not self._owed

    def knows(self, request_id: RequestId) -> bool:
        """The request was announced and has not ended."""
        return request_id in self._requests

    def junctions(self, request_id: RequestId) -> tuple[int, ...]:
        """Where snapshots of this request are worth keeping for others, ascending."""
        request = self._requests.get(request_id)
        return () if request is None else request.junctions

    def prompt(self, request_id: RequestId) -> Prompt | None:
        """The payload, if it came."""
        request = self._requests.get(request_id)
        return None if request is None else request.prompt

    # -- decisions -------------------------------------------------------------------------------

    def apply(self, decision: Decision) -> None:
        """Applies one decision. It is final: nothing here is asked whether it still suits.

        Raises:
            RemoteProtocolError: the decision contradicts what this stage voted or knows.
        """
        request_id = decision.request_id
        if isinstance(decision, Announce):
            self._announce(decision)
            return
        request = self._requests.get(request_id)
        if request is None:
            self._bury(request_id, decision)
            return
        match decision:
            case Retry():
                self._retry(request, decision)
            case Admit():
                self._admit(request, decision)
            case Junction(attempt=attempt, position=position):
                if attempt == request.attempt:
                    request.junctions = tuple(sorted({*request.junctions, position}))
            case Undo(attempt=attempt):
                self._undo(request_id, request)
                self._requests[request_id] = _Request(attempt + 1, request.prompt)
            case Abort() | Free():
                self._undo(request_id, request)
                del self._requests[request_id]
                self._fresh_tombstones.add(request_id)
            case _:
                raise TypeError(decision)

    def store(self, request_id: RequestId, prompt: Prompt) -> bool:
        """Takes a payload. False: the request ended before it came, and it was dropped."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        if request.prompt is not None:
            raise RemoteProtocolError(f"stage {self.stage} got the tokens of {request_id} twice")
        request.prompt = prompt
        return True

    def release(self, request_id: RequestId) -> None:
        """Gives back all that an ended attempt held: its fence fell. No effect when there is
        nothing."""
        before = self.cache.releases
        self.cache.free(request_id)
        self._ending.discard(request_id)
        if request_id in self._rolled_back:
            self._rolled_back.remove(request_id)
            self._count_once(before)

    def rolled_back(self, request_id: RequestId) -> None:
        """This stage had no room for an admitted request when it was to be materialised: giving
        back what it holds counts as one release, like the undo of a refused claim."""
        self._rolled_back.add(request_id)

    # -- rounds ----------------------------------------------------------------------------------

    def answer(self, ask: RoundAsk) -> RoundAnswer:
        """Everything a round asks, after its decisions were applied and its payloads stored."""
        votes = [vote for claim in ask.claims if (vote := self.claim(claim)) is not None]
        replies = [self.hint(name, exact=ask.exact) for name in ask.hints]
        hints = [reply for reply in replies if reply is not None]
        return RoundAnswer(hints=tuple(hints), votes=(*self.end_round(), *votes))

    def hint(self, request_id: RequestId, *, exact: bool = False) -> HintReply | None:
        """What could be reused by the hint index alone, or by a walk of the tree (`exact`); None
        when the request has ended."""
        prompt = self.prompt_to_hint(request_id)
        if prompt is None:
            return None
        look = self.cache.walk if exact else self.cache.hint
        return HintReply(request_id=request_id, hint=look(prompt))

    def prompt_to_hint(self, request_id: RequestId) -> Prompt | None:
        """The first half of `hint`: what the cache is to be asked about, which needs no mutex."""
        request = self._requests.get(request_id)
        if request is None:
            self._expect_tombstone(request_id, "a hint")
            return None
        if request.prompt is None:
            raise RemoteProtocolError(f"stage {self.stage} has no tokens of {request_id} yet")
        return request.prompt

    def prompt_to_claim(self, claim: Claim) -> Prompt | None:
        """What a claim is about to walk the cache for; None: it will not."""
        request = self._requests.get(claim.request_id)
        if request is None or request.vote is not None or self._refused:
            return None
        return request.prompt

    def claim(self, claim: Claim, foresight: Foresight | None = None) -> ClaimVote | None:
        """Acts on one claim of a round; None when the request or the attempt has ended.

        A claim that comes twice gets the same vote twice, and is acted on once.
        """
        request = self._requests.get(claim.request_id)
        if request is None:
            self._expect_tombstone(claim.request_id, "a claim")
            return None
        if claim.attempt < request.attempt:
            return None
        if request.vote is not None and request.attempt == claim.attempt:
            return request.vote
        if request.prompt is None or request.vote is not None:
            raise RemoteProtocolError(
                f"stage {self.stage}: a claim of {claim.request_id} attempt {claim.attempt}, but "
                + ("its tokens have not come" if request.prompt is None else
                   f"attempt {request.attempt} was not undone")
            )  # fmt: skip
        request.attempt = claim.attempt
        if self._refused:
            request.vote = self._vote(claim.request_id, claim.attempt, None)
            return request.vote
        alone = not self.cache.held()
        lease = self.cache.claim(
            claim.request_id,
            claim.attempt,
            request.prompt,
            claim.limit,
            oversized=claim.oversized,
            foresight=foresight,
        )
        request.vote = self._vote(claim.request_id, claim.attempt, lease, alone=alone)
        return request.vote

    def end_round(self) -> tuple[ClaimVote, ...]:
        """Ends a round: the votes owed for Retry decisions; the capacity rule starts anew."""
        owed, self._owed = tuple(self._owed), []
        self._refused = False
        self._tombstones = frozenset(self._fresh_tombstones)
        self._fresh_tombstones.clear()
        return owed

    def check(self) -> None:
        """Asserts that what requests hold by their votes is what the cache holds for them."""
        held = set(self.cache.held())
        for request_id, request in self._requests.items():
            claimed = request.vote is not None and request.vote.lease is not None
            holds = claimed or request_id in self._ending
            assert holds == (request_id in held), (request_id, request)
            assert not request.admitted or request.vote is not None, (request_id, request)
        assert held <= set(self._requests) | self._ending, held
        assert self._given_back <= self.cache.releases, self._given_back

    # -- inside ----------------------------------------------------------------------------------

    def _announce(self, decision: Announce) -> None:
        request_id = decision.request_id
        if request_id in self._requests:
            raise RemoteProtocolError(f"stage {self.stage}: {request_id} was announced twice")
        if not self._is_buried(request_id):
            self._requests[request_id] = _Request(decision.attempt)

    def _bury(self, request_id: RequestId, decision: Decision) -> None:
        """A decision on a request that is not known. An ending came before its announcement:
        remember it, so that nothing comes to life that nobody will end."""
        if isinstance(decision, Abort | Free):
            self._fresh_tombstones.add(request_id)
        elif not self._is_buried(request_id):
            raise RemoteProtocolError(f"stage {self.stage} does not know the request of {decision}")

    def _is_buried(self, request_id: RequestId) -> bool:
        return request_id in self._fresh_tombstones or request_id in self._tombstones

    def _expect_tombstone(self, request_id: RequestId, what: str) -> None:
        if not self._is_buried(request_id):
            raise RemoteProtocolError(
                f"stage {self.stage} was asked {what} for {request_id}, which it does not know"
            )

    def _retry(self, request: _Request, decision: Retry) -> None:
        """Moves lease and escrow; the vote goes out with the next round's answer."""
        if request.vote is None or request.vote.lease is None or request.admitted:
            raise RemoteProtocolError(f"stage {self.stage} holds no lease to move: {decision}")
        if decision.attempt <= request.attempt:
            raise RemoteProtocolError(
                f"stage {self.stage}: {decision} after attempt {request.attempt}"
            )
        request_id = decision.request_id
        alone = self.cache.held() == (request_id,)
        lease = self.cache.move(request_id, decision.attempt, decision.limit)
        request.attempt = decision.attempt
        request.vote = self._vote(request_id, decision.attempt, lease, alone=alone)
        self._owed.append(request.vote)

    def _vote(
        self,
        request_id: RequestId,
        attempt: int,
        lease: LeaseVote | None,
        *,
        alone: bool = False,
    ) -> ClaimVote:
        refusal = None if lease is None else lease.refusal
        if refusal is not None and refusal.reason != "never_fits":
            self._refused = True
        return ClaimVote(
            request_id=request_id,
            attempt=attempt,
            lease=lease,
            alone=alone and refusal is not None,
            releases=self.counters.releases,
        )

    def _admit(self, request: _Request, decision: Admit) -> None:
        vote = request.vote
        if (
            vote is None
            or not vote.is_committed
            or (vote.attempt, vote.endpoint) != (decision.attempt, decision.endpoint)
            or request.admitted
        ):
            raise RemoteProtocolError(
                f"stage {self.stage} voted {vote}, the driver says {decision}"
            )
        request.admitted = True

    def _undo(self, request_id: RequestId, request: _Request) -> None:
        """Gives back what an attempt holds that never ran: escrow, then lease."""
        if request.admitted:
            self._ending.add(request_id)  # it may be running: it goes behind its fence
            return
        if request.vote is None:
            return
        before = self.cache.releases
        self.cache.undo(request_id)
        if request.vote.refusal is not None:
            self._count_once(before)

    def _count_once(self, before: int) -> None:
        """What was given back since then counts as exactly one release, so that the driver can tell
        a request's own undo from others'."""
        self._given_back += self.cache.releases - before
        self._refused_undone += 1
