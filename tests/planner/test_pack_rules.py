"""The packing rules, one by one and in their order of precedence."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_world import piece, pieces

from wavepp.planner.packing import Cut, Packed, PackingRules, Piece, TokenRoom, pack_wave

B = 4


def pack(
    work: tuple[Piece, ...],
    budget: int,
    *,
    b_min: int | None = None,
    block: int = B,
    overdue: frozenset[str] = frozenset(),
) -> Packed:
    low = budget if b_min is None else b_min
    rules = PackingRules(
        block_size=block,
        tail_tokens_min=math.ceil(low / 2),
        fragment_tokens_min=max(low, math.ceil(budget / 2)),
    )
    return pack_wave(work, TokenRoom(budget), rules, overdue=overdue)  # type: ignore[arg-type]


def taken(packed: Packed) -> list[tuple[str, int]]:
    return [(cut.request_id, cut.length) for cut in packed.cuts]


def test_whole_pieces_go_first_come_first_served() -> None:
    assert taken(pack(pieces(4, 5, 6), 16)) == [("a", 4), ("b", 5), ("c", 6)]


def test_a_long_piece_takes_the_whole_wave() -> None:
    packed = pack(pieces(100, 8), 16)
    assert packed.cuts == (Cut(request_id="a", start=0, length=16, final=False),)  # type: ignore[arg-type]


def test_a_span_to_the_end_is_final_and_may_end_anywhere() -> None:
    packed = pack((piece("a", 5, start=8),), 16)
    assert packed.cuts == (Cut(request_id="a", start=8, length=5, final=True),)  # type: ignore[arg-type]


def test_a_span_that_is_not_the_end_ends_at_a_block() -> None:
    assert taken(pack((piece("a", 100, start=6),), 16, b_min=8)) == [("a", 14)]


def test_progress_wins_over_alignment() -> None:
    """No boundary within 3 tokens, and nothing else to run: cut anyway."""
    assert taken(pack((piece("a", 100, start=0),), 3, b_min=3)) == [("a", 3)]


def test_alignment_wins_over_tails() -> None:
    """The only boundary within the wave leaves 1 token of a tail: take it."""
    assert taken(pack((piece("a", 5),), 4, b_min=4)) == [("a", 4)]


def test_a_cut_moves_to_spare_a_short_tail() -> None:
    """17 tokens at M = 16, b_min = 8: not 16 + 1, but 12 + 5."""
    assert taken(pack((piece("a", 17),), 16, b_min=8)) == [("a", 12)]
    assert taken(pack((piece("a", 20),), 16, b_min=8)) == [("a", 16)]  # 4 is half of b_min
    assert taken(pack((piece("a", 17),), 16, b_min=8, block=1)) == [("a", 13)]


def test_tails_win_over_fragments() -> None:
    """Half of the wave is free, enough for a fragment of b/2; sparing the tail makes it shorter
    than that, so it is left out. Nothing leaves a tail of 1.
    """
    packed = pack((piece("a", 8), piece("b", 9)), 16, b_min=4)
    assert taken(packed) == [("a", 8)]
    assert packed.withheld == ("b",)
    assert taken(pack((piece("a", 8), piece("b", 10)), 16, b_min=4)) == [("a", 8), ("b", 8)]


def test_a_half_full_wave_takes_no_short_fragment() -> None:
    packed = pack((piece("a", 10), piece("b", 40)), 16, b_min=8)
    assert taken(packed) == [("a", 10)]
    assert packed.withheld == ("b",)


def test_a_wave_less_than_half_full_takes_fragments() -> None:
    packed = pack((piece("a", 7), piece("b", 40)), 16, b_min=8)
    assert taken(packed) == [("a", 7), ("b", 8)]
    assert packed.withheld == ()


def test_a_fragment_of_max_of_floor_and_half_is_taken() -> None:
    assert taken(pack((piece("a", 8), piece("b", 40)), 16, b_min=8)) == [("a", 8), ("b", 8)]
    assert taken(pack((piece("a", 8), piece("b", 40)), 16, b_min=16)) == [("a", 8)]


def test_whole_later_pieces_fill_what_a_fragment_may_not() -> None:
    packed = pack((piece("a", 10), piece("b", 40), piece("c", 5), piece("d", 40)), 16, b_min=8)
    assert taken(packed) == [("a", 10), ("c", 5)]
    assert packed.withheld == ("b",)  # for d there is room for not even one block


def test_only_the_first_fragment_left_out_counts_as_withheld() -> None:
    """It would have taken the room: the rule costs those behind it nothing."""
    packed = pack((piece("a", 12), piece("b", 40), piece("c", 40)), 24, b_min=16)
    assert taken(packed) == [("a", 12)]
    assert packed.withheld == ("b",)


def test_an_overdue_request_is_withheld_no_longer() -> None:
    packed = pack((piece("a", 10), piece("b", 40)), 16, b_min=8, overdue=frozenset({"b"}))
    assert taken(packed) == [("a", 10), ("b", 4)]


def test_fragments_of_any_size_fill_a_wave_without_the_rule() -> None:
    rules = PackingRules(block_size=B, tail_tokens_min=4, fragment_tokens_min=0)
    packed = pack_wave((piece("a", 10), piece("b", 40)), TokenRoom(16), rules)
    assert taken(packed) == [("a", 10), ("b", 4)]


def test_a_solo_piece_shares_with_nobody() -> None:
    assert taken(pack((piece("a", 4, solo=True), piece("b", 4)), 16)) == [("a", 4)]
    assert taken(pack((piece("a", 4), piece("b", 4, solo=True), piece("c", 4)), 16)) == [("a", 4)]


@pytest.mark.parametrize("block", [1, 2, 4, 8])
@pytest.mark.parametrize("tokens", [17, 33])
def test_a_tail_of_one_token_never_runs_alone_while_others_wait(tokens: int, block: int) -> None:
    """17 and 33 tokens at M = 16, b_min = 8, run to the end beside another request."""
    left = {"a": tokens, "b": 40}
    done = {"a": 0, "b": 0}
    while left["a"] or left["b"]:
        work = tuple(piece(name, left[name], start=done[name]) for name in "ab" if left[name])
        packed = pack(work, 16, b_min=8, block=block)
        total = sum(cut.length for cut in packed.cuts)
        assert total > 1 or len(work) == 1, packed
        for cut in packed.cuts:
            done[cut.request_id] += cut.length
            left[cut.request_id] -= cut.length


# Properties


@dataclass(frozen=True)
class Case:
    work: tuple[Piece, ...]
    budget: int
    b_min: int
    block: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block = draw(st.sampled_from([1, 4, 16]))
    low = draw(st.integers(1, 8))
    high = draw(st.integers(low, 16))
    work = tuple(
        piece(
            f"r{index}",
            draw(st.integers(1, 40 * block)),
            start=draw(st.integers(0, 8)) * block + draw(st.sampled_from([0, 0, 0, 1])),
            solo=draw(st.sampled_from([False] * 9 + [True])),
        )
        for index in range(draw(st.integers(1, 8)))
    )
    return Case(work, high * block, low * block, block)


def pack_case(case: Case) -> Packed:
    return pack(case.work, case.budget, b_min=case.b_min, block=case.block)


@given(cases())
def test_a_wave_is_never_empty_nor_over_its_budget(case: Case) -> None:
    cuts = pack_case(case).cuts
    assert cuts
    assert sum(cut.length for cut in cuts) <= case.budget
    assert all(cut.length > 0 for cut in cuts)


@given(cases())
def test_spans_start_where_their_pieces_do_in_fcfs_order_starting_with_the_head(
    case: Case,
) -> None:
    cuts = pack_case(case).cuts
    by_name = {part.request_id: part for part in case.work}
    names = [cut.request_id for cut in cuts]
    assert names == [part.request_id for part in case.work if part.request_id in names]
    assert names[0] == case.work[0].request_id
    for cut in cuts:
        assert cut.start == by_name[cut.request_id].start
        assert cut.final == (cut.length == by_name[cut.request_id].remaining)


@given(cases())
def test_only_whole_pieces_pass_a_piece_that_waits(case: Case) -> None:
    """Behind the first piece that is cut short or left out, spans are whole pieces, or fragments
    long enough by the rules.
    """
    cuts = {cut.request_id: cut for cut in pack_case(case).cuts}
    waiting = False
    for part in case.work:
        cut = cuts.get(part.request_id)
        if waiting and cut is not None and not cut.final:
            assert cut.length >= max(case.b_min, case.budget / 2) or part.request_id == "r0"
        waiting = waiting or cut is None or not cut.final


@given(cases())
def test_cuts_are_aligned_unless_nothing_else_would_run(case: Case) -> None:
    for index, cut in enumerate(pack_case(case).cuts):
        if not cut.final and (cut.start + cut.length) % case.block:
            assert index == 0
            assert cut.length == case.budget
            assert (cut.start + case.budget) // case.block * case.block <= cut.start


@given(cases())
def test_a_short_tail_is_left_only_where_no_aligned_cut_avoids_it(case: Case) -> None:
    by_name = {part.request_id: part for part in case.work}
    for cut in pack_case(case).cuts:
        tail = by_name[cut.request_id].remaining - cut.length
        if cut.final or 2 * tail >= case.b_min or (cut.start + cut.length) % case.block:
            continue
        earlier = cut.start + cut.length - case.block
        assert earlier <= cut.start or (
            2 * (cut.start + by_name[cut.request_id].remaining - earlier) < case.b_min
        )


@given(cases())
def test_no_short_fragment_is_in_a_wave_that_is_half_full_without_it(case: Case) -> None:
    used = 0
    for cut in pack_case(case).cuts:
        if not cut.final and 2 * used >= case.budget:
            assert cut.length >= max(case.b_min, case.budget / 2)
        used += cut.length


@given(cases())
def test_requests_are_withheld_from_half_full_waves_only(case: Case) -> None:
    packed = pack_case(case)
    names = {cut.request_id for cut in packed.cuts}
    assert not names & set(packed.withheld)
    if packed.withheld:
        assert 2 * sum(cut.length for cut in packed.cuts) >= case.budget
