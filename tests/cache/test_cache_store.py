"""StageCache as a whole: publish, free, abort, reset, namespaces, collisions, caching off."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from cache_world import B, World, attention, recurrent, sliding, tokens

from wavepp.cache.keys import make_prompt
from wavepp.cache.types import PublishOutcome
from wavepp.units import RequestId

R = RequestId("r")


def test_row_a14_the_same_prompt_again_hits_all_but_its_last_block(world) -> None:
    for count in (3, 4, 5, 16, 17, 31):
        stage = world(attention(32), recurrent(4), sliding(32, window=6))
        ids = tokens(0, count)
        assert stage.run("a", ids) == 0
        assert stage.run("b", ids) == (count - 1) // B * B


def test_publish_attaches_finished_blocks_only_and_only_once(world) -> None:
    stage = world(attention(32))
    stage.admit("r", stage.prompt(tokens(0, 18)))
    stage.materialize("r")
    assert stage.hint(tokens(0, 18)) == 0
    stage.execute("r", 7)
    assert stage.hint(tokens(0, 18)) == 4
    assert stage.cache.publish(R, 7) == PublishOutcome(attached=0, duplicates=0)
    stage.execute("r", 11)
    assert stage.hint(tokens(0, 18)) == 16
    stage.finish("r")
    assert stage.cache.stats().groups[0].free == 32 - 4


def test_the_older_copy_is_kept_and_the_newer_one_freed_with_its_request(world) -> None:
    stage = world(attention(32))
    for rid in ("a", "b"):
        stage.admit(rid, stage.prompt(tokens(0, 17)))
        stage.materialize(rid)
    stage.execute("a", 17)
    before = stage.cache._parts.tree.walk(stage.prompt(tokens(0, 17)), 4).places.tolist()
    stage.position["b"] = 0
    stage.execute("b", 17)
    assert stage.cache._parts.tree.walk(stage.prompt(tokens(0, 17)), 4).places.tolist() == before
    stage.cache.free(RequestId("a"))
    # b's table still names its own copies (waves already prepared read them); the older ones are
    # pinned.
    assert stage.cache.stats().groups[0].reclaimable == 0
    stage.cache.free(RequestId("b"))
    assert stage.cache.stats().groups[0].reclaimable == 4
    assert stage.cache.stats().groups[0].free == 28


def test_a_computed_block_takes_the_place_of_its_copy_on_the_host(world) -> None:
    stage = world(attention(9, host=4))
    stage.run("a", tokens(0, 16))
    stage.admit("twin", stage.prompt(tokens(0, 13)), limit=0)
    stage.admit("big", stage.prompt(tokens(100, 20)))
    stage.materialize("big")  # sends a's blocks to the host
    stage.materialize("twin")
    assert stage.cache.stats().offloaded > 0
    vote = stage.lease("r", stage.prompt(tokens(0, 13)), 12)
    stage.finish("twin")
    assert vote.endpoint == 12
    assert stage.cache.stats().groups[0].host_cached < stage.cache.stats().offloaded
    stage.check()
    stage.cache.release_lease(R)
    stage.finish("big")


def test_room_for_decoding_is_allocated_but_never_published(world) -> None:
    stage = world(attention(32))
    prompt = stage.prompt(tokens(0, 8), room_tokens=9)
    stage.admit("r", prompt)
    assert len(stage.materialize("r").block_tables["attention"]) == 5
    stage.execute("r", 8)
    stage.cache.publish(R, 17)
    assert stage.cache.stats().groups[0].cached == 2
    stage.cache.free(R)
    assert stage.cache.stats().groups[0].free == 30


@pytest.mark.parametrize("phase", ["leased", "prepared", "committed", "running", "half"])
def test_row_a7_an_abort_leaves_nothing_behind_in_any_phase(world, phase: str) -> None:
    stage = world(attention(16), recurrent(4))
    stage.run("seed", tokens(0, 13))
    prompt = stage.prompt(tokens(0, 12) + tokens(50, 12))
    if phase in ("leased", "prepared"):
        stage.lease("r", prompt, 12)
        if phase == "prepared":
            stage.cache.prepare(R)
    else:
        stage.admit("r", prompt)
    if phase in ("running", "half"):
        stage.materialize("r")
    if phase == "half":
        stage.execute("r", 5, [16])
    stage.cache.free(R)
    stats = stage.cache.stats()
    assert (stats.leases, stats.escrows, stats.sequences) == (0, 0, 0)
    assert stats.slots_free == 4
    for group in stats.groups:
        assert group.free + group.cached == group.units
        assert group.reclaimable == group.cached


def test_row_c9_blocks_finished_before_an_abort_are_reused_rightly(world) -> None:
    stage = world(attention(16), recurrent(8))
    ids = tokens(0, 32)
    stage.admit("a", stage.prompt(ids))
    stage.materialize("a")
    stage.execute("a", 8, [8])
    stage.execute("a", 8, [16])
    stage.cache.free(RequestId("a"))
    assert stage.run("b", ids[:16] + tokens(500, 8)) == 16


def test_row_c11_no_key_names_a_block_that_another_wrote(world) -> None:
    """A's escrowed blocks are taken by B after A ends; the index names only what is really
    there."""
    stage = world(attention(6))
    stage.run("a", tokens(0, 24))
    stage.admit("b", stage.prompt(tokens(100, 16)))
    stage.verify_index()
    stage.materialize("b")
    stage.verify_index()
    stage.execute("b", 6)
    stage.verify_index()
    assert stage.hint(tokens(0, 25)) == 8
    stage.finish("b")


@pytest.mark.parametrize("groups", [(attention(40),), (attention(40), recurrent(6))])
def test_row_e1_an_8_bit_hash_costs_time_but_gives_no_wrong_state(world, groups) -> None:
    def bad(data: bytes) -> bytes:
        return xxhash.xxh3_128_digest(data)[:1]

    stage = world(*groups, hint_shards=1)
    rng = np.random.default_rng(0)
    wrong = 0
    for number in range(300):
        ids = rng.integers(0, 3, rng.integers(1, 40)).tolist()
        prompt = make_prompt(ids, B, hash_bytes=bad)
        hint = stage.cache.hint(prompt).reuse.highest(prompt.reuse_cap)
        vote = stage.admit(f"r{number}", prompt, hint)
        assert vote.committed
        wrong += vote.endpoint != hint
        stage.materialize(f"r{number}")  # compares every block that would be read
        stage.finish(f"r{number}")
        stage.cache.check()
    assert wrong > 0  # the hints did collide


def test_caching_off_keeps_nothing_and_votes_zero(world) -> None:
    stage = world(attention(16), recurrent(4), enable_prefix_caching=False)
    ids = tokens(0, 20)
    for rid in ("a", "b"):
        assert stage.hint(ids) == 0
        assert stage.run(rid, ids) == 0
    stats = stage.cache.stats()
    assert [group.cached for group in stats.groups] == [0, 0]
    assert [group.free for group in stats.groups] == [16, 4]
    assert stats.snapshots_taken == 0


def test_reset_drops_what_is_idle_and_requests_go_on(world) -> None:
    stage = world(attention(12, host=4), recurrent(4))
    stage.run("a", tokens(0, 24))
    stage.run("b", tokens(100, 24))
    stage.admit("leased", stage.prompt(tokens(0, 12)))
    stage.claim("waiting", stage.prompt(tokens(200, 8)), 0)
    stage.cache.reset()
    stage.check()
    assert stage.hint(tokens(100, 25)) == 0
    for rid in ("leased", "waiting"):
        stage.materialize(rid)
        stage.finish(rid)


def test_clear_is_a_new_epoch(world) -> None:
    stage = world(attention(12, host=4), recurrent(4))
    stage.run("a", tokens(0, 24))
    stage.admit("b", stage.prompt(tokens(0, 40)))
    stage.materialize("b")
    stage.claim("c", stage.prompt(tokens(100, 4)), 0)
    stage.cache.clear()
    stats = stage.cache.stats()
    assert stage.cache.held() == ()
    assert [group.free for group in stats.groups] == [12, 4]
    assert [group.host_free for group in stats.groups] == [4, 0]
    assert stage.run("a2", tokens(0, 24)) == 0


def test_caches_of_other_sizes_agree_on_the_least(world) -> None:
    """One stage is small, one was wiped: the endpoint is the all-stage minimum, on every stage."""
    stages = [world(attention(32)), world(attention(11)), world(attention(32))]
    ids = tokens(0, 32)
    for stage in stages:
        stage.run("a", ids)
        stage.run("b", tokens(100, 20))
    prompt = stages[0].prompt(ids)
    candidate = min(stage.cache.hint(prompt).reuse.highest(28) for stage in stages)
    assert candidate == 24
    stages[2].cache.reset()
    votes = [stage.claim("c", prompt, candidate) for stage in stages]
    lowest = min(vote.endpoint for vote in votes)
    assert lowest == 0
    for stage, vote in zip(stages, votes, strict=True):
        if vote.endpoint > lowest or not vote.committed:
            assert stage.cache.move(RequestId("c"), 2, lowest).committed
        stage.materialize("c")
        stage.finish("c")


def test_check_finds_a_skipped_pin_and_a_lost_unit() -> None:
    stage = World(attention(8))
    stage.run("a", tokens(0, 16))
    stage.claim("r", stage.prompt(tokens(0, 16)), 12)
    pool = stage.cache._parts.pools[0]
    pool.pins[np.flatnonzero(pool.pins)[0]] -= 1
    with pytest.raises(AssertionError, match="their owners are"):
        stage.cache.check()
    other = World(attention(8))
    other.cache._parts.pools[0].pop(1)
    with pytest.raises(AssertionError, match="7 units accounted for, 8 there"):
        other.cache.check()
    third = World(attention(8))
    third.run("a", tokens(0, 16))
    third.cache._parts.hints.add(0, 0, [b"x"])
    with pytest.raises(AssertionError, match="hint index differs"):
        third.cache.check()
