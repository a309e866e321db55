"""Escrows: demand, victims, substitution, host destinations, headroom, floors, all or nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cache_world import B, attention, recurrent, tokens

from wavepp.cache import escrow as escrows
from wavepp.cache import lease as leases
from wavepp.cache.types import BringBack, Offload, Refusal
from wavepp.units import RequestId

R = RequestId("r")


def test_the_paper_s_200k_prompt_needs_104k_when_its_endpoint_falls_from_112k_to_96k(world) -> None:
    size = 1024
    stage = world(attention(230), block_size=size)
    stage.run("a", [1] * (112 * size))
    prompt = stage.prompt([1] * (112 * size) + [2] * (88 * size))
    assert stage.lease("r", prompt, 112 * size).endpoint == 112 * size
    assert stage.cache.prepare(R).demand == {"attention": 88}
    moved = stage.cache.move(R, 2, 96 * size)
    assert (moved.endpoint, moved.committed) == (96 * size, True)
    assert stage.cache.stats().groups[0].reserved == 104
    stage.materialize("r")
    stage.cache.free(R)


def test_prepare_takes_free_units_first_then_victims_in_eviction_order(world) -> None:
    stage = world(attention(8))
    stage.run("a", tokens(0, 12))
    stage.run("b", tokens(100, 8))  # 5 cached, 3 free
    table = stage.cache._parts.tree.walk(stage.prompt(tokens(0, 12)), 3).places[0]
    stage.claim("r", stage.prompt(tokens(200, 20)), 0)
    hold = stage.cache._holdings[R].escrow.holds[0]
    assert hold.free == 3
    assert hold.victims.tolist() == table[[2, 1]].tolist()
    # Nothing is evicted before materialisation: the victims are still a hit.
    assert stage.hint(tokens(0, 13)) == 12
    stage.materialize("r")
    assert stage.hint(tokens(0, 13)) == 4
    stage.finish("r")


def test_row_e8_a_path_goes_tail_first(world) -> None:
    stage = world(attention(4))
    stage.run("a", tokens(0, 16))
    for step, left in enumerate((12, 8, 4, 0)):
        rid = f"x{step}"
        stage.claim(rid, stage.prompt(tokens(100 + 50 * step, 4 * step + 4)), 0)
        stage.materialize(rid)
        assert stage.hint(tokens(0, 17)) == left
        stage.cache.free(RequestId(rid))


def test_the_least_recently_used_path_goes_first(world) -> None:
    stage = world(attention(8))
    stage.run("a", tokens(0, 16))
    stage.run("b", tokens(100, 16))
    stage.run("a2", tokens(0, 16))
    stage.run("c", tokens(200, 12))
    assert stage.hint(tokens(0, 17)) == 16
    assert stage.hint(tokens(100, 17)) == 4


def test_row_b7_a_claimed_victim_is_replaced_and_the_replacement_comes_first(world) -> None:
    stage = world(attention(8))
    stage.run("a", tokens(0, 16))
    stage.run("b", tokens(100, 16))
    prompt = stage.prompt(tokens(200, 8))
    stage.lease("r", prompt, 0)
    stage.cache.prepare(R)
    victims = stage.cache._holdings[R].escrow.holds[0].victims.copy()
    assert stage.lease("hit", stage.prompt(tokens(0, 17)), 16).endpoint == 16
    outcome = stage.cache.commit(R, 0)
    assert (outcome.committed, outcome.substituted) == (True, 2)
    now = stage.cache._holdings[R].escrow.holds[0].victims
    assert not set(now.tolist()) & set(victims.tolist())
    stage.materialize("r")
    assert stage.hint(tokens(0, 17)) == 16
    stage.finish("r")
    stage.cache.release_lease(RequestId("hit"))


def test_row_b7_without_a_substitute_the_original_reservation_stands(world) -> None:
    """A lower endpoint wants more than there is: the commit takes nothing and loses nothing."""
    stage = world(attention(8))
    stage.run("a", tokens(0, 16))
    stage.claim("other", stage.prompt(tokens(0, 17)), 12)  # pins 3, promises 2
    stage.claim("r", stage.prompt(tokens(0, 8) + tokens(50, 12)), 8)  # promises 3
    before = stage.cache.stats()
    hold = stage.cache._holdings[R].escrow.holds[0]
    kept = (hold.demand, hold.free, hold.victims.tolist())
    vote = stage.cache.move(R, 2, 0)
    assert vote.refusal == Refusal(reason="capacity", group="attention", needed=5, available=3)
    assert (vote.endpoint, vote.committed) == (8, False)
    hold = stage.cache._holdings[R].escrow.holds[0]
    assert (hold.demand, hold.free, hold.victims.tolist()) == kept
    assert stage.cache.stats() == before
    stage.check()
    for rid in ("other", "r"):
        stage.materialize(rid)
        stage.finish(rid)


def test_a_second_group_without_room_undoes_what_the_first_gained(world) -> None:
    stage = world(attention(16, name="large"), attention(5, name="small"))
    stage.run("a", tokens(0, 16))
    before = stage.cache.stats().groups
    stage.lease("r", stage.prompt(tokens(100, 16)), 0)
    stage.lease("x", stage.prompt(tokens(0, 17)), 16)
    outcome = stage.cache.prepare(R)
    assert outcome.refusal == Refusal(reason="capacity", group="small", needed=4, available=1)
    stage.check()
    stage.cache.undo(R)
    stage.cache.undo(RequestId("x"))
    assert stage.cache.stats().groups == before


def test_a_move_may_use_what_its_own_lease_lets_go(world) -> None:
    """Full to the brim: the trimmed blocks back the longer suffix, taken before they are let go."""
    stage = world(attention(8))
    stage.run("a", tokens(0, 24))
    vote = stage.claim("r", stage.prompt(tokens(0, 24) + tokens(50, 8)), 24)
    assert (vote.endpoint, vote.committed) == (24, True)
    moved = stage.cache.move(R, 2, 16)
    assert (moved.endpoint, moved.committed) == (16, True)
    stage.materialize("r")
    stage.finish("r")


def test_row_b2_of_two_that_fit_only_alone_one_is_admitted(world) -> None:
    stage = world(attention(8))
    stage.run("a", tokens(0, 8))
    stage.run("b", tokens(100, 8))
    prompts = {"A": tokens(0, 20), "B": tokens(100, 20)}
    first = stage.claim("A", stage.prompt(prompts["A"]), 8)
    second = stage.claim("B", stage.prompt(prompts["B"]), 8)
    assert first.committed
    assert second.refusal is not None
    stage.cache.undo(RequestId("B"))
    stage.materialize("A")
    stage.finish("A")
    stage.run("B", prompts["B"])


def test_row_b3_the_last_block_and_the_working_slot_are_part_of_the_demand(world) -> None:
    stage = world(attention(7), recurrent(4), slots=2)
    a = stage.prompt(tokens(0, 16), room_tokens=1)
    b = stage.prompt(tokens(100, 12), room_tokens=1)
    assert (a.blocks_total, b.blocks_total) == (5, 4)
    assert stage.claim("A", a, 0).committed
    refused = stage.claim("B", b, 0)
    assert refused.refusal == Refusal(reason="capacity", group="attention", needed=4, available=2)
    stage.cache.undo(RequestId("B"))
    stage.materialize("A")
    stage.finish("A")
    assert stage.run("B", tokens(100, 12)) == 0


def test_working_slots_are_promised_and_never_shared(world) -> None:
    stage = world(recurrent(8), slots=2)
    for rid, start in (("a", 0), ("b", 100)):
        assert stage.claim(rid, stage.prompt(tokens(start, 9)), 0).committed
    refused = stage.claim("c", stage.prompt(tokens(200, 9)), 0)
    assert refused.refusal == Refusal(reason="slots", group="slots", needed=1, available=0)
    stage.cache.undo(RequestId("c"))
    assert [stage.materialize(rid).slot for rid in ("b", "a")] == [0, 1]
    stage.finish("a")
    assert stage.claim("c", stage.prompt(tokens(200, 9)), 0).committed
    assert stage.materialize("c").slot == 1
    stage.finish("b")
    stage.finish("c")


def test_row_b10_capacity_is_computed_after_pinning(world) -> None:
    """6 of 8 blocks are the request's own evictable prefix: 2 are left, not 8."""
    stage = world(attention(8))
    stage.run("a", tokens(0, 24))
    refused = stage.claim("r", stage.prompt(tokens(0, 36)), 24)
    assert refused.refusal == Refusal(reason="capacity", group="attention", needed=3, available=2)
    stage.cache.undo(R)
    assert stage.cache.fits(stage.prompt(tokens(0, 36))) == Refusal(
        reason="never_fits", group="attention", needed=9, available=8
    )


