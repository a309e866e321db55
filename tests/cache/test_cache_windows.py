"""Windows: what is usable where, by brute force; votes and how they are intersected."""

from __future__ import annotations

import numpy as np
import pytest
from cache_world import B, attention, recurrent, sliding
from hypothesis import given
from hypothesis import strategies as st

from wavepp.cache.keys import make_prompt
from wavepp.cache.types import CacheConfig, GroupSpec, ReuseVote, best_endpoint, junction_of
from wavepp.cache.windows import demand, make_vote, needed, usable, within_floor
from wavepp.errors import ConfigError

SPECS = st.sampled_from([attention(9), recurrent(9), sliding(9, 1), sliding(9, 6), sliding(9, 8)])
FLAGS = st.lists(st.booleans(), max_size=12).map(lambda flags: np.array(flags, dtype=np.bool_))


@pytest.mark.parametrize(
    ("spec", "endpoint", "blocks"),
    [
        (attention(9), 3, (0, 3)),
        (recurrent(9), 3, (2, 3)),
        (recurrent(9), 0, (0, 0)),
        (sliding(9, 4), 3, (2, 3)),
        (sliding(9, 5), 3, (1, 3)),
        (sliding(9, 100), 3, (0, 3)),
        (sliding(9, 1), 3, (2, 3)),
        (attention(9), 0, (0, 0)),
    ],
)
def test_needed_covers_the_window(spec: GroupSpec, endpoint: int, blocks: tuple[int, int]) -> None:
    assert needed(spec, endpoint, B) == blocks


@given(SPECS, FLAGS)
def test_usable_is_where_all_that_is_needed_is_held(spec: GroupSpec, present: np.ndarray) -> None:
    expected = [
        bool(present[slice(*needed(spec, endpoint, B))].all())
        for endpoint in range(len(present) + 1)
    ]
    assert usable(spec, present, B).tolist() == expected


@given(SPECS, FLAGS, st.integers(0, 13))
def test_within_floor_counts_what_a_pin_takes(
    spec: GroupSpec, fresh: np.ndarray, spare: int
) -> None:
    expected = [
        int(fresh[slice(*needed(spec, endpoint, B))].sum()) <= spare
        for endpoint in range(len(fresh) + 1)
    ]
    assert within_floor(spec, fresh, spare, B).tolist() == expected


@given(st.lists(st.tuples(SPECS, FLAGS), min_size=1, max_size=3), st.integers(0, 13))
def test_a_vote_says_exactly_what_all_windows_can_use(
    windows: list[tuple[GroupSpec, np.ndarray]], limit: int
) -> None:
    count = min(len(present) for _, present in windows)
    specs = [spec for spec, _ in windows]
    masks = [usable(spec, present[:count], B) for spec, present in windows]
    vote = make_vote(specs, masks, B)
    together = np.logical_and.reduce(masks)
    best = max(e for e in range(min(limit, count) + 1) if together[e])
    assert vote.highest(min(limit, count) * B) == best * B
    for endpoint in range(count + 1):
        assert vote.usable(endpoint * B) == together[endpoint]


def test_a_window_a_stage_lacks_is_no_limit() -> None:
    assert make_vote([], [], B) == ReuseVote()
    assert ReuseVote().highest(40) == 40
    only_attention = make_vote([attention(4)], [np.array([True, True, False])], B)
    assert only_attention == ReuseVote(attention=B)
    only_recurrent = make_vote([recurrent(4)], [np.array([True, False, True])], B)
    assert only_recurrent == ReuseVote(snapshots=(2 * B,))


def test_row_d12_snapshots_at_64_72_90_and_64_80_agree_on_64() -> None:
    stages = [ReuseVote(snapshots=(64, 72, 90)), ReuseVote(snapshots=(64, 80))]
    assert best_endpoint(stages, 80) == 64
    # The paper's step-down ends at the same place: 80 -> 72 -> 64.
    endpoint, seen = 80, [80]
    while not all(stage.usable(endpoint) for stage in stages):
        endpoint = min(stage.highest(endpoint) for stage in stages)
        seen.append(endpoint)
    assert seen == [80, 72, 64]


def test_row_d12_disjoint_snapshots_agree_on_nothing() -> None:
    stages = [ReuseVote(snapshots=(4,)), ReuseVote(snapshots=(8,)), ReuseVote(snapshots=(12,))]
    assert best_endpoint(stages, 16) == 0


@given(
    st.lists(
        st.builds(
            ReuseVote,
            attention=st.none() | st.integers(0, 9),
            snapshots=st.none() | st.sets(st.integers(1, 9)).map(lambda s: tuple(sorted(s))),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 9),
)
def test_the_agreement_is_the_greatest_endpoint_all_can_use(
    votes: list[ReuseVote], limit: int
) -> None:
    expected = max(e for e in range(limit + 1) if all(vote.usable(e) for vote in votes))
    assert best_endpoint(votes, limit) == expected


def test_a_junction_lies_above_the_recurrent_endpoint() -> None:
    votes = [ReuseVote(attention=20, snapshots=(8,)), ReuseVote(attention=24), ReuseVote()]
    assert junction_of(votes, 8) == 20
    assert junction_of(votes, 20) is None
    assert junction_of([ReuseVote(snapshots=(8,))], 4) is None


def test_demand_is_the_suffix_and_what_must_come_back() -> None:
    prompt = make_prompt(range(18), B, room_tokens=4)
    assert demand(attention(9), prompt, 2, 1, caching=True) == 6 - 2 + 1
    assert demand(recurrent(9), prompt, 2, 0, caching=True) == 1
    assert demand(recurrent(9), prompt, 4, 0, caching=True) == 0  # the tail is there already
    assert demand(recurrent(9), prompt, 0, 0, caching=False) == 0
    assert demand(recurrent(1), prompt, 0, 0, caching=True) == 1
    assert demand(recurrent(1), prompt, 2, 0, caching=True) == 0  # the lease needs the only one
    assert demand(recurrent(0), prompt, 0, 0, caching=True) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size 0"),
        ({"slots": 0}, "slots 0"),
        ({"headroom_tokens": -1}, "headroom_tokens -1"),
        ({"max_snapshots_per_path": 0}, "max_snapshots_per_path 0"),
        ({"hint_shards": 3}, "hint_shards 3"),
        ({"groups": (attention(1), attention(2))}, "names must differ"),
    ],
)
def test_a_bad_configuration_names_its_field(options: dict[str, object], message: str) -> None:
    given_options = {"block_size": B, "slots": 1, "groups": (), **options}
    with pytest.raises(ConfigError, match=message):
        CacheConfig(**given_options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "attention", "units": -1}, "units -1"),
        ({"kind": "sliding", "units": 1}, "window None"),
        ({"kind": "attention", "units": 1, "window": 4}, "window 4"),
        ({"kind": "sliding", "units": 1, "window": 0}, "window 0"),
    ],
)
def test_a_bad_group_names_its_field(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GroupSpec(name="g", **options)
