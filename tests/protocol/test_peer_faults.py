"""What went wrong in other engines, as small worlds here: real caches, real machines, real logs."""

from __future__ import annotations

import random

import pytest
from cluster import Cluster, attention, config, distinct, recurrent

from wavepp.cache.types import GroupSpec
from wavepp.protocol.agreement import Agreement
from wavepp.protocol.messages import Abort, Admit, Retry, Undo
from wavepp.protocol.states import Phase
from wavepp.units import RequestId

MODES: tuple[Agreement, ...] = ("set", "stepwise")


def four_stages(units: int = 32, **options: object) -> list:  # type: ignore[type-arg]
    return [config(attention(units), **options) for _ in range(4)]  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk", range(10))
def test_row_a1_abort_storm_ends_with_equal_logs_and_nothing_held(chunk: int) -> None:
    for seed in range(50 * chunk, 50 * chunk + 50):
        cluster = Cluster(four_stages(), seed=seed, duplicate=0.05, lanes_max=8)
        when = random.Random(seed)
        shared = distinct(28, 0)
        for index in range(16):
            name, at = f"r{index}", when.uniform(0.0, 0.02)
            cluster.submit(name, [*shared, *distinct(4, 1000 * (index + 1))], at=at)
            cluster.abort(name, at=at + when.uniform(0.0, 0.08))
        cluster.finish()
        assert cluster.now < 2.0, seed


@pytest.mark.parametrize("mode", MODES)
def test_row_a4_the_endpoint_is_the_all_stage_minimum(mode: Agreement) -> None:
    cluster = Cluster([config(attention(16)) for _ in range(3)], agreement=mode)
    tokens = distinct(20, 0)
    for stage, blocks in enumerate((3, 5, 2)):
        cluster.warm(stage, tokens[: 4 * blocks])
    cluster.submit("a", [*tokens, 1])
    cluster.finish()
    assert cluster.admissions == [("a", 8)]


@pytest.mark.parametrize("mode", MODES)
def test_row_a4_caches_that_differ_unknown_to_the_hints_are_trimmed(mode: Agreement) -> None:
    """5 blocks hinted everywhere; before the lease the caches hold 3, 5 and 2."""
    cluster = Cluster([config(attention(16)) for _ in range(3)], agreement=mode)
    tokens = distinct(20, 0)
    for stage in range(3):
        cluster.warm(stage, tokens)

    def shrink() -> None:
        for stage, blocks in ((0, 3), (2, 2)):
            cluster.nodes[stage].cache.reset()
            cluster.warm(stage, tokens[: 4 * blocks])

    cluster.before_claims = shrink
    cluster.submit("a", [*tokens, 1])
    cluster.run(until=0.001 + 2 * cluster.delay_s)
    cluster.finish()
    assert cluster.admissions == [("a", 8)]
    assert sum(isinstance(decision, Retry) for decision in cluster.decisions) == 1


def test_row_a6_abort_before_the_tokens_came() -> None:
    """For every delay between announcement and abort, the logs are equal and nothing stays."""
    for seed in range(40):
        cluster = Cluster(four_stages(), seed=seed)
        cluster.submit("a", distinct(30, 0))
        cluster.abort("a", at=seed * 0.0005)
        cluster.submit("b", distinct(30, 500), at=0.001)
        cluster.finish()
        assert cluster.outcomes["b"] == "done"


@pytest.mark.parametrize(
    "phase", [p for p in Phase if p.value not in "done failed refused aborted"]
)
def test_rows_a7_c8_abort_in_each_phase_leaves_nothing(phase: Phase) -> None:
    cluster = Cluster(
        [config(attention(16)) for _ in range(3)],
        wave_tokens=8,
        ring_depth=1,
        work_wanted=0,
        defer_max_s=9.0,
        lanes_max=1 if phase is Phase.READY else 3,
    )
    shared = distinct(16, 0)
    for stage in range(3):
        cluster.warm(stage, shared[:8])
    if phase is Phase.DEFERRED:
        cluster.submit("donor", [*shared, *distinct(30, 900)])
    if phase in (Phase.ARRIVED, Phase.READY, Phase.ADMITTED, Phase.WAITING):
        cluster.submit("other", distinct(40 if phase is Phase.WAITING else 24, 900))
    if phase is Phase.RETRYING:
        cluster.before_claims = cluster.nodes[1].cache.reset
    cluster.submit("a", [*shared, *distinct(14, 1)], at=0.0001)
    for _ in range(400):
        record = cluster.leader.record(RequestId("a"))
        if record is not None and record.phase is phase:
            break
        cluster.step()
    else:
        raise AssertionError(f"it never was {phase.value}: {cluster.outcomes}")
    cluster.abort("a")
    cluster.finish()
    assert cluster.outcomes["a"] == "abort"
    aborts = [decision for decision in cluster.decisions if isinstance(decision, Abort)]
    assert len(aborts) == (0 if phase is Phase.ARRIVED else 1)


