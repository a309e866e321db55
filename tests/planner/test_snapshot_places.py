"""Where spans save recurrent state; and that wanting it never changes a span."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from planner_world import World

from wavepp.planner.factory import PlannerOptions, make_planner
from wavepp.planner.snapshots import SnapshotPlaces, SnapshotWants, place_snapshots


def test_a_point_inside_a_span_is_an_inner_offset() -> None:
    wants = SnapshotWants(exact=(256,))
    assert place_snapshots(128, 512, wants, block_size=64) == SnapshotPlaces(inner=(128,))


def test_a_point_at_the_end_is_the_end() -> None:
    wants = SnapshotWants(exact=(640,))
    assert place_snapshots(128, 512, wants, block_size=64) == SnapshotPlaces(at_end=True)


def test_points_outside_the_span_are_not_its_business() -> None:
    wants = SnapshotWants(exact=(128, 704))
    assert place_snapshots(128, 512, wants, block_size=64) == SnapshotPlaces()


def test_an_interval_is_met_at_the_next_offset_or_the_end() -> None:
    wants = SnapshotWants(interval=96)
    places = place_snapshots(0, 256, wants, block_size=32, step=64)
    assert places == SnapshotPlaces(inner=(128, 192))  # for 96 and 192
    assert place_snapshots(0, 100 * 32, SnapshotWants(interval=3136), block_size=32) == (
        SnapshotPlaces(inner=(3136,))
    )
    assert place_snapshots(64, 32, wants, block_size=32) == SnapshotPlaces(at_end=True)


def test_a_point_that_no_offset_meets_is_kept_before_it() -> None:
    """A tail or junction snapshot after its point would be of no use to anybody."""
    wants = SnapshotWants(exact=(112,))
    assert place_snapshots(0, 120, wants, block_size=16) == SnapshotPlaces(inner=(64,))
    assert place_snapshots(0, 120, SnapshotWants(exact=(48,)), block_size=16) == SnapshotPlaces()


def test_positions_are_those_of_the_prompt() -> None:
    places = SnapshotPlaces(inner=(64, 128), at_end=True)
    assert places.positions(100, 200) == (164, 228, 300)


@given(
    block=st.sampled_from([4, 16, 64, 96, 128]),
    start_blocks=st.integers(0, 20),
    ragged=st.sampled_from([0, 0, 0, 3]),
    length=st.integers(1, 2000),
    interval_blocks=st.none() | st.integers(1, 30),
    exact_blocks=st.lists(st.integers(1, 60), max_size=3),
)
def test_places_are_block_boundaries_at_multiples_of_64(
    block: int,
    start_blocks: int,
    ragged: int,
    length: int,
    interval_blocks: int | None,
    exact_blocks: list[int],
) -> None:
    start = start_blocks * block + ragged
    interval = None if interval_blocks is None else interval_blocks * block
    exact = tuple(blocks * block for blocks in exact_blocks)
    places = place_snapshots(
        start, length, SnapshotWants(interval=interval, exact=exact), block_size=block
    )
    assert list(places.inner) == sorted(set(places.inner))
    for offset in places.inner:
        assert 0 < offset < length
        assert offset % 64 == 0
        assert (start + offset) % block == 0
    if places.at_end:
        assert (start + length) % block == 0
    if ragged == 0 and block % 64 == 0:  # the kernels' own case: every point is met exactly
        wanted = {point for point in exact if start < point <= start + length}
        if interval is not None:
            wanted |= set(range(interval, start + length + 1, interval)) - set(range(start + 1))
        reachable = {p for p in wanted if p < start + length or (start + length) % block == 0}
        assert set(places.positions(start, length)) == reachable


def test_an_interval_larger_than_the_budget_still_progresses() -> None:
    """Snapshots every 32 tokens, M = 16, b_min = 8, a prompt of 100."""
    for name in ("greedy", "static", "mpu", "balanced"):
        options = PlannerOptions(
            wave_tokens_max=16, wave_tokens_min=8, block_size=4, num_stages=2, ring_depth=4
        )
        world = World(make_planner(name, options), ring_depth=4, block_size=4)
        world.admit("a", 100)
        saved: set[int] = set()
        while world.requests:
            world.fill()
            for start, length in world.spans["a"]:
                wants = SnapshotWants(interval=32, exact=(96,))
                saved |= set(
                    place_snapshots(start, length, wants, block_size=4).positions(start, length)
                )
            world.complete()
        assert sum(length for _, length in world.spans["a"]) == 100
        assert len(saved) >= 3, (name, saved)
