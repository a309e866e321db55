"""A stage dies: the next epoch goes on with all that is unfinished, and takes nothing from the one
before."""

from __future__ import annotations

import random

import pytest
from checksum_executor import FAIL_TOKEN
from hypothesis import given, settings
from hypothesis import strategies as st
from world import World

from wavepp.control.facts import RoundAnswered, WaveCompleted
from wavepp.units import WaveNumber

PROMPT = list(range(10, 30))


def run_until(world: World, reached: object, *, moves: int = 1000) -> None:
    """Random moves until a callable says so."""
    assert callable(reached)
    rng = random.Random(0)
    for _ in range(moves):
        if reached():
            return
        assert world.step(rng)
    raise AssertionError("never")


def told(world: World, name: str, count: int) -> object:
    return lambda: len(world.told[name]) >= count


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        World,
        stages=st.integers(1, 3),
        blocks=st.integers(24, 40),
        wave_tokens=st.integers(1, 12),
        ring_depth=st.integers(1, 6),
        lanes=st.integers(1, 5),
        kinds=st.sampled_from(["F", "FS"]),
        planner=st.sampled_from(["greedy", "mpu", "balanced"]),
        admission=st.sampled_from(["wave", "wave", "serial"]),
        max_request_retries=st.just(9),
    ),
    st.lists(
        st.lists(st.integers(10, FAIL_TOKEN - 1), min_size=1, max_size=22), min_size=1, max_size=8
    ),
    st.randoms(use_true_random=False),
    st.integers(0, 3),
)
def test_random_deaths_lose_no_request(
    world: World, prompts: list[list[int]], rng: random.Random, max_tokens: int
) -> None:
    for index, prompt in enumerate(prompts):
        for _ in range(rng.randrange(12)):
            world.step(rng)
        dies = rng.random() < 0.4
        if dies:
            world.lose(rng.randrange(world.layers))
        world.arrive(str(index), prompt, max_tokens=max_tokens, scores=index % 2 == 0)
        if dies:
            world.driver.check()
            world.go_on()
    world.drain(rng)
    assert len(world.results) == len(prompts)
    assert {result.finish_reason for result in world.results.values()} <= {"length", "stop"}
    assert world.driver.counters.finished == len(prompts)


def test_tokens_that_were_told_are_not_told_again() -> None:
    world = World(stages=3)
    world.arrive("a", PROMPT, max_tokens=12)
    run_until(world, told(world, "a", 5))
    before = list(world.told["a"])
    world.lose(1)
    world.go_on()
    world.drain()
    assert world.told["a"][: len(before)] == before
    assert len(world.results["a"].token_ids) == 12


def test_first_come_first_served_over_epochs() -> None:
    world = World(stages=2, lanes=1)
    for name in "abc":
        world.arrive(name, PROMPT)
    run_until(world, lambda: len(world.driver.ring) > 0)
    world.lose(0)
    world.arrive("d", PROMPT)
    world.go_on()
    world.drain()
    assert world.first_claims() == [1, 2, 3, 4]


def test_requests_come_and_go_while_there_is_no_stage() -> None:
    world = World(stages=2)
    for name in "ab":
        world.arrive(name, PROMPT)
    run_until(world, lambda: len(world.driver.ring) > 0)
    launched = len(world.launches)
    world.lose(0)
    assert not world.driver.is_busy
    assert world.driver.next_timer is None
    world.abort("a")
    assert world.results["a"].finish_reason == "abort"
    world.arrive("a", PROMPT[:7])
    assert len(world.launches) == launched
    assert world.moves() == []
    world.go_on()
    world.drain()
    assert {name: result.finish_reason for name, result in world.results.items()} == {
        "a": "length",
        "b": "length",
    }
    assert world.results["a"].num_prompt_tokens == 7


def test_who_was_computed_at_too_many_deaths_is_told_so_and_the_others_go_on() -> None:
    world = World(stages=2, lanes=1, max_request_retries=1)
    world.arrive("long", PROMPT, max_tokens=9)
    world.arrive("waits", PROMPT)
    for deaths in (1, 2):
        run_until(world, told(world, "long", deaths))
        world.lose(1)
        world.go_on()
    result = world.results["long"]
    assert (result.finish_reason, result.token_ids) == ("error", ())
    assert result.error == (
        "stage 1 died; this request was being computed each of the 2 times that a stage died"
    )
    world.drain()
    assert world.results["waits"].finish_reason == "length"


def test_who_does_not_fit_the_new_stage_is_told_so() -> None:
    world = World(stages=2, blocks=8)
    world.arrive("large", PROMPT)
    world.arrive("small", PROMPT[:8])
    world.lose(1)
    world.go_on(blocks=4)
    assert world.results["large"].error == (
        "the request needs 5 cache blocks of 4 tokens; stage 1 has 4"
    )
    world.drain()
    assert world.results["small"].finish_reason == "length"


def test_survivors_drop_what_they_cached() -> None:
    world = World(stages=2)
    world.arrive("a", PROMPT)
    world.drain()
    world.arrive("b", PROMPT)
    world.drain()
    assert world.results["b"].num_cached_tokens == 16
    world.lose(0)
    world.go_on()
    world.arrive("c", PROMPT)
    world.drain()
    assert world.results["c"].num_cached_tokens == 0


def test_counts_go_on() -> None:
    world = World(stages=2)
    for epoch in (1, 2):
        world.arrive("a", PROMPT)
        world.drain()
        counters = world.driver.counters
        assert counters.finished == epoch
        assert counters.prompt_tokens == epoch * len(PROMPT)
        waves = counters.past_waves + world.driver.ring.completed
        rounds = counters.past_rounds + world.driver.rounds.number
        assert waves == len(world.launches)
        assert rounds >= 2 * epoch
        assert world.driver.leader.books.tally.admitted == epoch
        world.lose(1)
        world.go_on()


@pytest.mark.parametrize("gone_on", [False, True])
def test_what_comes_from_an_epoch_that_is_over_is_ignored(gone_on: bool) -> None:
    world = World(stages=2)
    world.arrive("a", PROMPT)
    for stage in range(2):
        world.deliver_round(stage)
    replies = tuple(world.replies)
    run_until(world, lambda: len(world.driver.ring) > 0)
    world.lose(0)
    if gone_on:
        world.go_on()
    late = WaveCompleted(epoch=1, wave=WaveNumber(1), outputs=(), errors=(), acks=())
    assert world.driver.handle(late, now=world.now) == []
    assert world.driver.handle(RoundAnswered(replies=replies), now=world.now) == []
    if not gone_on:
        world.go_on()
    world.drain()
    assert world.results["a"].finish_reason == "length"
