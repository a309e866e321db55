"""Snapshots: what room they get, which are kept, and that a slot never holds another request's
state."""

from __future__ import annotations

import pytest
from cache_world import attention, recurrent, tokens

from wavepp.cache.snapshots import thin
from wavepp.cache.types import RestoreSnapshot, ZeroSlot
from wavepp.units import RequestId


@pytest.mark.parametrize(
    ("droppable", "most", "dropped"),
    [
        ([True] * 5, 5, ()),
        ([True] * 5, 4, (2,)),
        ([True] * 5, 3, (1, 2)),
        ([True] * 5, 1, (0, 1, 2, 3)),
        ([True, True, False, True, True], 4, (1,)),
        ([False] * 5, 1, ()),
        ([True] * 2, 1, (0,)),
    ],
)
def test_a_path_thins_out_from_the_middle(droppable, most, dropped) -> None:
    assert thin(range(4, 4 + len(droppable)), droppable, most) == dropped


def held(stage, ids) -> tuple[int, ...]:
    """Snapshot positions on the path of these tokens."""
    return stage.cache.hint(stage.prompt([*ids, 9999])).reuse.snapshots


def test_thinning_keeps_the_tail_junctions_and_pinned_ones(world) -> None:
    stage = world(attention(32), recurrent(20), max_snapshots_per_path=4)
    ids = tokens(0, 41)
    stage.admit("a", stage.prompt(ids))
    stage.materialize("a")
    stage.execute("a", 24, [4, 8, 12, 16], junctions=[12])
    stage.lease("pin", stage.prompt(tokens(0, 20)), 8)
    stage.execute("a", 41, [20, 24, 28, 32, 36, 40])
    assert 8 in held(stage, ids)  # pinned
    assert 12 in held(stage, ids)  # junction
    assert 40 in held(stage, ids)  # tail
    assert len(held(stage, ids)) == 4
    assert stage.cache.stats().snapshots_thinned == 4
    stage.cache.release_lease(RequestId("pin"))
    stage.cache.free(RequestId("a"))


def test_the_tail_has_its_own_unit_and_others_are_elastic(world) -> None:
    stage = world(recurrent(2))
    stage.admit("a", stage.prompt(tokens(0, 17)))
    stage.admit("b", stage.prompt(tokens(100, 17)))
    stage.materialize("a")
    stage.materialize("b")
    orders = stage.execute("a", 17, [8, 16])
    assert [order.position for order in orders.orders] == [16]
    assert orders.skipped == (8,)
    assert stage.cache.stats().snapshots_skipped == 1
    stage.finish("a")
    stage.finish("b")
    assert held(stage, tokens(0, 17)) == (16,)
    assert held(stage, tokens(100, 17)) == (16,)


def test_an_elastic_snapshot_never_takes_what_an_escrow_was_promised(world) -> None:
    stage = world(recurrent(2))
    stage.run("old", tokens(200, 9))
    stage.admit("a", stage.prompt(tokens(0, 17)))
    stage.materialize("a")
    assert stage.claim("b", stage.prompt(tokens(100, 17)), 0).committed
    assert stage.execute("a", 17, [8, 16]).skipped == (8,)
    stage.materialize("b")
    stage.finish("a")
    stage.finish("b")


def test_row_d2_a_junction_gives_the_third_prompt_a_hit(world) -> None:
    """Three prompts share 20 tokens: with snapshots at prompt ends only the third would hit
    nothing."""
    stage = world(attention(64), recurrent(16))
    prompts = [tokens(0, 20) + tokens(100 * i, 12) for i in (1, 2, 3)]
    stage.run("one", prompts[0])
    hint = stage.cache.hint(stage.prompt(prompts[1])).reuse
    assert (hint.attention, hint.highest(28)) == (20, 0)
    stage.run("two", prompts[1], snapshots=[20, 28])
    assert stage.run("three", prompts[2]) == 20


def test_row_d5_a_fresh_slot_is_set_to_the_empty_state(world) -> None:
    stage = world(recurrent(4), slots=1)
    stage.run("a", tokens(0, 9))
    stage.admit("b", stage.prompt(tokens(100, 9)))
    done = stage.materialize("b")
    assert done.effects == (ZeroSlot(group="recurrent", slot=0),)
    stage.finish("b")


