"""Greedy packing: budgets, alignment, order, progress."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wavepp.planner.packing import Cut, Piece, pack_greedy
from wavepp.planner.planner import GreedyPlanner
from wavepp.units import RequestId


def piece(name: str, start: int, remaining: int, *, solo: bool = False) -> Piece:
    return Piece(request_id=RequestId(name), start=start, remaining=remaining, solo=solo)


def cut(name: str, start: int, length: int, *, final: bool) -> Cut:
    return Cut(request_id=RequestId(name), start=start, length=length, final=final)


def test_pack_takes_whole_pieces_in_order() -> None:
    pieces = [piece("a", 0, 5), piece("b", 8, 3), piece("c", 0, 8)]
    assert pack_greedy(pieces, budget=16, block_size=4) == (
        cut("a", 0, 5, final=True),
        cut("b", 8, 3, final=True),
        cut("c", 0, 8, final=True),
    )


def test_pack_ends_a_cut_span_at_a_block_boundary() -> None:
    pieces = [piece("a", 0, 5), piece("b", 0, 100)]
    assert pack_greedy(pieces, budget=16, block_size=4) == (
        cut("a", 0, 5, final=True),
        cut("b", 0, 8, final=False),
    )


def test_pack_aligns_the_end_not_the_length() -> None:
    assert pack_greedy([piece("a", 6, 100)], budget=16, block_size=4) == (
        cut("a", 6, 14, final=False),
    )


def test_pack_fills_the_room_an_aligned_cut_leaves_with_a_whole_piece() -> None:
    pieces = [piece("a", 1, 100), piece("b", 0, 2), piece("c", 0, 1)]
    assert pack_greedy(pieces, budget=9, block_size=4) == (
        cut("a", 1, 7, final=False),
        cut("b", 0, 2, final=True),
    )


def test_pack_leaves_out_a_fragment_that_reaches_no_boundary() -> None:
    pieces = [piece("a", 0, 14), piece("b", 1, 100)]
    assert pack_greedy(pieces, budget=16, block_size=4) == (cut("a", 0, 14, final=True),)


def test_pack_cuts_anywhere_when_the_budget_holds_no_boundary() -> None:
    assert pack_greedy([piece("a", 1, 100)], budget=2, block_size=4) == (
        cut("a", 1, 2, final=False),
    )


def test_pack_gives_a_solo_piece_a_wave_of_its_own() -> None:
    solo = piece("s", 0, 2, solo=True)
    assert pack_greedy([solo, piece("a", 0, 2)], budget=16, block_size=4) == (
        cut("s", 0, 2, final=True),
    )
    assert pack_greedy([piece("a", 0, 2), solo], budget=16, block_size=4) == (
        cut("a", 0, 2, final=True),
    )


def test_planner_plans_nothing_without_work() -> None:
    planner = GreedyPlanner(wave_tokens_max=16, block_size=4)
    assert planner.plan([], now=0.0) == ()
    assert planner.plan([piece("a", 0, 3)], now=0.0) == (cut("a", 0, 3, final=True),)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 60), st.booleans()), min_size=1),
    st.integers(1, 40),
    st.integers(1, 9),
)
def test_pack_always_makes_progress_within_the_budget(
    drawn: list[tuple[int, int, bool]], budget: int, block_size: int
) -> None:
    pieces = [piece(str(i), *pair[:2], solo=pair[2]) for i, pair in enumerate(drawn)]
    cuts = pack_greedy(pieces, budget=budget, block_size=block_size)
    by_name = {p.request_id: p for p in pieces}
    assert cuts
    assert sum(c.length for c in cuts) <= budget
    assert [int(c.request_id) for c in cuts] == sorted({int(c.request_id) for c in cuts})
    for index, c in enumerate(cuts):
        source = by_name[c.request_id]
        assert c.start == source.start
        assert 1 <= c.length <= source.remaining
        assert c.final == (c.length == source.remaining)
        assert not source.solo or len(cuts) == 1
        if not c.final and index > 0:
            assert (c.start + c.length) % block_size == 0
