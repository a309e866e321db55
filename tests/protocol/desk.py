"""A leader, and its stages played by hand: for tests that need one exact sequence of answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wavepp.cache.types import HintVote, LeaseVote, Refusal, ReuseVote
from wavepp.protocol.books import LeaderOptions
from wavepp.protocol.facts import (
    LeaderEffect,
    RequestArrived,
    RequestCancelled,
    RequestServed,
    RoundPlan,
    SpanPlanned,
    StageAnswered,
    StageCounted,
    WaveReturned,
)
from wavepp.protocol.leader import LeaderMachine
from wavepp.protocol.record import Record
from wavepp.protocol.states import Phase
from wavepp.protocol.votes import (
    Claim,
    ClaimVote,
    HintReply,
    RoundAnswer,
    RoundAsk,
    StageCounters,
)
from wavepp.units import RequestId, StageIndex, WaveNumber

FULL = Refusal(reason="capacity", group="attn", needed=9, available=4)
NEVER = Refusal(reason="never_fits", group="attn", needed=99, available=8)
COLD = ReuseVote(attention=0)
BLOCK = 4


class Desk:
    """Plays every stage: what is hinted, voted and counted is said by the test."""

    def __init__(self, *, stages: int = 2, lanes: int = 2, **options: Any) -> None:
        self.leader = LeaderMachine(
            LeaderOptions(num_stages=stages, block_size=BLOCK, lanes_max=lanes, **options)
        )
        self.stages = [StageIndex(stage) for stage in range(stages)]
        self.now = 0.0
        self.versions = [0] * stages
        self.releases = [0] * stages
        self.serial = 0
        self.wave = 0

    def arrive(self, *names: str, tokens: int = 32, keys: Sequence[bytes] = ()) -> None:
        for name in names:
            self.serial += 1
            self.leader.handle(
                RequestArrived(
                    request_id=RequestId(name),
                    serial=self.serial,
                    num_tokens=tokens,
                    reuse_cap=(tokens - 1) // BLOCK * BLOCK,
                    keys=keys,
                ),
                now=self.now,
            )

    def compose(self, *, wanted: int = 1, flush: bool = False) -> RoundPlan | None:
        return self.leader.next_round(now=self.now, work_wanted=wanted, flush=flush)

    def claims(self, *, wanted: int = 1, reuse: ReuseVote = COLD) -> tuple[Claim, ...]:
        """Composes rounds, answering hints, until somebody claims or nothing is left to say."""
        for _ in range(4):
            plan = self.compose(wanted=wanted)
            if plan is None:
                return ()
            self.hint(plan.ask, reuse)
            if plan.ask.claims:
                return plan.ask.claims
        raise AssertionError("rounds without an end")

    def hint(self, ask: RoundAsk, *reuses: ReuseVote) -> None:
        """Every stage answers the hints: `reuses` one a stage, the last one for the rest."""
        for stage in self.stages:
            reuse = reuses[min(stage, len(reuses) - 1)]
            hint = HintVote(reuse=reuse, version=self.versions[stage])
            hints = tuple(HintReply(request_id=name, hint=hint) for name in ask.hints)
            self.answer(stage, RoundAnswer(hints=hints))

    def ready(self, *names: str, reuse: ReuseVote = COLD, **options: Any) -> None:
        """Arrive, announced and hinted."""
        self.arrive(*names, **options)
        plan = self.compose()
        assert plan is not None
        self.hint(plan.ask, reuse)

    def answer(self, stage: StageIndex, answer: RoundAnswer) -> list[LeaderEffect]:
        return self.leader.handle(StageAnswered(stage=stage, answer=answer), now=self.now)

    def vote(
        self,
        name: str,
        *votes: ReuseVote | Refusal | None,
        attempt: int | None = None,
        limit: int | None = None,
        alone: bool = False,
    ) -> list[LeaderEffect]:
        """Each stage's word on one claim: what it can use, why it refuses, or not tried (None);
        the last word for the rest."""
        effects: list[LeaderEffect] = []
        record = self.record(name)
        attempt = record.attempt if attempt is None else attempt
        limit = record.claim.limit if limit is None else limit
        for stage in self.stages:
            word = votes[min(stage, len(votes) - 1)]
            cast = self.ballot(name, attempt, limit, word, stage=stage, alone=alone)
            effects += self.answer(stage, RoundAnswer(votes=(cast,)))
        return effects

    def ballot(
        self,
        name: str,
        attempt: int,
        limit: int,
        word: ReuseVote | Refusal | None,
        *,
        stage: int = 0,
        alone: bool = False,
    ) -> ClaimVote:
        lease = None
        if word is not None:
            reuse = word if isinstance(word, ReuseVote) else ReuseVote()
            refusal = word if isinstance(word, Refusal) else None
            endpoint = reuse.highest(limit)
            lease = LeaseVote(
                request_id=RequestId(name),
                attempt=attempt,
                endpoint=endpoint,
                reuse=reuse,
                committed=refusal is None and endpoint == limit,
                refusal=refusal,
            )
        return ClaimVote(
            request_id=RequestId(name),
            attempt=attempt,
            lease=lease,
            alone=alone and isinstance(word, Refusal),
            releases=self.releases[stage],
        )

    def admit(self, *names: str, reuse: ReuseVote = COLD) -> None:
        """They claim, every stage commits."""
        claims = self.claims(reuse=reuse)
        assert tuple(claim.request_id for claim in claims) == names, claims
        for name in names:
            self.vote(name, ReuseVote())

    def release(self, *stages: int, count: int = 1) -> None:
        """Something was given back on these stages."""
        for stage in stages:
            self.releases[stage] += count
            self.count(stage)

    def changed(self, *stages: int) -> None:
        """The hint index of these stages changed."""
        for stage in stages:
            self.versions[stage] += 1
            self.count(stage)

    def count(self, stage: int) -> None:
        counters = StageCounters(releases=self.releases[stage], hint_version=self.versions[stage])
        self.leader.handle(StageCounted(stage=StageIndex(stage), counters=counters), now=self.now)

    def plan_span(self, name: str, end: int, *, last: bool) -> None:
        self.wave += 1
        self.leader.handle(
            SpanPlanned(request_id=RequestId(name), wave=WaveNumber(self.wave), end=end, last=last),
            now=self.now,
        )

    def return_wave(self, **computed: int) -> None:
        """All waves planned so far came back."""
        done = tuple((RequestId(name), end) for name, end in computed.items())
        self.leader.handle(WaveReturned(wave=WaveNumber(self.wave), computed=done), now=self.now)

    def serve(self, name: str) -> list[LeaderEffect]:
        """An admitted request runs to its end."""
        tokens = self.record(name).arrival.num_tokens
        self.plan_span(name, tokens, last=True)
        self.return_wave(**{name: tokens})
        return self.leader.handle(RequestServed(request_id=RequestId(name)), now=self.now)

    def cancel(self, name: str) -> list[LeaderEffect]:
        return self.leader.handle(RequestCancelled(request_id=RequestId(name)), now=self.now)

    def record(self, name: str) -> Record:
        record = self.leader.record(RequestId(name))
        assert record is not None, name
        return record

    def phases(self, *names: str) -> list[Phase]:
        return [self.record(name).phase for name in names]


def names(claims: Sequence[Claim]) -> list[str]:
    """Who claims, in order."""
    return [claim.request_id for claim in claims]