def test_row_b1_a_request_larger_than_an_empty_pool_is_refused_with_both_numbers(world) -> None:
    stage = world(attention(16), attention(8, name="small"))
    assert stage.cache.fits(stage.prompt(tokens(0, 33))) == Refusal(
        reason="never_fits", group="small", needed=9, available=8
    )
    assert stage.cache.fits(stage.prompt(tokens(0, 32))) is None
    assert stage.cache.fits(stage.prompt(tokens(0, 32), room_tokens=1)) is not None


def test_the_headroom_is_2pm_or_a_quarter_of_the_pool(world) -> None:
    assert world(attention(64), headroom_tokens=8 * B).cache._parts.headroom(0) == 8
    assert world(attention(16), headroom_tokens=8 * B).cache._parts.headroom(0) == 4
    assert world(recurrent(16), headroom_tokens=8 * B).cache._parts.headroom(0) == 0
    stage = world(attention(16), headroom_tokens=8 * B)
    assert stage.claim("a", stage.prompt(tokens(0, 12 * B)), 0).committed
    refused = stage.claim("b", stage.prompt(tokens(200, B)), 0)
    assert refused.refusal == Refusal(reason="capacity", group="attention", needed=5, available=4)
    stage.cache.undo(RequestId("b"))
    stage.cache.undo(RequestId("a"))