def test_a_hit_restores_its_own_snapshot(world) -> None:
    stage = world(recurrent(8), slots=1)
    stage.run("a", tokens(0, 17), snapshots=[8, 16])
    stage.admit("b", stage.prompt(tokens(0, 12)))
    done = stage.materialize("b")
    unit = stage.cache._parts.tree.walk(stage.prompt(tokens(0, 8)), 2).places[0, 1]
    assert done.effects == (RestoreSnapshot(group="recurrent", snapshot=int(unit), slot=0),)
    stage.finish("b", snapshots=[])


def test_a_snapshot_on_the_host_is_restored_from_there(world) -> None:
    stage = world(recurrent(1, host=2))
    stage.run("a", tokens(0, 9))
    stage.run("b", tokens(100, 9))
    assert stage.cache.stats().offloaded == 1
    stage.admit("c", stage.prompt(tokens(0, 12)))
    (effect,) = stage.materialize("c").effects
    assert effect.from_host
    stage.finish("c", snapshots=[])


def test_two_recurrent_groups_are_saved_and_restored_together(world) -> None:
    stage = world(recurrent(4, name="deep"), recurrent(4, name="wide"))
    stage.run("a", tokens(0, 17))
    stage.admit("b", stage.prompt(tokens(0, 20)))
    effects = stage.materialize("b").effects
    assert [effect.group for effect in effects] == ["deep", "wide"]
    stage.finish("b")


def test_row_d11_a_state_is_visible_only_after_it_was_executed_here(world) -> None:
    """Two identical prompts, the second admitted while the first runs: no hit, and both are
    right."""
    stage = world(attention(32), recurrent(8))
    ids = tokens(0, 24)
    stage.admit("a", stage.prompt(ids))
    stage.materialize("a")
    orders = stage.cache.snapshot_orders(RequestId("a"), [20])
    assert [order.position for order in orders.orders] == [20]
    assert stage.hint(ids) == 0
    assert stage.admit("b", stage.prompt(ids)).endpoint == 0
    stage.materialize("b")
    stage.cache.free(RequestId("a"))
    stage.finish("b")
    assert stage.hint(ids) == 20


def test_the_older_of_two_snapshots_is_kept(world) -> None:
    stage = world(attention(32), recurrent(8))
    ids = tokens(0, 24)
    for rid in ("a", "b"):
        stage.admit(rid, stage.prompt(ids))
        stage.materialize(rid)
    stage.execute("a", 24, [20])
    unit = stage.cache._parts.tree.walk(stage.prompt(ids), 5).places[1, 4]
    stage.execute("b", 24, [20])
    assert stage.cache._parts.tree.walk(stage.prompt(ids), 5).places[1, 4] == unit
    stage.cache.free(RequestId("a"))
    stage.cache.free(RequestId("b"))
    assert stage.cache.stats().groups[1].cached == 1


def test_a_snapshot_ordered_and_never_taken_is_freed(world) -> None:
    stage = world(attention(32), recurrent(2))
    stage.admit("a", stage.prompt(tokens(0, 24)))
    stage.materialize("a")
    stage.cache.snapshot_orders(RequestId("a"), [8, 20])
    stage.cache.free(RequestId("a"))
    assert stage.cache.stats().groups[1].free == 2


def test_a_path_that_was_cut_and_grown_again_by_another_is_walked_anew(world) -> None:
    """Nothing pins a running request's snapshots: its place in the tree may become another's."""
    stage = world(recurrent(3))
    stage.admit("a", stage.prompt(tokens(0, 20)))
    stage.materialize("a")
    stage.execute("a", 8, [4, 8])
    stage.run("touch", tokens(0, 6))  # makes the snapshot at 8 the least recently used
    stage.run("b", tokens(0, 4) + tokens(50, 6))  # takes its unit and grows the run with b's tokens
    assert held(stage, tokens(0, 8)) == (4,)
    stage.execute("a", 4, [12])
    stage.verify_index()
    stage.finish("a")
    assert held(stage, tokens(0, 17)) == (12, 16)
