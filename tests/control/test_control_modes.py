"""The baselines in the running control: one admission at a time, and less than an escrow."""

from __future__ import annotations

import pytest
from world import World

from wavepp.cache.keys import make_prompt
from wavepp.cache.types import Materialized, Reservation
from wavepp.protocol.messages import Admit
from wavepp.protocol.states import Phase
from wavepp.units import RequestId

GUEST = RequestId("guest")


def phase(world: World, name: str) -> Phase:
    record = world.driver.leader.record(world.inner_ids[name])
    assert record is not None
    return record.phase


def run_wave(world: World) -> None:
    for stage in range(len(world.cores)):
        world.run_wave(stage)
    world.complete_wave()


# -- serial admission ------------------------------------------------------------------------------


def test_serial_admission_walks_twice_and_waits_for_every_stage_to_enqueue() -> None:
    world = World(stages=2, admission="serial")
    world.arrive("a", list(range(10, 18)))
    first = world.rounds[0]
    assert first is not None
    assert (len(first.ask.hints), first.ask.exact, len(first.prompts)) == (1, True, 1)
    world.hold_round()
    second = world.rounds[0]
    assert second is not None
    assert (len(second.ask.claims), second.ask.hints) == (1, ())
    world.hold_round()
    third = world.rounds[0]
    assert third is not None
    assert [type(entry.decision) for entry in third.entries] == [Admit]
    assert phase(world, "a") is Phase.ADMITTED
    world.deliver_round(0)
    assert not world.launches  # one stage has not said that it enqueued it
    world.deliver_round(1)
    world.answer_round()
    assert len(world.launches) == 1
    world.drain()


def test_serial_admission_stops_the_planner_and_wave_admission_does_not() -> None:
    launched = {}
    for admission in ("serial", "wave"):
        world = World(
            stages=2, wave_tokens=8, ring_depth=1, admission=admission, defer_shared_prefix=False
        )
        world.arrive("a", list(range(10, 34)))
        while not world.launches:
            world.hold_round()
        world.arrive("b", [100] * 8)
        run_wave(world)  # the ring is empty, a has two waves to go, b is asked about
        launched[admission] = len(world.launches)
        world.drain()
    assert launched == {"serial": 1, "wave": 2}


def test_between_two_serial_admissions_waves_are_planned() -> None:
    """a runs as soon as it is enqueued, though b has waited all the time."""
    world = World(stages=2, wave_tokens=8, admission="serial", defer_shared_prefix=False)
    world.arrive("a", list(range(10, 18)))
    world.arrive("b", [100] * 8)
    for _ in range(3):
        world.hold_round()
    assert [span.request_id for span in world.spans] == [world.inner_ids["a"]]
    assert phase(world, "b") is Phase.ANNOUNCED
    world.drain()


def test_an_abort_in_the_middle_of_a_serial_admission_lets_the_planner_go_on() -> None:
    for rounds in range(3):
        world = World(stages=2, wave_tokens=8, ring_depth=1, admission="serial")
        world.arrive("a", list(range(10, 34)))
        while not world.launches:
            world.hold_round()
        world.arrive("b", [100] * 8)
        for _ in range(rounds):
            world.hold_round()
        run_wave(world)
        before = len(world.launches)
        world.abort("b")
        assert len(world.launches) == before + 1
        world.drain()


# -- less than an escrow ---------------------------------------------------------------------------


def guest(world: World, stage: int, tokens: int) -> None:
    """Somebody else takes room on one stage, from the start."""
    cache = world.cores[stage].control.cache
    prompt = make_prompt([1] * tokens, cache.config.block_size)
    assert cache.claim(GUEST, 1, prompt, 0).committed
    assert isinstance(cache.install(GUEST), Materialized)


@pytest.mark.parametrize("reservation", ["lease", "none"])
def test_who_finds_no_room_is_rolled_back_and_the_others_of_its_wave_go_on(
    reservation: Reservation,
) -> None:
    """Stage 1 has room for a and c, not for b; stage 0 has computed all three."""
    world = World(
        stages=3, blocks=16, wave_tokens=64, ring_depth=2, reservation=reservation,
        defer_shared_prefix=False,
    )  # fmt: skip
    guest(world, 1, 4 * 9)
    world.arrive("a", list(range(10, 26)))  # 4 blocks
    world.arrive("b", list(range(100, 124)))  # 6
    world.arrive("c", list(range(200, 210)))  # 3
    while len(world.launches) < 1 or any(world.rounds):
        world.hold_round()
    names = [span.request_id.partition("#")[0] for span in world.spans]
    assert sorted(names) == ["a", "b", "c"]
    while world.waves[0]:
        run_wave(world)
        if any(world.rounds):
            world.hold_round()
    assert {name: result.finish_reason for name, result in world.results.items()} == {
        "a": "length", "c": "length",
    }  # fmt: skip
    assert world.driver.leader.books.tally.rolled_back >= 1
    world.cores[1].control.machine.release(GUEST)
    world.drain()
    assert world.results["b"].finish_reason in ("length", "stop")


def test_a_rolled_back_request_waits_for_a_release_where_it_found_no_room() -> None:
    world = World(stages=2, blocks=8, wave_tokens=64, reservation="none")
    guest(world, 1, 16)
    world.arrive("a", list(range(10, 34)))  # 6 blocks
    while any(world.rounds) or world.waves[0]:
        if any(world.rounds):
            world.hold_round()
        else:
            run_wave(world)
    # Tried a second time, since nobody held anything as far as the driver knows; then no more.
    assert phase(world, "a") is Phase.WAITING
    assert (len(world.claims), world.driver.leader.books.tally.rolled_back) == (2, 2)
    world.cores[1].control.machine.release(GUEST)
    world.arrive("b", [500])
    world.drain()
    assert world.results["a"].finish_reason in ("length", "stop")


def test_a_rollback_that_no_release_can_help_ends_the_request() -> None:
    """It can't be, by the sums; were it so, the request would fail and not wait for ever."""
    world = World(stages=2, blocks=8, wave_tokens=64, reservation="none")
    pool = world.cores[1].control.cache._parts.pools[0]
    pool.pop(4)  # and nobody has them
    world.arrive("a", list(range(10, 34)))
    while any(world.rounds) or world.waves[0]:
        if any(world.rounds):
            world.hold_round()
        else:
            run_wave(world)
    assert world.results["a"].finish_reason == "error"
    assert "capacity" in (world.results["a"].error or "")


@pytest.mark.parametrize("reservation", ["lease", "none"])
def test_two_that_take_each_other_s_room_both_finish(reservation: Reservation) -> None:
    """Each fills the pool; the first to be rolled back twice goes alone."""
    world = World(stages=2, blocks=8, wave_tokens=64, reservation=reservation)
    for name, first in (("a", 10), ("b", 100), ("c", 200)):
        world.arrive(name, list(range(first, first + 30)), max_tokens=2)
    world.drain()
    assert set(world.results) == {"a", "b", "c"}
    assert world.driver.leader.books.tally.rolled_back >= 2


def test_with_escrows_nobody_is_rolled_back() -> None:
    world = World(stages=2, blocks=8, wave_tokens=64)
    for name, first in (("a", 10), ("b", 100), ("c", 200)):
        world.arrive(name, list(range(first, first + 30)), max_tokens=2)
    world.drain()
    assert world.driver.leader.books.tally.rolled_back == 0