def test_row_b11_one_oversized_request_may_ignore_the_headroom_and_no_second(world) -> None:
    stage = world(attention(16), headroom_tokens=8 * B)
    large = stage.prompt(tokens(0, 7 * B)), stage.prompt(tokens(200, 7 * B))
    whole = stage.prompt(tokens(400, 14 * B))
    assert stage.claim("w", whole, 0).refusal is not None
    stage.cache.undo(RequestId("w"))
    assert stage.claim("w", whole, 0, oversized=True).committed
    stage.cache.undo(RequestId("w"))
    assert stage.claim("one", large[0], 0, oversized=True).committed
    second = stage.claim("two", large[1], 0, oversized=True)
    assert second.refusal == Refusal(reason="capacity", group="attention", needed=11, available=9)
    stage.cache.undo(RequestId("two"))
    stage.materialize("one")
    stage.finish("one")
    assert stage.claim("two", large[1], 0, oversized=True).committed
    stage.cache.undo(RequestId("two"))


@pytest.mark.parametrize("orders", list(itertools.product([("A", "B"), ("B", "A")], repeat=2)))
def test_row_b12_prefixes_that_fill_the_pool_do_not_deadlock(world, orders) -> None:
    """Each refused side is undone, so on every stage, in any order, the pair goes through one by
    one."""
    ids = {"A": tokens(0, 24), "B": tokens(100, 24)}
    for order in orders:
        stage = world(attention(6))
        stage.run("sa", tokens(0, 12))
        stage.run("sb", tokens(100, 12))
        first, second = order
        assert stage.admit(first, stage.prompt(ids[first])).committed
        assert stage.admit(second, stage.prompt(ids[second])).refusal is not None
        stage.materialize(first)
        stage.finish(first)
        assert stage.admit(second, stage.prompt(ids[second])).committed
        stage.materialize(second)
        stage.finish(second)


