"""Agreement: from votes to a verdict. Both ways end at the same endpoint."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavepp.cache.types import LeaseVote, Refusal, ReuseVote
from wavepp.errors import RemoteProtocolError
from wavepp.protocol.agreement import (
    Agreed,
    Agreement,
    Impossible,
    Lower,
    NoRoom,
    NotTried,
    differ,
    judge,
)
from wavepp.protocol.votes import ClaimVote
from wavepp.units import RequestId

NAME = RequestId("a")
FULL = Refusal(reason="capacity", group="attn", needed=5, available=2)
NEVER = Refusal(reason="never_fits", group="attn", needed=50, available=8)


def vote(
    reuse: ReuseVote,
    limit: int,
    *,
    refusal: Refusal | None = None,
    alone: bool = False,
    releases: int = 0,
    commits: bool | None = None,
) -> ClaimVote:
    """What a stage that can use `reuse` answers to a claim at a limit."""
    endpoint = reuse.highest(limit)
    if commits is None:
        commits = endpoint == limit and refusal is None
    lease = LeaseVote(
        request_id=NAME,
        attempt=1,
        endpoint=endpoint,
        reuse=reuse,
        committed=commits,
        refusal=refusal,
    )
    return ClaimVote(request_id=NAME, attempt=1, lease=lease, alone=alone, releases=releases)


def steps(stages: Sequence[ReuseVote], candidate: int, agreement: Agreement) -> list[int]:
    """The limits of one claim, the last one agreed."""
    limits, first = [candidate], True
    while True:
        limit = limits[-1]
        votes = [vote(reuse, limit, commits=None if first else True) for reuse in stages]
        verdict = judge(votes, limit=limit, agreement=agreement)
        first = False
        if isinstance(verdict, Agreed):
            return limits if verdict.endpoint == limit else [*limits, verdict.endpoint]
        assert isinstance(verdict, Lower), verdict
        limits.append(verdict.limit)


def snapshots(*points: int) -> ReuseVote:
    return ReuseVote(snapshots=points)


def test_row_d12_set_takes_64_in_one_step() -> None:
    assert steps([snapshots(64, 72, 90), snapshots(64, 80)], 80, "set") == [80, 64]


def test_row_d12_stepwise_goes_by_72() -> None:
    assert steps([snapshots(64, 72, 90), snapshots(64, 80)], 80, "stepwise") == [80, 72, 64]


@pytest.mark.parametrize("agreement", ["set", "stepwise"])
def test_row_d12_disjoint_snapshots_agree_on_nothing(agreement: Agreement) -> None:
    stages = [snapshots(10, 40, 70), snapshots(20, 50, 80), snapshots(30, 60, 90)]
    limits = steps(stages, 80, agreement)
    assert limits[-1] == 0
    assert len(limits) <= 1 + 9  # every adjustment drops at least one snapshot


@pytest.mark.parametrize("agreement", ["set", "stepwise"])
def test_row_a4_attention_takes_the_minimum(agreement: Agreement) -> None:
    stages = [ReuseVote(attention=12), ReuseVote(attention=20), ReuseVote(attention=8)]
    assert steps(stages, 20, agreement)[-1] == 8


@pytest.mark.parametrize("agreement", ["set", "stepwise"])
def test_row_d6_a_missing_window_is_no_limit(agreement: Agreement) -> None:
    stages = [snapshots(8, 16), snapshots(16), ReuseVote(attention=16), ReuseVote()]
    assert steps(stages, 16, agreement) == [16]


def test_commit_below_the_limit_is_agreed_when_all_did() -> None:
    votes = [vote(snapshots(64), 72, commits=True), vote(snapshots(64), 72, commits=True)]
    assert judge(votes, limit=72, agreement="stepwise") == Agreed(endpoint=64)


def test_lower_even_if_some_committed() -> None:
    votes = [vote(ReuseVote(attention=16), 16), vote(ReuseVote(attention=8), 16)]
    assert votes[0].is_committed
    assert judge(votes, limit=16, agreement="set") == Lower(limit=8)


def test_leases_differ_when_their_endpoints_do() -> None:
    alike = [vote(ReuseVote(attention=8), 16), vote(ReuseVote(attention=8), 16)]
    unlike = [vote(ReuseVote(attention=16), 16), vote(ReuseVote(attention=8), 16)]
    assert not differ(alike)
    assert differ(unlike)


def test_refusal_beats_lower_and_names_every_refusing_stage() -> None:
    votes = [
        vote(ReuseVote(attention=8), 16),
        vote(ReuseVote(attention=16), 16, refusal=FULL, releases=7),
        vote(ReuseVote(attention=16), 16, refusal=FULL, releases=3, alone=True),
    ]
    assert judge(votes, limit=16, agreement="set") == NoRoom(
        refused={1: 7, 2: 3}, alone=False, stage=1, refusal=FULL
    )


def test_refused_alone_only_when_every_refusing_stage_was() -> None:
    votes = [
        vote(ReuseVote(attention=16), 16, refusal=FULL, alone=True),
        vote(ReuseVote(attention=16), 16),
    ]
    verdict = judge(votes, limit=16, agreement="set")
    assert isinstance(verdict, NoRoom)
    assert verdict.alone


def test_not_tried_somewhere_is_no_agreement() -> None:
    votes = [vote(ReuseVote(), 16), ClaimVote(request_id=NAME, attempt=1, lease=None)]
    assert judge(votes, limit=16, agreement="set") == NotTried()


def test_never_fits_beats_everything() -> None:
    votes = [
        vote(ReuseVote(), 16, refusal=FULL),
        ClaimVote(request_id=NAME, attempt=1, lease=None),
        vote(ReuseVote(), 16, refusal=NEVER),
    ]
    assert judge(votes, limit=16, agreement="set") == Impossible(stage=2, refusal=NEVER)


def test_pinning_more_than_asked_is_a_broken_contract() -> None:
    votes = [vote(ReuseVote(attention=16), 16)]
    with pytest.raises(RemoteProtocolError, match="limit of 12"):
        judge(votes, limit=12, agreement="set")


def test_keeping_the_limit_without_a_word_is_a_broken_contract() -> None:
    votes = [vote(ReuseVote(attention=16), 16, commits=False)]
    with pytest.raises(RemoteProtocolError, match="limit of 16"):
        judge(votes, limit=16, agreement="set")


points = st.lists(st.integers(1, 12).map(lambda n: 8 * n), unique=True, max_size=6).map(sorted)
reuses = st.builds(
    lambda attention, marks: ReuseVote(
        attention=attention, snapshots=None if marks is None else tuple(marks)
    ),
    st.none() | st.integers(0, 12).map(lambda n: 8 * n),
    st.none() | points,
)


@given(st.lists(reuses, min_size=1, max_size=5), st.integers(0, 12).map(lambda n: 8 * n))
def test_both_ways_end_at_the_same_greatest_common_endpoint(
    stages: list[ReuseVote], candidate: int
) -> None:
    by_set = steps(stages, candidate, "set")
    stepwise = steps(stages, candidate, "stepwise")
    common = [e for e in range(0, candidate + 1, 8) if all(s.usable(e) for s in stages)]
    assert by_set[-1] == stepwise[-1] == max(common)
    assert len(by_set) <= 2
    for limits in (by_set, stepwise):
        assert limits == sorted(set(limits), reverse=True)
