"""Driver and stages together: any interleaving of planes, aborts and failures gives right answers
and leaves nothing behind."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from checksum_executor import FAIL_TOKEN
from hypothesis import given, settings
from hypothesis import strategies as st
from world import World

from wavepp.protocol.messages import SpanPlan
from wavepp.units import RequestId

worlds = st.builds(
    World,
    stages=st.integers(1, 4),
    block_size=st.sampled_from([1, 3, 4]),
    blocks=st.integers(24, 40),
    wave_tokens=st.integers(1, 12),
    ring_depth=st.integers(1, 6),
    lanes=st.integers(1, 5),
    planner=st.sampled_from(["greedy", "static", "mpu", "balanced"]),
    admission=st.sampled_from(["wave", "wave", "serial"]),
    reservation=st.sampled_from(["escrow", "escrow", "lease", "none"]),
    defer_shared_prefix=st.just(False),
)
prompts = st.lists(
    st.lists(st.integers(10, FAIL_TOKEN - 1), min_size=1, max_size=22), min_size=1, max_size=8
)


def check_tiling(world: World) -> None:
    """Spans of an attempt follow each other; a served request's cover what it held."""
    spans: dict[tuple[RequestId, int], list[SpanPlan]] = defaultdict(list)
    for span in world.spans:
        spans[span.request_id, span.attempt].append(span)
    ends: dict[RequestId, int] = {}  # of the last attempt
    endpoints = {(a.request_id, a.attempt): a.endpoint for a in world.admissions}
    for (request_id, number), attempt in sorted(spans.items()):
        ends[request_id] = endpoints[request_id, number]
        for span in attempt:
            assert span.start == ends[request_id], attempt
            ends[request_id] += span.length
    for user_id, result in world.results.items():
        if result.finish_reason in ("length", "stop"):
            held = result.num_prompt_tokens + max(len(result.token_ids) - 1, 0)
            assert ends[world.inner_ids[user_id]] == held
            last = max(number for name, number in spans if name == world.inner_ids[user_id])
            assert result.num_cached_tokens == endpoints[world.inner_ids[user_id], last]


def check_fcfs(world: World) -> None:
    """Leases are given first come, first served where nobody is deferred. (Who gets his first may
    be admitted later: his endpoint fell, and he votes again.)"""
    assert world.first_claims() == sorted(world.first_claims())


@settings(max_examples=150, deadline=None)
@given(worlds, prompts, st.randoms(use_true_random=False), st.integers(0, 3))
def test_random_interleavings_give_right_answers(
    world: World, prompts: list[list[int]], rng: random.Random, max_tokens: int
) -> None:
    for index, prompt in enumerate(prompts):
        for _ in range(rng.randrange(8)):
            world.step(rng)
        world.arrive(str(index), prompt, max_tokens=max_tokens, scores=index % 2 == 0)
    world.drain(rng)
    assert len(world.results) == len(prompts)
    assert {r.finish_reason for r in world.results.values()} <= {"length", "stop"}
    check_tiling(world)
    check_fcfs(world)


@settings(max_examples=150, deadline=None)
@given(worlds, prompts, st.randoms(use_true_random=False))
def test_random_aborts_leave_nothing_behind(
    world: World, prompts: list[list[int]], rng: random.Random
) -> None:
    aborted: set[str] = set()
    for index, prompt in enumerate(prompts):
        world.arrive(str(index), prompt)
        for _ in range(rng.randrange(12)):
            world.step(rng)
            if rng.random() < 0.15:
                victim = str(rng.randrange(index + 1))
                if victim not in world.results:
                    aborted.add(victim)
                world.abort(victim)
    world.drain(rng)
    reasons = {user_id: result.finish_reason for user_id, result in world.results.items()}
    assert {user_id for user_id, reason in reasons.items() if reason == "abort"} == aborted
    assert len(reasons) == len(prompts)
    check_tiling(world)
    check_fcfs(world)


@settings(max_examples=150, deadline=None)
@given(worlds, prompts, st.randoms(use_true_random=False))
def test_random_failures_hit_only_the_guilty(
    world: World, prompts: list[list[int]], rng: random.Random
) -> None:
    guilty = {index for index in range(len(prompts)) if rng.random() < 0.3}
    for index, prompt in enumerate(prompts):
        if index in guilty:
            stage = rng.randrange(len(world.cores))
            prompt.insert(rng.randrange(len(prompt) + 1), FAIL_TOKEN + stage)
        world.arrive(str(index), prompt)
        for _ in range(rng.randrange(8)):
            world.step(rng)
    world.drain(rng)
    failed = {int(user_id) for user_id, r in world.results.items() if r.finish_reason == "error"}
    assert failed == guilty
    for index in guilty:
        assert "can't be computed" in (world.results[str(index)].error or "")


@settings(max_examples=60, deadline=None)
@given(worlds, st.randoms(use_true_random=False))
def test_an_id_is_free_again_after_its_abort(world: World, rng: random.Random) -> None:
    for turn in range(4):
        world.arrive("same", [turn + 10] * 9)
        for _ in range(rng.randrange(20)):
            world.step(rng)
        if "same" not in world.results:
            world.abort("same")
            assert world.results["same"].finish_reason == "abort"
    world.arrive("same", [50, 51, 52])
    world.drain(rng)
    assert world.results["same"].finish_reason in ("length", "stop")


def test_rows_c1_c8_abort_during_the_last_wave_is_an_abort() -> None:
    world = World(stages=2)
    world.arrive("a", list(range(10, 16)))
    while not world.parcels[-1]:
        assert world.step(random.Random(0))
    world.abort("a")
    world.complete_wave()
    assert world.results["a"].finish_reason == "abort"
    assert world.results["a"].token_ids == ()
    world.drain()


