"""Leases: what is pinned, trimmed, capped; the floor; votes of hybrid stages."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from cache_world import B, World, attention, recurrent, sliding, tokens

from wavepp.cache import lease as leases
from wavepp.cache.types import ReuseVote
from wavepp.errors import LocalProtocolError
from wavepp.units import RequestId

R = RequestId("r")


def pinned(stage: World, group: int = 0) -> int:
    return int(np.count_nonzero(stage.cache._parts.pools[group].pins))


def test_a_lease_pins_every_block_up_to_the_limit(world) -> None:
    stage = world(attention(16))
    stage.run("a", tokens(0, 40))
    vote = stage.cache.lease(R, 1, stage.prompt(tokens(0, 40)), 24)
    assert (vote.endpoint, vote.reuse) == (24, ReuseVote(attention=24))
    assert pinned(stage) == 6
    stage.cache.release_lease(R)
    assert pinned(stage) == 0


def test_leases_share_and_the_last_one_lets_go(world) -> None:
    stage = world(attention(16))
    stage.run("a", tokens(0, 40))
    for rid in ("x", "y"):
        stage.cache.lease(RequestId(rid), 1, stage.prompt(tokens(0, 40)), 16)
    stage.cache.release_lease(RequestId("x"))
    assert pinned(stage) == 4
    stage.cache.release_lease(RequestId("y"))
    assert pinned(stage) == 0


def test_row_a4_rich_stages_trim_to_the_all_stage_minimum(world) -> None:
    stages = [world(attention(16)) for _ in range(3)]
    prompt = stages[0].prompt(tokens(0, 24))
    for stage, blocks in zip(stages, (3, 5, 2), strict=True):
        stage.run("seed", tokens(0, blocks * B))
    votes = [stage.cache.lease(R, 1, prompt, 20) for stage in stages]
    assert [vote.endpoint for vote in votes] == [12, 20, 8]
    lowest = min(vote.endpoint for vote in votes)
    for stage in stages:
        assert stage.cache.trim(R, lowest).endpoint == 8
        match = stage.cache._parts.tree.walk(prompt, 5)
        counts = stage.cache._parts.pools[0].pins[match.places[0]]
        assert counts.tolist() == [1, 1] + [0] * (match.depth - 2)
        stage.cache.release_lease(R)


def test_row_a15_a_prefix_evicted_after_the_hint_lowers_the_lease(world) -> None:
    stage = world(attention(6))
    stage.run("a", tokens(0, 16))
    prompt = stage.prompt(tokens(0, 17))
    hint = stage.cache.hint(prompt).reuse.highest(16)
    stage.run("b", tokens(100, 16))
    vote = stage.claim("c", prompt, hint)
    assert (hint, vote.endpoint, vote.committed) == (16, 8, False)
    assert stage.cache.move(RequestId("c"), 2, 8).committed
    stage.materialize("c")
    stage.finish("c")


@pytest.mark.parametrize(("count", "endpoint"), [(1, 0), (4, 0), (8, 4), (9, 8)])
def test_row_e3_e4_a_full_hit_leaves_a_token_and_counts_after_the_cap(
    world, count: int, endpoint: int
) -> None:
    stage = world(attention(16), recurrent(4))
    assert stage.run("a", tokens(0, count)) == 0
    assert stage.run("b", tokens(0, count)) == min(endpoint, (count - 1) // B * B)


def test_a_prompt_that_wants_its_logprobs_reuses_nothing(world) -> None:
    stage = world(attention(16))
    stage.run("a", tokens(0, 16))
    prompt = stage.prompt(tokens(0, 16), reusable=False)
    assert stage.cache.hint(prompt).reuse.highest(16) == 0
    assert stage.claim("b", prompt, 12).endpoint == 0
    stage.materialize("b")
    stage.finish("b")


def test_row_e2_salts_never_share(world) -> None:
    stage = world(attention(32))
    for rid, salt in (("a", "a"), ("b", "b"), ("c", "")):
        assert stage.run(rid, tokens(0, 16), salt=salt) == 0
    for rid, salt in (("d", "a"), ("e", "b"), ("f", "")):
        assert stage.run(rid, tokens(0, 16), salt=salt) == 12


def test_the_floor_makes_a_lease_pin_less(world) -> None:
    """Every pin keeps free + unpinned reclaimable >= the demand of escrows."""
    stage = world(attention(8))
    stage.run("a", tokens(0, 24))  # 6 cached, 2 free
    assert stage.claim("b", stage.prompt(tokens(100, 20)), 0).committed  # promises 5
    vote = stage.cache.lease(R, 1, stage.prompt(tokens(0, 24)), 20)
    assert vote.endpoint == 12  # 8 - 5 = 3 blocks may still be pinned
    assert vote.reuse == ReuseVote(attention=12)
    stage.cache.release_lease(R)
    stage.materialize("b")
    stage.finish("b")


def test_what_another_pins_already_costs_no_floor(world) -> None:
    stage = world(attention(8))
    stage.run("a", tokens(0, 24))
    stage.cache.lease(RequestId("x"), 1, stage.prompt(tokens(0, 24)), 12)
    stage.claim("b", stage.prompt(tokens(100, 20)), 0)
    vote = stage.cache.lease(R, 1, stage.prompt(tokens(0, 24)), 20)
    assert vote.endpoint == 12
    for rid in ("x", "b", "r"):
        stage.cache.free(RequestId(rid))


def test_row_d6_a_stage_without_a_kind_of_window_votes_no_limit(world) -> None:
    ids, none = tokens(0, 17), world()
    vote = none.claim("a", none.prompt(ids), 12)
    assert (vote.endpoint, vote.reuse, vote.committed) == (12, ReuseVote(), True)
    none.materialize("a")
    none.finish("a")
    states = world(recurrent(4))
    states.run("a", ids)
    vote = states.claim("b", states.prompt(ids))
    assert (vote.endpoint, vote.reuse) == (16, ReuseVote(snapshots=(16,)))
    states.cache.undo(RequestId("b"))
    blocks = world(attention(8))
    blocks.run("a", ids)
    vote = blocks.claim("b", blocks.prompt(ids))
    assert (vote.endpoint, vote.reuse) == (16, ReuseVote(attention=16))
    blocks.cache.undo(RequestId("b"))


def test_a_hybrid_stage_can_resume_at_snapshots_only(world) -> None:
    stage = world(attention(16), recurrent(8))
    stage.run("a", tokens(0, 40), snapshots=[8, 20, 36])
    prompt = stage.prompt(tokens(0, 30) + tokens(90, 3))
    assert stage.cache.hint(prompt).reuse == ReuseVote(attention=28, snapshots=(8, 20))
    vote = stage.claim("b", prompt, 28)
    assert (vote.endpoint, vote.reuse.snapshots, vote.committed) == (20, (8, 20), False)
    assert stage.cache.move(RequestId("b"), 2, 16).endpoint == 8
    stage.materialize("b")
    stage.finish("b")


def test_a_sliding_window_pins_only_its_last_tokens(world) -> None:
    stage = world(sliding(16, window=6), attention(16))
    stage.run("a", tokens(0, 40))
    vote = stage.claim("b", stage.prompt(tokens(0, 32)), 28)
    assert vote.endpoint == 28
    assert (pinned(stage, 0), pinned(stage, 1)) == (2, 7)
    done = stage.materialize("b")
    assert done.block_tables["sliding"][:5].tolist() == [-1] * 5
    stage.finish("b")


def test_row_d12_the_paper_s_snapshots_step_down_and_agree_at_once(world) -> None:
    """Snapshots at 64, 72, 90 and at 64, 80; the candidate is 80 (thousandths of the paper's)."""
    ids = tokens(0, 92)
    one, two = (world(recurrent(8), block_size=2) for _ in range(2))
    one.run("seed", ids, snapshots=[64, 72, 90])
    two.run("seed", ids, snapshots=[64, 80])
    prompts = [stage.prompt(ids) for stage in (one, two)]
    votes = [s.claim("r", p, 80) for s, p in zip((one, two), prompts, strict=True)]
    assert [vote.endpoint for vote in votes] == [72, 80]
    assert votes[0].reuse.snapshots == (64, 72)
    assert votes[1].reuse.snapshots == (64, 80)
    stepwise = [80]
    attempt = 1
    while True:
        lowest = min(vote.endpoint for vote in votes)
        stepwise.append(lowest)
        if all(vote.committed and vote.endpoint == lowest for vote in votes):
            break
        attempt += 1
        votes = [stage.cache.move(R, attempt, lowest) for stage in (one, two)]
    assert stepwise == [80, 72, 64, 64]
    for stage in (one, two):
        assert pinned(stage) == 1
        stage.materialize("r")
        stage.finish("r", snapshots=[])


def test_row_b8_lowering_pins_the_earlier_snapshot_before_it_releases_the_later(world) -> None:
    """Two snapshots, at 4 and 8, both another's and evictable; the tail's reservation needs one
    of them."""
    stage = world(attention(16), recurrent(2))
    stage.run("a", tokens(0, 12), snapshots=[4, 8])
    vote = stage.claim("r", stage.prompt(tokens(0, 15)), 8)
    assert (vote.endpoint, vote.committed) == (8, True)
    moved = stage.cache.move(R, 2, 4)
    assert (moved.endpoint, moved.committed) == (4, True)
    done = stage.materialize("r")
    assert done.slot == 0
    stage.finish("r")
    assert stage.hint(tokens(0, 15)) in (4, 12)


def test_a_lease_only_falls(world) -> None:
    stage = world(attention(16))
    stage.run("a", tokens(0, 40))
    stage.claim("r", stage.prompt(tokens(0, 40)), 12)
    assert stage.cache.move(R, 2, 36).endpoint == 12
    stage.cache.undo(R)


def test_trim_goes_past_what_the_floor_forbids(world) -> None:
    """The earlier snapshot may be the only one that backs another's escrow: then it is not
    pinned."""
    stage = world(attention(24), recurrent(2))
    stage.run("a", tokens(0, 12), snapshots=[4, 8])
    assert stage.cache.lease(R, 1, stage.prompt(tokens(0, 12)), 8).endpoint == 8
    assert stage.claim("b", stage.prompt(tokens(100, 8)), 0).committed
    assert stage.cache.trim(R, 4).endpoint == 4
    stage.cache.release_lease(R)
    stage.materialize("b")
    stage.finish("b")


def test_broken_contracts_are_errors(world) -> None:
    stage = world(attention(16))
    prompt = stage.prompt(tokens(0, 20))
    stage.cache.lease(R, 1, prompt, 0)
    with pytest.raises(LocalProtocolError, match="already holds"):
        stage.cache.lease(R, 2, prompt, 0)
    with pytest.raises(LocalProtocolError, match="no committed escrow"):
        stage.cache.materialize(R)
    with pytest.raises(LocalProtocolError, match="multiple of 4"):
        stage.cache.trim(R, 3)
    stage.cache.prepare(R)
    with pytest.raises(LocalProtocolError, match="an escrow already"):
        stage.cache.prepare(R)
    with pytest.raises(LocalProtocolError, match="move it"):
        stage.cache.trim(R, 0)
    with pytest.raises(LocalProtocolError, match="escrow is released before the lease"):
        stage.cache.release_lease(R)
    with pytest.raises(LocalProtocolError, match="attempt 1 after 1"):
        stage.cache.move(R, 1, 0)
    with pytest.raises(LocalProtocolError, match="commit at 4"):
        stage.cache.commit(R, 4)
    with pytest.raises(LocalProtocolError, match="not materialised"):
        stage.cache.publish(R, 4)
    with pytest.raises(LocalProtocolError, match="holds nothing"):
        stage.cache.materialize(RequestId("unknown"))
    stage.cache.free(R)
    stage.cache.free(R)
    assert stage.cache.held() == ()


def test_a_walk_made_before_an_eviction_is_made_again(world) -> None:
    stage = world(attention(6))
    stage.run("a", tokens(0, 16))
    prompt = stage.prompt(tokens(0, 17))
    seen = stage.cache.foresee(prompt, 16)
    assert (seen.reuse, seen.present) == (ReuseVote(attention=16), (4,))
    stage.run("b", tokens(100, 20))
    vote = stage.cache.lease(R, 1, prompt, 16, seen)
    assert vote.endpoint == stage.hint(tokens(0, 17)) < 16
    assert pinned(stage) == vote.endpoint // B


def test_a_walk_for_another_limit_or_prompt_is_made_again(world) -> None:
    stage = world(attention(16))
    stage.run("a", tokens(0, 40))
    prompt, other = stage.prompt(tokens(0, 40)), stage.prompt(tokens(50, 40))
    assert stage.cache.lease(R, 1, prompt, 8, stage.cache.foresee(prompt, 24)).endpoint == 8
    stage.cache.release_lease(R)
    assert stage.cache.lease(R, 1, other, 24, stage.cache.foresee(prompt, 24)).endpoint == 0


def test_what_was_foreseen_keeps_the_floor_of_now(world) -> None:
    """Others reserve room in between: the tree is the same, what may be pinned is not."""
    stage = world(attention(8))
    stage.run("a", tokens(0, 24))
    prompt = stage.prompt(tokens(0, 25))
    seen = stage.cache.foresee(prompt, 24)
    assert stage.claim("b", stage.prompt(tokens(100, 16)), 0).committed
    vote = stage.cache.lease(R, 1, prompt, 24, seen)
    assert vote.endpoint == 16
    stage.check()


def test_walks_beside_another_thread_never_fail_and_never_mislead(world) -> None:
    """One thread computes and evicts under the lock, the other walks without it."""
    stage = world(attention(24), slots=2)
    shared = tokens(0, 32)
    mutex, done = threading.Lock(), threading.Event()

    def compute() -> None:
        for turn in range(300):
            with mutex:
                cut = 4 * (turn % 8 + 1)
                stage.run(f"w{turn}", [*shared[:cut], *tokens(1000 + 40 * turn, 12)])
                if turn % 7 == 0:
                    stage.cache.reset()
        done.set()

    worker = threading.Thread(target=compute)
    worker.start()
    stood = walks = 0
    prompt = stage.prompt([*shared, 1])
    while not done.is_set():
        changes = stage.cache._parts.tree.changes
        seen = stage.cache.foresee(prompt, 32)
        with mutex:
            walks += 1
            same = changes == stage.cache._parts.tree.changes
            found = leases.look(stage.cache._parts, prompt, 8)
            assert not same or seen.reuse == found
            stood += same
            vote = stage.cache.lease(R, 1, prompt, 32, seen)
            assert vote.reuse == found or vote.endpoint < found.attention
            stage.cache.release_lease(R)
            stage.check()
    worker.join()
    assert walks > stood > 0, "some walks must have met a change, and some not"