def test_row_a9_the_same_prompt_again_after_an_abort() -> None:
    cluster = Cluster(four_stages(), duplicate=0.5)
    cluster.submit("a#1", distinct(30, 0))
    cluster.abort("a#1", at=0.006)
    cluster.submit("a#2", distinct(30, 0), at=0.007)
    cluster.finish()
    assert cluster.outcomes == {"a#1": "abort", "a#2": "done"}


def test_row_a14_the_same_prompt_at_once_after_the_reply_is_a_full_hit() -> None:
    cluster = Cluster([config(attention(16), recurrent(4)) for _ in range(3)])
    tokens = distinct(24, 0)  # a multiple of B: a token must be left to compute
    cluster.submit("first", tokens)
    cluster.run()
    cluster.submit("second", tokens, at=cluster.now)
    cluster.finish()
    assert cluster.admissions == [("first", 0), ("second", 20)]


@pytest.mark.parametrize("mode", MODES)
def test_row_a15_eviction_on_one_stage_between_hint_and_lease(mode: Agreement) -> None:
    cluster = Cluster(four_stages(), agreement=mode)
    tokens = distinct(28, 0)
    for stage in range(4):
        cluster.warm(stage, tokens)
    cluster.before_claims = cluster.nodes[1].cache.reset
    cluster.submit("a", [*tokens, 1, 2])
    cluster.finish()
    assert cluster.admissions == [("a", 0)]


@pytest.mark.parametrize("pools", [(8, 8, 8), (20, 8, 20)])
def test_row_b1_a_request_larger_than_the_smallest_pool_blocks_nobody(
    pools: tuple[int, ...],
) -> None:
    cluster = Cluster([config(attention(units)) for units in pools])
    cluster.submit("large", distinct(33, 0))
    cluster.submit("small", distinct(4, 100))
    cluster.finish()
    assert cluster.outcomes == {"large": "refused on arrival", "small": "done"}


def test_row_b1_should_it_get_in_it_is_refused_for_good_with_both_numbers() -> None:
    pools = (20, 8, 20)
    cluster = Cluster([config(attention(n)) for n in pools], refuse_on_arrival=False)
    cluster.submit("large", distinct(33, 0))
    cluster.submit("small", distinct(4, 100))
    cluster.finish()
    assert cluster.outcomes == {"large": "refused", "small": "done"}
    refused = cluster.refusals["large"]
    assert (refused.stage, refused.refusal.needed, refused.refusal.available) == (1, 9, 8)


def overlapping_claims(
    pool: int, a: tuple[int, int], b: tuple[int, int], *more: GroupSpec
) -> Cluster:
    """a and b have prefixes of so many blocks cached, and need so many new ones, at once."""
    cluster = Cluster([config(attention(pool), *more) for _ in range(3)], wave_tokens=64)
    ours, theirs = distinct(4 * a[0], 0), distinct(4 * b[0], 1000)
    for stage in range(3):
        snapshots = (True, True) if more else (False, False)
        cluster.warm(stage, ours, snapshots=[len(ours)] if snapshots[0] else [])
        cluster.warm(stage, theirs, snapshots=[len(theirs)] if snapshots[1] else [])
    cluster.submit("a", [*ours, *distinct(4 * a[1], 5000)])
    cluster.submit("b", [*theirs, *distinct(4 * b[1], 6000)])
    return cluster


def both_held(cluster: Cluster) -> bool:
    """Whether both were admitted at one time."""
    running: set[str] = set()
    both = False
    for decision in cluster.decisions:
        if isinstance(decision, Admit):
            running.add(decision.request_id)
        elif not isinstance(decision, Undo):
            running.discard(decision.request_id)
        both = both or len(running) == 2
    return both


