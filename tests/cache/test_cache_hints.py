"""HintIndex: counts, galloping probe, backward scan, shards and their locks, versions."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from cache_world import B, attention, recurrent, sliding, tokens
from hypothesis import given
from hypothesis import strategies as st

from wavepp.cache.hints import HintIndex
from wavepp.cache.keys import make_prompt
from wavepp.cache.types import ReuseVote


class CountingDict(dict):
    """A table that counts its look-ups."""

    looks = 0

    def __contains__(self, key: object) -> bool:
        self.looks += 1
        return super().__contains__(key)


class CountingLock:
    """A lock that counts how often it is taken, and never twice at once."""

    def __init__(self) -> None:
        self.taken, self.held = 0, False

    def __enter__(self) -> None:
        assert not self.held
        self.taken, self.held = self.taken + 1, True

    def __exit__(self, *_: object) -> None:
        self.held = False


@given(st.integers(0, 300), st.integers(0, 300))
def test_gallop_finds_the_leading_keys(there: int, count: int) -> None:
    keys = [str(i).encode() for i in range(count)]
    index = HintIndex([attention(9)], 1)
    index.add(0, 0, keys[:there])
    assert index.probe(0, keys, count) == min(there, count)


def test_gallop_needs_few_probes() -> None:
    keys = [str(i).encode() for i in range(3125)]
    for there in (0, 1, 2, 100, 1600, 3124, 3125):
        index = HintIndex([attention(9)], 1)
        table = index._tables[0][0] = CountingDict.fromkeys(keys[:there], 1)
        assert index.probe(0, keys, 3125) == there
        assert table.looks <= (1 if there == 3125 else 17), there


def test_a_key_counts_until_its_last_block_is_detached() -> None:
    index = HintIndex([attention(9)], 4)
    index.add(1, 0, [b"a", b"b"])
    index.add(1, 0, [b"b", b"b"])
    assert index.counts() == {(1, 0): {b"a": 1, b"b": 3}}
    index.remove(1, 0, [b"b", b"a"])
    index.remove(1, 0, [b"b"])
    assert index.counts() == {(1, 0): {b"b": 1}}
    index.remove(1, 0, [b"b"])
    assert index.counts() == {}


BATCHES = st.lists(st.lists(st.sampled_from("abcdef").map(str.encode), max_size=8), max_size=8)


@given(BATCHES, st.randoms(use_true_random=False))
def test_counts_are_what_was_added_and_not_removed(batches, rng) -> None:
    """Whatever keys collide, in one batch or with what is there."""
    index, model = HintIndex([attention(9)], 2), Counter()
    for batch in batches:
        index.add(1, 0, batch)
        model.update(batch)
        assert index.counts().get((1, 0), {}) == dict(model)
    held = list(model.elements())
    rng.shuffle(held)
    while held:
        batch, held = held[:3], held[3:]
        index.remove(1, 0, batch)
        model.subtract(batch)
        assert index.counts().get((1, 0), {}) == dict(+model)


def test_a_block_that_was_not_added_can_not_be_removed() -> None:
    index = HintIndex([attention(9)], 2)
    index.add(1, 0, [b"a"])
    with pytest.raises(AssertionError, match="not in the hint index"):
        index.remove(1, 0, [b"a", b"a"])


def test_the_version_grows_with_every_change_and_no_look_up() -> None:
    index = HintIndex([attention(9)], 4)
    prompt = make_prompt(range(9), B)
    index.look_up(prompt)
    assert index.version == 0
    index.add(index.shard_of(prompt.keys[0]), 0, [prompt.keys[0]])
    index.look_up(prompt)
    assert index.version == 1
    index.add(0, 0, [])
    assert index.version == 1


def test_one_look_up_takes_one_lock_once() -> None:
    locks = [CountingLock() for _ in range(4)]
    index = HintIndex([attention(9)], 4, locks)
    prompt = make_prompt(range(33), B)
    index.add(index.shard_of(prompt.keys[0]), 0, list(prompt.keys[:5]))
    for lock in locks:
        lock.taken = 0
    assert index.look_up(prompt) == ReuseVote(attention=5 * B)
    assert sorted(lock.taken for lock in locks) == [0, 0, 0, 1]


def test_look_up_lists_snapshots_at_or_below_the_attention_endpoint() -> None:
    index = HintIndex([recurrent(9), attention(9)], 2)
    prompt = make_prompt(range(33), B)
    shard = index.shard_of(prompt.keys[0])
    index.add(shard, 1, list(prompt.keys[:5]))
    index.add(shard, 0, [prompt.keys[i] for i in (1, 4, 6)])
    assert index.look_up(prompt) == ReuseVote(attention=5 * B, snapshots=(2 * B, 5 * B))


def test_look_up_scans_back_in_a_sliding_window() -> None:
    index = HintIndex([sliding(9, 2 * B)], 2)
    prompt = make_prompt(range(33), B)
    index.add(index.shard_of(prompt.keys[0]), 0, [prompt.keys[i] for i in (0, 2, 3, 4, 7)])
    vote = index.look_up(prompt)
    assert vote == ReuseVote(sliding=((0, B), (4 * B, 5 * B)))
    assert [vote.highest(e * B) // B for e in range(9)] == [0, 1, 1, 1, 4, 5, 5, 5, 5]


def test_look_up_takes_the_least_of_two_attention_groups() -> None:
    index = HintIndex([attention(9, name="one"), attention(9, name="two")], 2)
    prompt = make_prompt(range(33), B)
    shard = index.shard_of(prompt.keys[0])
    index.add(shard, 0, list(prompt.keys[:5]))
    index.add(shard, 1, list(prompt.keys[:3]))
    assert index.look_up(prompt) == ReuseVote(attention=3 * B)


def test_a_hint_is_capped_so_that_a_token_is_left(world) -> None:
    stage = world(attention(9))
    stage.run("a", tokens(0, 2 * B))
    assert stage.hint(tokens(0, 2 * B)) == B
    assert stage.hint(tokens(0, 2 * B + 1)) == 2 * B


def test_a_hint_owns_nothing(world) -> None:
    stage = world(attention(9))
    stage.run("a", tokens(0, 12))
    before = stage.cache.stats()
    stage.hint(tokens(0, 13))
    assert stage.cache.stats() == before
    assert stage.cache.held() == ()


def test_a_stale_hint_shows_by_its_version(world) -> None:
    stage = world(attention(9))
    prompt = stage.prompt(tokens(0, 13))
    early = stage.cache.hint(prompt)
    assert early.reuse == ReuseVote(attention=0)
    assert early.version == stage.cache.hint_version
    stage.run("a", tokens(0, 12))
    assert early.version != stage.cache.hint_version
    assert stage.cache.hint(prompt).reuse == ReuseVote(attention=12)


def test_offloading_does_not_change_the_index(world) -> None:
    stage = world(attention(3, host=3))
    stage.run("a", tokens(0, 12))
    stage.run("b", tokens(100, 12))
    assert stage.cache.stats().offloaded == 3
    assert stage.hint(tokens(0, 13)) == 12


def test_what_is_detached_counts_until_the_index_is_settled() -> None:
    index = HintIndex([attention(9)], 1)
    keys = [b"a", b"b", b"c"]
    index.add(0, 0, keys)
    index.remove_later(0, 0, [b"b", b"c"])
    index.add(0, 0, [b"c"])  # computed again before the index has followed
    before = index.version
    assert index.probe(0, keys, 3) == 3
    index.settle()
    assert index.version > before
    assert index.counts() == {(0, 0): {b"a": 1, b"c": 1}}
    index.settle()  # nothing is owed any more
    assert index.counts() == {(0, 0): {b"a": 1, b"c": 1}}


def test_two_threads_may_settle_at_once() -> None:
    index = HintIndex([attention(9)], 1, [threading.Lock()])
    keys = [str(i).encode() for i in range(4000)]
    index.add(0, 0, keys)
    for at in range(0, 4000, 4):
        index.remove_later(0, 0, keys[at : at + 3])
    threads = [threading.Thread(target=index.settle) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert index.counts() == {(0, 0): dict.fromkeys(keys[3::4], 1)}
