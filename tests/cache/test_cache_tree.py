"""PrefixTree: runs, splits, holes, tokens compared on the walk."""

from __future__ import annotations

import numpy as np
from cache_world import B, attention, recurrent, tokens

from wavepp.cache.keys import make_prompt
from wavepp.units import RequestId


def runs(stage) -> list[tuple[int, int]]:
    """(start, end) of every run, in blocks."""
    return sorted((node.start, node.end) for node in stage.cache._parts.tree.nodes.values())


def test_a_prompt_executed_in_many_spans_is_one_run(world) -> None:
    stage = world(attention(16))
    stage.admit("a", stage.prompt(tokens(0, 40)))
    stage.materialize("a")
    for _ in range(10):
        stage.execute("a", 4)
    assert runs(stage) == [(0, 10)]
    stage.finish("a")


def test_a_run_is_split_only_where_prompts_part(world) -> None:
    stage = world(attention(32))
    stage.run("a", tokens(0, 40))
    stage.run("b", tokens(0, 20) + tokens(100, 20))
    assert runs(stage) == [(0, 5), (5, 10), (5, 10)]
    stage.run("c", tokens(0, 12))
    assert runs(stage) == [(0, 5), (5, 10), (5, 10)]
    stage.run("d", tokens(0, 40) + tokens(40, 8))
    assert runs(stage) == [(0, 5), (5, 10), (5, 12)]


def test_prompts_that_part_inside_a_block_share_the_blocks_before_it(world) -> None:
    stage = world(attention(32))
    stage.run("a", tokens(0, 12))
    assert stage.run("b", [*tokens(0, 6), 99, 98, *tokens(0, 4)]) == B
    assert runs(stage) == [(0, 1), (1, 3), (1, 3)]


def test_a_block_is_in_one_place_of_the_tree(world) -> None:
    stage = world(attention(32))
    for rid in ("a", "b"):
        stage.admit(rid, stage.prompt(tokens(0, 17)))
        stage.materialize(rid)
    stage.execute("a", 17)
    stage.execute("b", 17)
    assert stage.cache.stats().groups[0].cached == 4
    table = stage.cache.sequence(RequestId("a")).block_tables["attention"]
    node = next(iter(stage.cache._parts.tree.nodes.values()))
    assert node.places[0].tolist() == table[:4].tolist()
    stage.finish("a")
    stage.finish("b")


def test_the_walk_stops_at_the_limit(world) -> None:
    stage = world(attention(32))
    stage.run("a", tokens(0, 40))
    tree = stage.cache._parts.tree
    match = tree.walk(stage.prompt(tokens(0, 40)), 3)
    assert match.depth == 3
    assert match.places.shape == (1, 3)


def test_a_lease_outlives_the_split_and_the_removal_of_what_lies_below(world) -> None:
    stage = world(attention(8))
    stage.run("a", tokens(0, 32))
    vote = stage.admit("b", stage.prompt(tokens(0, 13)))
    assert vote.endpoint == 12
    # c parts at block 3 and takes every block below it.
    stage.admit("c", stage.prompt(tokens(0, 12) + tokens(50, 8)))
    stage.materialize("c")
    stage.finish("c")
    assert stage.admit("d", stage.prompt(tokens(200, 16))).committed
    stage.materialize("d")
    stage.finish("d")
    stage.materialize("b")
    stage.finish("b")


def test_a_run_goes_when_nothing_is_left_in_it_and_so_does_its_salt(world) -> None:
    stage = world(attention(8))
    stage.run("a", tokens(0, 12), salt="x")
    stage.cache.reset()
    assert runs(stage) == []
    assert stage.cache._parts.tree.roots == {}


def test_a_hole_hides_what_lies_behind_it_and_is_filled_by_the_next_request(world) -> None:
    stage = world(attention(8))
    stage.run("a", tokens(0, 16))
    tree, pool = stage.cache._parts.tree, stage.cache._parts.pools[0]
    unit = tree.walk(stage.prompt(tokens(0, 16)), 4).places[0, 1:2].copy()
    pool.order.remove(unit)
    tree.detach(0, unit)
    pool.give(unit)
    stage.check()
    assert stage.run("b", tokens(0, 16)) == B
    assert runs(stage) == [(0, 4)]
    assert stage.hint(tokens(0, 17)) == 16


def test_tokens_are_compared_not_keys(world) -> None:
    stage = world(attention(16))
    stage.run("a", tokens(0, 12))
    liar = make_prompt(tokens(500, 12), B, keys=stage.prompt(tokens(0, 12)).keys)
    assert stage.cache.hint(liar).reuse.highest(8) == 8
    vote = stage.claim("b", liar, 8)
    assert vote.endpoint == 0
    stage.cache.undo(RequestId("b"))


def test_snapshots_hang_on_block_boundaries(world) -> None:
    stage = world(attention(16), recurrent(8))
    stage.run("a", tokens(0, 30), snapshots=[8, 16, 28])
    match = stage.cache._parts.tree.walk(stage.prompt(tokens(0, 30)), 7)
    assert np.flatnonzero(match.places[1] >= 0).tolist() == [1, 3, 6]