def test_row_b2_the_suffix_is_reserved_with_the_prefix() -> None:
    """pool 8: a is 2 cached + 3 new, b 2 other cached + 3 new: one at a time, both finish."""
    cluster = overlapping_claims(8, (2, 3), (2, 3))
    cluster.finish()
    assert cluster.outcomes == {"a": "done", "b": "done"}
    assert not both_held(cluster)
    assert cluster.admissions[0] == ("a", 8)


@pytest.mark.parametrize("groups", [(), (recurrent(3),)])
def test_row_b3_the_last_block_and_the_snapshot_are_reserved(
    groups: tuple[GroupSpec, ...],
) -> None:
    """pool 7: a needs 4 + 1, b 3 + 1."""
    cluster = overlapping_claims(7, (4, 1), (3, 1), *groups)
    cluster.finish()
    assert cluster.outcomes == {"a": "done", "b": "done"}
    assert not both_held(cluster)


def test_row_b7_a_claimed_victim_without_substitute_leaves_the_reservation_as_it_was() -> None:
    """a's escrow has b's prefix as victims; b's lease may not take them: the floor holds."""
    cluster = overlapping_claims(6, (0, 4), (3, 1))
    cluster.finish()
    assert cluster.outcomes == {"a": "done", "b": "done"}
    assert cluster.admissions[0] == ("a", 0)


def test_row_b11_two_oversized_requests_take_turns_and_small_ones_do_not_starve_them() -> None:
    cluster = Cluster(
        [config(attention(16), headroom=16) for _ in range(3)], wave_tokens=16, lanes_max=4
    )
    cluster.submit("small0", distinct(6, 50))
    cluster.submit("big1", distinct(60, 1000))
    cluster.submit("big2", distinct(60, 2000), at=0.001)
    for index in range(1, 60):
        cluster.submit(f"small{index}", distinct(6, 5000 + 10 * index), at=0.002 * index)
    cluster.finish()
    assert set(cluster.outcomes.values()) == {"done"}
    order = [name for name, _ in cluster.admissions]
    assert order[:3] == ["small0", "big1", "big2"]
    assert not {"big1", "big2"} <= held_together(cluster)


def held_together(cluster: Cluster) -> set[str]:
    """Oversized requests that were admitted at one time."""
    running: set[str] = set()
    together: set[str] = set()
    for decision in cluster.decisions:
        if isinstance(decision, Admit):
            running.add(decision.request_id)
        else:
            running.discard(decision.request_id)
        if {"big1", "big2"} <= running:
            together |= running
    return together


@pytest.mark.parametrize("seed", range(20))
def test_row_b12_prefixes_that_fill_the_pool_and_are_each_others_victims(seed: int) -> None:
    cluster = Cluster([config(attention(6)) for _ in range(4)], seed=seed)
    ours, theirs = distinct(12, 0), distinct(12, 1000)
    for stage in range(4):
        first, second = (ours, theirs) if (seed + stage) % 2 else (theirs, ours)
        cluster.warm(stage, first)
        cluster.warm(stage, second)
    cluster.submit("a", [*ours, *distinct(12, 5000)])
    cluster.submit("b", [*theirs, *distinct(12, 6000)])
    cluster.finish()
    assert cluster.outcomes == {"a": "done", "b": "done"}
    assert [name for name, _ in cluster.admissions] == ["a", "b"]


def test_row_c1_abort_between_launch_and_result_of_the_last_wave() -> None:
    cluster = Cluster(four_stages())
    cluster.submit("a", distinct(14, 0))
    while (record := cluster.leader.record(RequestId("a"))) is None or (
        record.phase is not Phase.COMPLETING
    ):
        cluster.step()
    cluster.abort("a")
    cluster.finish()
    assert cluster.outcomes == {"a": "abort"}
    cluster.submit("b", distinct(14, 0), at=cluster.now)
    cluster.finish()
    assert cluster.admissions[-1] == ("b", 12)  # what was computed is published and valid


def test_row_c13_an_escrow_that_fails_on_one_stage_leaves_no_snapshot_pinned() -> None:
    pools = (32, 12, 32)
    cluster = Cluster([config(attention(n), recurrent(4)) for n in pools], wave_tokens=8)
    tokens = distinct(16, 0)
    for stage in range(3):
        cluster.warm(stage, tokens, snapshots=[8, 16])
    cluster.submit("other", distinct(30, 900))  # 8 blocks: stage 1 has 4 left, all pinned by a
    cluster.submit("a", [*tokens, *distinct(8, 500)])
    cluster.finish()
    assert cluster.outcomes == {"a": "done", "other": "done"}
    assert any(isinstance(decision, Undo) for decision in cluster.decisions)