def test_row_c13_a_refused_escrow_leaves_no_snapshot_pinned(world) -> None:
    stage = world(attention(8), recurrent(4))
    stage.run("a", tokens(0, 12))
    vote = stage.admit("r", stage.prompt(tokens(0, 12) + tokens(50, 24)))
    assert vote.refusal is not None
    for pool in stage.cache._parts.pools:
        assert not pool.pins.any()
    assert stage.cache.held() == ()


def test_what_was_released_is_worth_another_try(world) -> None:
    stage = world(attention(8))
    stage.admit("a", stage.prompt(tokens(0, 24)))
    stage.admit("b", stage.prompt(tokens(100, 24)))
    before = stage.cache.releases
    stage.hint(tokens(0, 9))
    assert stage.cache.releases == before
    stage.cache.undo(RequestId("a"))
    assert stage.cache.releases > before


def test_a_host_destination_is_reserved_before_its_victim(world) -> None:
    stage = world(attention(4, host=3))
    stage.run("a", tokens(0, 16))
    stage.claim("r", stage.prompt(tokens(100, 16)), 0)
    hold = stage.cache._holdings[R].escrow.holds[0]
    assert len(hold.victims) == 4
    # Three destinations: the head of the path is worth keeping most, the tail is dropped.
    assert [place >= 4 for place in hold.destinations] == [False, True, True, True]
    assert stage.cache.stats().groups[0].host_free == 0
    done = stage.materialize("r")
    assert [type(effect) for effect in done.effects] == [Offload]
    assert stage.hint(tokens(0, 17)) == 12
    stage.finish("r")


