"""W, the pieces, and what of the ring counts as admitted work."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from planner_world import World, pieces

from wavepp.planner.demand import Chunk, Demand, newest_chunks
from wavepp.planner.factory import PlannerOptions, make_planner
from wavepp.planner.packing import Cut
from wavepp.units import RequestId

A, B = RequestId("a"), RequestId("b")


def cut(name: RequestId, start: int, length: int) -> Cut:
    return Cut(request_id=name, start=start, length=length, final=False)


def test_work_is_remaining_suffixes_and_newest_chunks() -> None:
    chunk = Chunk(request_id=A, start=0, length=16)
    demand = Demand(pieces=pieces(100, 7), chunks=(chunk,))
    assert demand.tokens == 123
    assert demand.lengths() == [100, 7, 16]


def test_newest_chunks_are_the_last_span_of_each_request_in_the_ring() -> None:
    ring = [(cut(A, 0, 16),), (cut(A, 16, 8), cut(B, 0, 8)), (cut(B, 8, 16),)]
    assert newest_chunks(ring) == (
        Chunk(request_id=A, start=16, length=8),
        Chunk(request_id=B, start=8, length=16),
    )


def test_newest_chunks_are_in_order_of_their_waves() -> None:
    ring = [(cut(A, 0, 16),), (cut(B, 0, 8),), (cut(A, 16, 8),)]
    assert [chunk.request_id for chunk in newest_chunks(ring)] == [B, A]


def test_no_waves_no_chunks() -> None:
    assert newest_chunks([]) == ()
    assert Demand(pieces=()).tokens == 0


@given(st.integers(1, 40), st.integers(1, 8))
def test_launching_a_wave_takes_nothing_from_the_work(blocks: int, waves: int) -> None:
    """The first chunk that leaves the planner stays in W; only older ones go."""
    options = PlannerOptions(
        wave_tokens_max=16, wave_tokens_min=8, block_size=4, num_stages=4, ring_depth=8
    )
    world = World(make_planner("static", options), ring_depth=8, block_size=4)
    world.admit("a", blocks * 4)
    before = world.demand().tokens
    world.step()
    assert world.demand().tokens == before
    for _ in range(waves - 1):
        if world.ring.has_room:
            world.step()
    newest = world.waves[-1][0].length
    left = world.requests["a"].end - world.requests["a"].planned
    assert world.demand().tokens == newest + left