@pytest.mark.parametrize(
    "kinds", ["RRRA", "ARRR", "AAAR", "RAAA", "RRRR"], ids=lambda kinds: f"stages_{kinds}"
)
def test_row_d6_stages_that_lack_a_window_agree_with_those_that_have_it(kinds: str) -> None:
    cluster = Cluster([config(attention(16) if kind == "A" else recurrent(4)) for kind in kinds])
    tokens = distinct(21, 0)
    cluster.submit("first", tokens)
    cluster.run()
    cluster.submit("second", tokens, at=cluster.now)
    cluster.finish()
    assert cluster.admissions == [("first", 0), ("second", 20)]


def test_row_d2_a_snapshot_at_the_junction_makes_the_third_prompt_a_hit() -> None:
    cluster = Cluster([config(attention(32), recurrent(8)) for _ in range(3)], wave_tokens=64)
    shared = distinct(20, 0)
    for index in range(3):
        cluster.submit(f"r{index}", [*shared, *distinct(12, 1000 * (index + 1))], at=cluster.now)
        cluster.run()
    cluster.conserve()
    assert cluster.admissions == [("r0", 0), ("r1", 0), ("r2", 20)]


@pytest.mark.parametrize("mode", MODES)
def test_row_d12_64_72_90_against_64_80_ends_at_64(mode: Agreement) -> None:
    """Both were hinted 80; before the leases the caches hold 64/72/90 and 64/80."""
    cluster = Cluster(
        [config(attention(64), recurrent(8), block=2) for _ in range(2)], agreement=mode
    )
    tokens = distinct(92, 0)
    both = [64, 72, 80, 90]
    for stage in range(2):
        cluster.warm(stage, tokens[:90], snapshots=both)
        cluster.nodes[stage].cache.check()
    holds = ([64, 72, 90], [64, 80])

    def change() -> None:
        for stage, points in enumerate(holds):
            cluster.nodes[stage].cache.reset()
            cluster.warm(stage, tokens[:90], snapshots=points)

    cluster.before_claims = change
    cluster.submit("a", tokens[:82])
    cluster.finish()
    limits = [decision.limit for decision in cluster.decisions if isinstance(decision, Retry)]
    assert cluster.admissions == [("a", 64)]
    assert limits == ([64] if mode == "set" else [72, 64])


@pytest.mark.parametrize("mode", MODES)
def test_row_d12_disjoint_snapshots_on_three_stages_end_at_0(mode: Agreement) -> None:
    cluster = Cluster([config(attention(32), recurrent(8)) for _ in range(3)], agreement=mode)
    tokens = distinct(60, 0)
    for stage in range(3):
        cluster.warm(stage, tokens, snapshots=[8, 16, 24, 32, 40, 48])
    holds = ([8, 32], [16, 40], [24, 48])

    def change() -> None:
        for stage, points in enumerate(holds):
            cluster.nodes[stage].cache.reset()
            cluster.warm(stage, tokens, snapshots=points)

    cluster.before_claims = change
    cluster.submit("a", [*tokens[:50], 1])
    cluster.finish()
    retries = sum(isinstance(decision, Retry) for decision in cluster.decisions)
    assert cluster.admissions == [("a", 0)]
    assert retries <= (1 if mode == "set" else 6)


def test_a_lower_endpoint_that_one_stage_cannot_hold_undoes_all() -> None:
    """The suffix of the lower endpoint needs room that another request has on one stage."""
    cluster = Cluster([config(attention(12), recurrent(4)), config(attention(24), recurrent(4))])
    shared = distinct(16, 0)
    for stage in range(2):
        cluster.warm(stage, shared, snapshots=[16])
    cluster.submit("b", [*shared, *distinct(8, 100)])  # holds 4 shared blocks and 2 of its own
    cluster.run(until=0.001)

    def wipe_later() -> None:
        cluster.before_claims = cluster.nodes[1].cache.reset

    cluster.wave_tokens = 1  # b takes its time
    while not cluster.admissions:
        cluster.step()
    wipe_later()
    cluster.submit("a", [*shared, *distinct(12, 200)], at=cluster.now)
    cluster.finish()
    assert cluster.outcomes == {"a": "done", "b": "done"}
    edges = cluster.leader.books.edges
    assert any(phase is Phase.RETRYING and event.value == "no room" for phase, event in edges)
