"""What a request holds before it is materialised: an escrow, a lease alone, or nothing. With less
than an escrow materialisation may find no room, or its prefix gone; then nothing has changed."""

from __future__ import annotations

import pytest
from cache_world import World, attention, recurrent, sliding, tokens

from wavepp.cache.types import Materialized, Refusal, Reservation
from wavepp.units import RequestId

R, S = RequestId("r"), RequestId("s")
LESS: tuple[Reservation, ...] = ("lease", "none")


def install(stage: World, rid: str) -> Materialized | Refusal:
    """As the stage does it, copies included."""
    done = stage.cache.install(RequestId(rid))
    if isinstance(done, Materialized):
        stage.apply(done.effects)
        stage.position[rid] = done.endpoint
        stage.read(rid)
    return done


def pins(stage: World) -> int:
    return int(sum(pool.pins.sum() for pool in stage.cache._parts.pools))


def run(stage: World, rid: str, ids: list[int]) -> None:
    prompt = stage.prompt(ids)
    vote = stage.claim(rid, prompt)
    if not vote.committed:
        stage.cache.move(RequestId(rid), 2, vote.endpoint)
    assert isinstance(install(stage, rid), Materialized)
    stage.finish(rid)


@pytest.mark.parametrize("reservation", ["escrow", *LESS])
@pytest.mark.parametrize("group", [attention(8), sliding(8, 9), recurrent(4)])
def test_a_request_runs_from_its_prefix_under_every_reservation(world, reservation, group) -> None:
    stage = world(group, reservation=reservation)
    ids = tokens(0, 20)
    for number, expected in enumerate((0, 16)):
        rid = f"r{number}"
        vote = stage.claim(rid, stage.prompt(ids))
        if vote.endpoint < 16:
            vote = stage.cache.move(RequestId(rid), 2, vote.endpoint)
        assert (vote.endpoint, vote.committed) == (expected, True)
        assert isinstance(install(stage, rid), Materialized)
        stage.finish(rid)
    assert stage.cache.leftovers() is None


def test_a_lease_alone_pins_and_promises_nothing(world) -> None:
    stage = world(attention(8), reservation="lease")
    run(stage, "a", tokens(0, 8))
    vote = stage.claim("s", stage.prompt(tokens(0, 24)), 8)
    assert (vote.endpoint, vote.committed) == (8, True)
    assert pins(stage) == 2
    assert stage.cache.stats().groups[0].reserved == 0
    stage.cache.free(S)
    assert pins(stage) == 0


def test_without_pins_nothing_is_held_but_an_endpoint(world) -> None:
    stage = world(attention(8), reservation="none")
    run(stage, "a", tokens(0, 8))
    vote = stage.claim("r", stage.prompt(tokens(0, 24)), 8)
    assert (vote.endpoint, vote.committed) == (8, True)
    assert (pins(stage), stage.cache.stats().groups[0].reserved) == (0, 0)
    assert stage.cache.held() == (R,)
    stage.cache.undo(R)
    assert stage.cache.leftovers() is None


@pytest.mark.parametrize("reservation", LESS)
def test_no_room_at_materialisation_is_a_refusal_that_changes_nothing(world, reservation) -> None:
    """Both are admitted, one fits. After the first has gone the second fits, too."""
    stage = world(attention(8), reservation=reservation)
    for rid, first in (("r", 0), ("s", 100)):
        assert stage.claim(rid, stage.prompt(tokens(first, 20)), 0).committed
    assert isinstance(install(stage, "r"), Materialized)
    refused = install(stage, "s")
    assert refused == Refusal(reason="capacity", group="attention", needed=5, available=3)
    stage.cache.check()
    assert stage.cache.held() == (R, S)
    stage.finish("r")
    assert isinstance(install(stage, "s"), Materialized)
    stage.finish("s")
    assert stage.cache.leftovers() is None


def test_a_lease_that_found_no_room_still_pins(world) -> None:
    stage = world(attention(8), reservation="lease")
    run(stage, "a", tokens(0, 12))
    stage.claim("r", stage.prompt(tokens(200, 20)), 0)
    stage.claim("s", stage.prompt(tokens(0, 28)), 12)
    install(stage, "r")
    assert isinstance(install(stage, "s"), Refusal)
    assert stage.hint(tokens(0, 13)) == 12
    stage.cache.check()
    stage.finish("r")
    stage.cache.free(S)


def test_a_prefix_that_nobody_pinned_may_be_gone(world) -> None:
    stage = world(attention(5), reservation="none")
    run(stage, "a", tokens(0, 12))
    vote = stage.claim("s", stage.prompt(tokens(0, 16)), 12)
    assert vote.endpoint == 12
    run(stage, "b", tokens(100, 16))
    refused = install(stage, "s")
    assert refused == Refusal(reason="gone", group="prefix", needed=3, available=1)
    stage.cache.check()
    assert pins(stage) == 0
    stage.cache.undo(S)
    again = stage.cache.claim(S, 2, stage.prompt(tokens(0, 16)), 4)
    assert (again.endpoint, again.committed) == (4, True)
    assert isinstance(install(stage, "s"), Materialized)
    stage.finish("s")


@pytest.mark.parametrize("reservation", LESS)
def test_a_move_goes_lower_only(world, reservation) -> None:
    stage = world(attention(8), reservation=reservation)
    run(stage, "a", tokens(0, 16))
    assert stage.claim("r", stage.prompt(tokens(0, 20)), 16).endpoint == 16
    moved = stage.cache.move(R, 2, 8)
    assert (moved.endpoint, moved.attempt, moved.committed) == (8, 2, True)
    assert stage.cache.move(R, 3, 16).endpoint == 8
    assert isinstance(install(stage, "r"), Materialized)
    stage.finish("r")


@pytest.mark.parametrize("reservation", LESS)
def test_what_an_empty_pool_could_not_hold_is_refused_at_the_claim(world, reservation) -> None:
    stage = world(attention(4), reservation=reservation)
    vote = stage.claim("r", stage.prompt(tokens(0, 20)), 0)
    assert vote.refusal == Refusal(reason="never_fits", group="attention", needed=5, available=4)
    assert not vote.committed
    stage.cache.undo(R)
    assert stage.cache.leftovers() is None


def test_a_walk_sees_what_a_lease_would_and_owns_nothing(world) -> None:
    stage = world(attention(8), recurrent(4))
    stage.run("a", tokens(0, 16), snapshots=[8, 12])
    prompt = stage.prompt(tokens(0, 20))
    walked = stage.cache.walk(prompt)
    assert walked.reuse.highest(16) == 12
    assert walked.version == stage.cache.hint_version
    assert pins(stage) == 0
    assert stage.lease("r", prompt, 16).reuse == walked.reuse
    stage.cache.free(R)