def test_the_order_of_acquisition_is_destination_then_victim(
    world, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = world(attention(4, host=4))
    stage.run("a", tokens(0, 16))
    pool, calls = stage.cache._parts.pools[0], []
    for name in ("reserve_host", "take_victims"):
        real = getattr(type(pool), name)

        def spy(self, count: int, real=real, name=name):
            calls.append((name, count))
            return real(self, count)

        monkeypatch.setattr(type(pool), name, spy)
    stage.claim("r", stage.prompt(tokens(100, 16)), 0)
    assert calls[:2] == [("reserve_host", 4), ("take_victims", 4)]
    stage.cache.undo(R)


def test_an_undone_escrow_gives_the_host_back(world) -> None:
    stage = world(attention(4, host=3))
    stage.run("a", tokens(0, 16))
    before = stage.cache.stats().groups
    stage.claim("r", stage.prompt(tokens(100, 16)), 0)
    stage.cache.undo(R)
    assert stage.cache.stats().groups == before
    order = stage.cache._parts.pools[0].order.listed().tolist()
    table = stage.cache._parts.tree.walk(stage.prompt(tokens(0, 16)), 4).places[0]
    assert order == table[::-1].tolist()


def test_a_block_on_the_host_is_a_hit_and_its_return_is_part_of_the_demand(world) -> None:
    stage = world(attention(4, host=4))
    stage.run("a", tokens(0, 16))
    stage.run("b", tokens(100, 8))
    assert stage.hint(tokens(0, 17)) == 16
    stage.lease("r", stage.prompt(tokens(0, 16)), 12)
    # Of three leased blocks one is on the host (the tail went first: 2 of 4 were offloaded).
    assert stage.cache.prepare(R).demand == {"attention": 2}
    stage.cache.commit(R, 12)
    done = stage.materialize("r")
    assert [type(effect) for effect in done.effects] == [Offload, BringBack]
    assert stage.cache.stats().brought_back == 1
    stage.finish("r")
    assert stage.hint(tokens(0, 17)) == 16


def test_the_host_overwrites_its_own_least_recently_used(world) -> None:
    stage = world(attention(2, host=2))
    for rid, start in (("a", 0), ("b", 100), ("c", 200)):
        stage.run(rid, tokens(start, 8))
    assert [stage.hint(tokens(start, 9)) for start in (0, 100, 200)] == [0, 8, 8]


def test_a_hit_on_promised_host_content_keeps_it(world) -> None:
    stage = world(attention(5, host=2))
    stage.run("a", tokens(0, 8))
    stage.run("b", tokens(100, 20))  # a's two blocks are on the host now
    assert stage.hint(tokens(0, 9)) == 8
    stage.claim("r", stage.prompt(tokens(200, 8)), 0)  # promises the host's two blocks
    assert stage.cache._holdings[R].escrow.holds[0].destinations.min() >= 5
    assert stage.lease("hit", stage.prompt(tokens(0, 9)), 8).endpoint == 8
    stage.materialize("r")  # drops its victims instead of overwriting what is leased
    assert stage.hint(tokens(0, 9)) == 8
    stage.finish("r")
    stage.cache.undo(RequestId("hit"))


def test_escrow_is_released_before_lease_at_materialisation(
    world, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = world(attention(8))
    stage.run("a", tokens(0, 12))
    stage.claim("r", stage.prompt(tokens(0, 16)), 12)
    calls = []
    for name, module in (("escrow", escrows), ("lease", leases)):
        real = module.release

        def spy(*args, real=real, name=name):
            pool = stage.cache._parts.pools[0]
            calls.append((name, int(np.count_nonzero(pool.pins))))
            real(*args)

        monkeypatch.setattr(module, "release", spy)
    stage.materialize("r")
    # At both moments the sequence owns its four blocks already.
    assert calls == [("escrow", 4), ("lease", 4)]
    stage.finish("r")


def test_materialisation_uses_free_units_before_it_evicts(world) -> None:
    """The ordinary allocator: what was freed meanwhile spares the victims."""
    stage = world(attention(8))
    stage.run("a", tokens(0, 16))
    stage.admit("x", stage.prompt(tokens(100, 16)))
    stage.materialize("x")
    stage.claim("r", stage.prompt(tokens(200, 8)), 0)
    assert len(stage.cache._holdings[R].escrow.holds[0].victims) == 2
    stage.cache.free(RequestId("x"))  # four blocks come free
    stage.materialize("r")
    assert stage.hint(tokens(0, 17)) == 16
    stage.finish("r")


def test_a_committed_escrow_is_met_though_all_its_victims_are_hit(world) -> None:
    stage = world(attention(10))
    stage.run("a", tokens(0, 16))
    stage.run("b", tokens(100, 24))
    stage.claim("r", stage.prompt(tokens(200, 12)), 0)
    assert stage.cache._holdings[R].escrow.committed
    hit = stage.lease("hit", stage.prompt(tokens(0, 17)), 16)
    assert hit.endpoint == 16
    stage.materialize("r")
    assert stage.hint(tokens(0, 17)) == 16
    stage.finish("r")
    stage.cache.undo(RequestId("hit"))


def test_a_refused_move_lets_go_of_the_snapshot_it_had_pinned(world) -> None:
    stage = world(attention(8), recurrent(8))
    stage.run("a", tokens(0, 12), snapshots=[4, 8])
    # The other shares the prefix, so r's fall frees nothing; x promises what is left.
    for rid, own in (("r", 50), ("other", 100)):
        assert stage.claim(rid, stage.prompt(tokens(0, 8) + tokens(own, 8)), 8).committed
    assert stage.claim("x", stage.prompt(tokens(200, 8)), 0).committed
    vote = stage.cache.move(R, 2, 4)
    assert vote.refusal == Refusal(reason="capacity", group="attention", needed=3, available=2)
    assert (vote.endpoint, vote.committed) == (8, False)
    stage.check()
    assert stage.cache._parts.pools[1].pins.max() == 2
    assert np.count_nonzero(stage.cache._parts.pools[1].pins) == 1
    for rid in ("r", "other", "x"):
        stage.materialize(rid)
        stage.finish(rid)