def test_row_c3_blocks_of_an_aborted_request_are_not_reused_before_its_last_wave() -> None:
    """The pool holds one request: B asks for A's blocks while A's chunks are still under way."""
    world = World(stages=4, blocks=4, wave_tokens=4, ring_depth=8)
    world.arrive("a", list(range(10, 26)))
    world.arrive("b", list(range(30, 46)))
    world.hold_round()  # announces a
    world.hold_round()  # announces b
    for stage in (0, 0, 0, 1, 1, 2):
        world.run_wave(stage)
    assert [wave.wave for wave in world.driver.ring] == [1, 2, 3, 4]
    world.abort("a")
    rng = random.Random(2)
    while not world.driver.leader.admitted:
        world.step(rng)
    assert world.cores[3].control.finished_wave == 4  # the last wave that writes A's blocks
    world.drain(rng)
    assert world.results["b"].finish_reason in ("length", "stop")


def test_chunks_of_one_request_are_in_flight_together() -> None:
    world = World(stages=4, wave_tokens=4, ring_depth=8)
    world.arrive("a", list(range(10, 42)))
    while not world.driver.ring.launched:
        world.step(random.Random(0))
    assert [wave.spans[0].start for wave in world.driver.ring] == [0, 4, 8, 12, 16, 20, 24, 28]
    world.drain()


def test_nobody_passes_a_head_that_waits() -> None:
    world = World(stages=1, blocks=10, lanes=4)
    world.arrive("big", [10] * 20)
    world.arrive("bigger", [11] * 24)
    world.arrive("small", [12] * 4)
    world.drain()
    assert world.first_admissions() == [1, 2, 3]
    done = {name: world.results[name].timings.admitted_s for name in world.results}
    assert done["big"] < done["bigger"] <= done["small"]  # type: ignore[operator]


def test_a_request_whose_endpoint_falls_may_be_admitted_after_one_that_came_later() -> None:
    """b's prefix is lost on stage 1 between hint and lease, so it votes again; c, which took its
    lease after b, needs one vote. c passes nobody who waits for capacity: both hold theirs."""
    world = World(stages=2, blocks=32, defer_shared_prefix=False)
    document = list(range(10, 26))
    world.arrive("a", document)
    world.drain()
    world.arrive("x", [100] * 3)
    world.arrive("b", document)
    world.arrive("c", [200] * 6)
    world.hold_round()  # announces x
    world.hold_round()  # announces b and c
    world.cores[1].control.reset()
    world.drain()
    claimed = [int(claim.request_id.rpartition("#")[2]) for claim in world.claims]
    assert claimed == [1, 2, 3, 4]
    admitted = [int(admit.request_id.rpartition("#")[2]) for admit in world.admissions]
    assert admitted == [1, 2, 4, 3]
    assert world.results["b"].num_cached_tokens == 0


def test_a_request_larger_than_the_pool_is_refused_and_the_next_one_runs() -> None:
    world = World(stages=2, blocks=8)
    with pytest.raises(AssertionError):
        world.arrive("too large", [10] * 33)
    world.arrive("fits", [10] * 32)
    world.arrive("small", [10])
    world.drain()
    assert set(world.results) == {"fits", "small"}


shared_prompts = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(1, 8)), min_size=2, max_size=9
)
"""(document, tokens of it, tokens of its own)"""


def shared_prompt(shape: tuple[int, int, int], serial: int) -> list[int]:
    document, taken, own = shape
    shared = range(100 * document, 100 * document + taken)
    return [*shared, *range(500 + 9 * serial, 500 + 9 * serial + own)]


reusing_worlds = st.builds(
    World,
    stages=st.integers(1, 4),
    block_size=st.sampled_from([1, 3, 4]),
    blocks=st.integers(40, 60),
    wave_tokens=st.integers(1, 12),
    ring_depth=st.integers(1, 6),
    lanes=st.integers(1, 5),
    headroom_waves=st.integers(0, 4),
    host_blocks=st.sampled_from([0, 3, 30]),
    kinds=st.sampled_from(["F", "FS", "S", "FR", "R", "RRF", "FSR"]),
    caching=st.sampled_from([True, True, True, False]),
    agreement=st.sampled_from(["set", "stepwise"]),
    defer_shared_prefix=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(reusing_worlds, shared_prompts, st.randoms(use_true_random=False), st.integers(0, 3))
def test_random_reuse_gives_right_answers(
    world: World, shapes: list[tuple[int, int, int]], rng: random.Random, max_tokens: int
) -> None:
    """Shared prefixes, salts, all kinds of windows, small pools, host tiers, aborts, resets."""
    aborted: set[str] = set()
    for index, shape in enumerate(shapes):
        salt = rng.choice(["", "", "a"])
        world.arrive(str(index), shared_prompt(shape, index), max_tokens=max_tokens, salt=salt)
        for _ in range(rng.randrange(25)):
            world.step(rng)
            if rng.random() < 0.02:
                rng.choice(world.cores).control.reset()
            victim = str(rng.randrange(index + 1))
            if rng.random() < 0.05 and victim not in world.results:
                aborted.add(victim)
                world.abort(victim)
    world.drain(rng)
    reasons = {user_id: result.finish_reason for user_id, result in world.results.items()}
    assert {user_id for user_id, reason in reasons.items() if reason == "abort"} == aborted
    assert set(reasons.values()) <= {"abort", "length", "stop"}
    assert len(reasons) == len(shapes)
    check_tiling(world)
