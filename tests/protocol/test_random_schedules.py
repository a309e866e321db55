"""Random worlds: stages that differ, tiny pools, aborts, failures, wipes, answers late and twice.

In every one of them each request gets exactly one answer, every span reads its own prefix, claims
are first come, first served, and at the end nothing is held and all logs are equal.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from cluster import Cluster, attention, config, distinct, recurrent
from hypothesis import given, settings
from hypothesis import strategies as st

from wavepp.cache.types import CacheConfig, GroupSpec
from wavepp.protocol.states import Edge, Event, Phase, all_edges
from wavepp.units import RequestId

SHARES = [distinct(40, 10_000 * (index + 1)) for index in range(3)]


def stage_config(rng: random.Random, blocks: int) -> CacheConfig:
    """Attention, with a sliding or a recurrent window, or only that."""
    kinds = rng.choice(["a", "a", "ar", "r", "as"])
    units = blocks + rng.choice([0, 0, 3])
    groups: list[GroupSpec] = []
    if "a" in kinds:
        groups.append(attention(units, host=rng.choice([0, 0, 8])))
    if "s" in kinds:
        window = rng.choice([4, 6, 8])
        groups.append(GroupSpec(name="slide", kind="sliding", units=units, window=window))
    if "r" in kinds:
        groups.append(recurrent(rng.choice([1, 2, 4, 8])))
    return config(*groups, slots=rng.choice([2, 4]), headroom=rng.choice([0, 16, 32]))


def world(seed: int) -> Cluster:
    """A pipeline and its traffic, all from one seed."""
    rng = random.Random(seed)
    blocks = rng.choice([9, 12, 16, 32])
    cluster = Cluster(
        [stage_config(rng, blocks) for _ in range(rng.randint(1, 4))],
        seed=seed,
        wave_tokens=rng.choice([8, 16]),
        ring_depth=rng.choice([1, 4]),
        lanes_max=rng.choice([1, 2, 4]),
        duplicate=rng.choice([0.0, 0.2]),
        fail=rng.choice([0.0, 0.0, 0.1]),
        work_wanted=rng.choice([None, 0]),
        agreement=rng.choice(["set", "stepwise"]),
        defer_shared_prefix=rng.random() < 0.7,
        defer_max_s=rng.choice([0.01, 0.1]),
    )
    for index in range(rng.randint(2, 14)):
        shared = rng.choice(SHARES)[: rng.choice([0, 4, 8, 12, 20, 28, 36])]
        tokens = [*shared, *distinct(rng.randint(1, 14), 1000 * (index + 1) + 500_000)]
        name, at = f"r{index}", rng.uniform(0.0, 0.1)
        produce = rng.choice([0, 1, 1, 3])
        cluster.submit(name, tokens, at=at, salt=rng.choice(["", "", "b"]), max_tokens=produce)
        if rng.random() < 0.3:
            cluster.abort(name, at=at + rng.uniform(0.0, 0.1))
    for _ in range(rng.choice([0, 0, 2])):
        cluster.at(rng.uniform(0.0, 0.1), rng.choice(cluster.nodes).cache.reset)
    return cluster


@pytest.mark.parametrize("chunk", range(10))
def test_random_worlds_end_well(chunk: int) -> None:
    for seed in range(20 * chunk, 20 * chunk + 20):
        cluster = world(seed)
        cluster.finish()
        outcomes = set(cluster.outcomes.values())
        assert outcomes <= {"done", "abort", "error", "refused on arrival"}, (seed, outcomes)


@pytest.mark.parametrize("seed", [3, 17])
def test_a_seed_makes_one_run(seed: int) -> None:
    runs = [world(seed) for _ in range(2)]
    for cluster in runs:
        cluster.finish()
    assert runs[0].decisions == runs[1].decisions
    assert runs[0].now == runs[1].now


requests = st.lists(
    st.tuples(
        st.integers(0, 2),  # whose prefix
        st.integers(0, 7),  # blocks of it
        st.integers(1, 12),  # tokens of its own
        st.integers(0, 30),  # arrives, ms
        st.none() | st.integers(0, 40),  # given up so long after, ms
    ),
    min_size=1,
    max_size=8,
)
stages = st.lists(
    st.tuples(st.sampled_from(["a", "r", "ar"]), st.integers(11, 16), st.integers(1, 3)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=60, deadline=None)
@given(stages, requests, st.sampled_from(["set", "stepwise"]), st.integers(0, 3))
def test_any_schedule_conserves_everything(
    kinds: list[tuple[str, int, int]],
    traffic: list[tuple[int, int, int, int, int | None]],
    agreement: str,
    seed: int,
) -> None:
    configs = [
        config(
            *([attention(blocks)] if "a" in kind else []),
            *([recurrent(points)] if "r" in kind else []),
        )
        for kind, blocks, points in kinds
    ]
    cluster = Cluster(configs, seed=seed, lanes_max=3, agreement=agreement, duplicate=0.1)
    for index, (whose, blocks, own, at_ms, patience_ms) in enumerate(traffic):
        tokens = [*SHARES[whose][: 4 * blocks], *distinct(own, 1000 * (index + 1))]
        cluster.submit(f"r{index}", tokens, at=at_ms / 1000)
        if patience_ms is not None:
            cluster.abort(f"r{index}", at=(at_ms + patience_ms) / 1000)
    cluster.finish()


# -- every edge of the lifecycle table -----------------------------------------------------------


def stepping_down(**options: Any) -> Cluster:
    """The hints promise 80; the leases find 64/72/90 and 64/80."""
    cluster = Cluster(
        [config(attention(64), recurrent(8), block=2) for _ in range(2)],
        agreement="stepwise",
        **options,
    )
    tokens = distinct(92, 0)
    for stage in range(2):
        cluster.warm(stage, tokens[:90], snapshots=[64, 72, 80, 90])

    def change() -> None:
        for stage, points in enumerate(([64, 72, 90], [64, 80])):
            cluster.nodes[stage].cache.reset()
            cluster.warm(stage, tokens[:90], snapshots=points)

    cluster.before_claims = change
    cluster.submit("a", tokens[:82])
    return cluster


def refused_at_a_retry() -> Cluster:
    """One stage lost the prefix, the other has no room for the longer suffix."""
    cluster = Cluster([config(attention(12), recurrent(4)), config(attention(24), recurrent(4))])
    shared = distinct(16, 0)
    for stage in range(2):
        cluster.warm(stage, shared, snapshots=[16])
    cluster.wave_tokens = 1
    cluster.submit("b", [*shared, *distinct(8, 100)])
    while not cluster.admissions:
        cluster.step()
    cluster.before_claims = cluster.nodes[1].cache.reset
    cluster.submit("a", [*shared, *distinct(12, 200)], at=cluster.now)
    return cluster


def larger_than_the_pool() -> Cluster:
    """It passed the checks on arrival, which were wrong."""
    cluster = Cluster([config(attention(8))], refuse_on_arrival=False)
    cluster.submit("a", distinct(40, 0))
    return cluster


def waiting_for_a_prefix() -> Cluster:
    """Another request computes what it lacks."""
    cluster = Cluster([config(attention(16))], work_wanted=0, wave_tokens=4, defer_max_s=9.0)
    shared = distinct(24, 0)
    cluster.submit("donor", [*shared, 1])
    cluster.submit("a", [*shared, 2])
    return cluster


def aborted_in(phase: Phase, cluster: Cluster) -> Cluster:
    """Given up in this phase."""
    while (record := cluster.leader.record(RequestId("a"))) is None or record.phase is not phase:
        cluster.step()
    cluster.abort("a")
    return cluster


def test_every_lifecycle_edge_is_taken() -> None:
    special = [
        stepping_down(),
        refused_at_a_retry(),
        larger_than_the_pool(),
        aborted_in(Phase.CLAIMING, stepping_down()),
        aborted_in(Phase.RETRYING, stepping_down()),
        aborted_in(Phase.DEFERRED, waiting_for_a_prefix()),
    ]
    taken: Counter[Edge] = Counter()
    for cluster in [*special, *(world(seed) for seed in range(200, 300))]:
        cluster.finish()
        taken.update(cluster.leader.books.edges)
    # These stages make escrows, and who has one is never rolled back; the simulator takes the rest.
    less_than_an_escrow = {(Phase.RUNNING, Event.ROLL_BACK), (Phase.COMPLETING, Event.ROLL_BACK)}
    assert all_edges() - set(taken) == less_than_an_escrow
    assert taken[Phase.RETRYING, Event.NO_ROOM] >= 1
