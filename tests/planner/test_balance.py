"""Equal times on the slowest stage, and the number of waves of least loss."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_world import piece, pieces

from wavepp.planner.balance import (
    HORIZON_LEAST,
    HORIZON_MOST,
    MARGIN,
    PLENTY,
    SHORT,
    SPREAD_WINDOW,
    STRETCH,
    BalancedSizing,
    PipelineWork,
    Requests,
    TimeRoom,
    best_wave_work,
)
from wavepp.planner.budget import WaveGoals, budget_ladder
from wavepp.planner.demand import Chunk, Demand
from wavepp.planner.packing import Cut, PackingRules, pack_wave
from wavepp.planner.wave_time import StageCosts, WaveLoad, span_context
from wavepp.units import RequestId, WaveNumber

TOKENS = StageCosts(c0=0.0, c1=1.0, c2=0.0)
STEEP = StageCosts(c0=0.001, c1=1e-5, c2=1e-8)
M, B_MIN, B = 16384, 8192, 64


def goals(num_stages: int = 8, b_min: int = B_MIN) -> WaveGoals:
    ladder = budget_ladder(wave_tokens_max=M, wave_tokens_min=b_min, block_size=B)
    return WaveGoals(
        ladder=ladder,
        block_size=B,
        num_stages=num_stages,
        ring_depth=2 * num_stages,
        pipeline_fill=2,
    )


def seconds_of(cut: Cut, costs: StageCosts = STEEP) -> float:
    return costs.work_seconds(WaveLoad.of([cut]))


def waves_of_one(sizing: BalancedSizing, tokens: int, *, start: int = 0) -> list[Cut]:
    """One request, planned to its end with nothing coming back."""
    cuts: list[Cut] = []
    position = start
    while position < start + tokens:
        work = (piece("a", start + tokens - position, start=position),)
        demand = Demand(pieces=work, ring_waves=min(len(cuts), sizing.goals.ring_depth))
        size = sizing.size(demand)
        packed = pack_wave(work, size.room, size.rules)
        sizing.decided(WaveNumber(len(cuts) + 1), packed.cuts)
        cuts.extend(packed.cuts)
        position = cuts[-1].start + cuts[-1].length
    return cuts


def loss(v: float, work: PipelineWork, c0: float, num_stages: int) -> float:
    share = (num_stages - 1) * v / work.seconds
    idle = max(1.0, MARGIN * (1 / work.requests + share)) + work.spread * share
    return (1 + c0 / v) * idle


@given(
    seconds=st.floats(0.01, 100.0),
    requests=st.integers(1, 64),
    spread=st.floats(0.02, 1.0),
    constant=st.floats(1e-5, 0.2),
    num_stages=st.integers(2, 16),
)
def test_the_work_of_a_wave_is_that_of_least_loss(
    seconds: float, requests: int, spread: float, constant: float, num_stages: int
) -> None:
    work = PipelineWork(seconds=seconds, requests=requests, spread=spread)
    best = best_wave_work(work, constant_s=constant, num_stages=num_stages)
    least = loss(best, work, constant, num_stages)
    for factor in (0.5, 0.8, 0.95, 1.05, 1.25, 2.0):
        assert least <= loss(best * factor, work, constant, num_stages) * (1 + 1e-9)


def test_one_stage_needs_one_wave() -> None:
    work = PipelineWork(seconds=3.0, requests=2, spread=0.1)
    assert best_wave_work(work, constant_s=0.1, num_stages=1) == 3.0


def test_the_spread_grows_with_the_variation_of_request_sizes() -> None:
    alike, mixed = Requests(), Requests()
    assert alike.spread == 0.0
    alike.observe(Demand(pieces=pieces(100, 100, 100)))
    mixed.observe(Demand(pieces=pieces(10, 10, 280)))
    assert alike.spread == 0.0
    assert mixed.spread > 0.1


def test_a_request_counts_whole_as_long_as_it_is_there() -> None:
    """Its size when first seen, though parts of it are done; it goes with its last chunk."""
    requests = Requests()
    for left in (100, 60, 20):
        start = 40 + 100 - left
        requests.observe(Demand(pieces=(piece("a", left, start=start), piece("b", 100, start=40))))
        assert requests.spread == 0.0
        assert requests.load == WaveLoad(tokens=200, context=2 * span_context(40, 100))
    last = Chunk(request_id=piece("a", 1).request_id, start=120, length=20)
    requests.observe(Demand(pieces=(), chunks=(last,)))
    assert requests.load == WaveLoad(tokens=100, context=span_context(40, 100))
    requests.observe(Demand(pieces=()))
    assert len(requests) == 0


def test_a_new_attempt_from_a_lower_endpoint_counts_anew() -> None:
    requests = Requests()
    requests.observe(Demand(pieces=(piece("a", 60, start=40),)))
    requests.observe(Demand(pieces=(piece("a", 100),)))
    assert requests.load == WaveLoad(tokens=100, context=span_context(0, 100))


def test_the_spread_forgets_old_requests() -> None:
    requests = Requests()
    requests.observe(Demand(pieces=pieces(10, 5000)))
    for index in range(SPREAD_WINDOW):
        requests.observe(Demand(pieces=(piece(f"r{index}", 100),)))
    assert requests.spread == 0.0


def test_a_long_piece_is_cut_into_equal_times() -> None:
    """Not into full waves and a rest: 3.2 waves' worth is 3 parts (by the stretch of 10 %)."""
    costs = STEEP
    whole = costs.work_seconds(WaveLoad(tokens=4000, context=span_context(0, 4000)))
    room = TimeRoom(costs, seconds=whole / 3.2, tokens_max=M, tokens_min=1)
    first = room.tokens_for(piece("a", 4000))
    took = costs.work_seconds(WaveLoad(tokens=first, context=span_context(0, first)))
    assert took == pytest.approx(whole / 3, rel=0.001)
    assert first > 4000 / 3  # shallow tokens cost less


def test_a_wave_takes_whole_later_pieces_up_to_its_time() -> None:
    room = TimeRoom(TOKENS, seconds=100.0, tokens_max=M, tokens_min=1)
    sizing = BalancedSizing(goals(), [TOKENS] * 8)
    rules = sizing.size(Demand(pieces=pieces(1))).rules
    packed = pack_wave(pieces(40, 300, 45), room, rules)
    assert [(cut.request_id, cut.length) for cut in packed.cuts] == [("a", 40), ("c", 45)]


def test_room_is_never_more_than_the_largest_budget() -> None:
    room = TimeRoom(TOKENS, seconds=1e9, tokens_max=M, tokens_min=1)
    assert room.tokens_for(piece("a", 10 * M)) == M


def test_waves_of_a_long_prompt_take_equal_times_until_the_end() -> None:
    """100K tokens of which the last cost a hundred times the first. (Over many waves they grow.)"""
    cuts = waves_of_one(BalancedSizing(goals(b_min=1024), [STEEP] * 8), 100_000)
    assert sum(cut.length for cut in cuts) == 100_000
    times = [seconds_of(cut) for cut in cuts]
    lengths = [cut.length for cut in cuts]
    assert max(times) < 1.6 * min(times)
    assert max(lengths) > 4 * min(lengths)


def test_a_deep_queue_gets_full_waves() -> None:
    """What a wave costs besides its tokens is worth more than filling the stages sooner."""
    costs = [StageCosts(c0=0.015, c1=18e-6, c2=1.35e-10)] * 8
    deep = tuple(piece(f"r{index}", 16 * M) for index in range(16))
    size = BalancedSizing(goals(), costs).size(Demand(pieces=deep))
    assert size.budget == M
    assert size.room.tokens_for(deep[0]) == M


def tokens_after(done: int, *, ring_waves: int = 16) -> int:
    """Tokens of the next wave, of eight equal requests, after so many waves of M tokens."""
    costs = [StageCosts(c0=0.004, c1=18e-6, c2=0.0)] * 8
    work = tuple(piece(f"r{index}", M) for index in range(8))
    sizing = BalancedSizing(goals(b_min=1024), costs)
    for number in range(done):
        sizing.decided(
            WaveNumber(number + 1), [Cut(request_id=RequestId("x"), start=0, length=M, final=True)]
        )
    demand = Demand(pieces=work, ring_waves=ring_waves)
    return sizing.size(demand).room.tokens_for(work[0])


def test_waves_grow_while_the_pipeline_stays_full_up_to_a_bound() -> None:
    """Filling and draining count less, the longer the pipeline has not been empty."""
    grown = [tokens_after(done) for done in range(0, 200, 8)]
    assert grown == sorted(grown)
    assert grown[-1] > 1.5 * grown[0]
    bound = int(HORIZON_MOST * 8 / 1.5) + 1
    assert tokens_after(bound) == tokens_after(4 * bound)
    assert tokens_after(4 * bound, ring_waves=0) == tokens_after(0)  # it was empty: all anew


def test_waves_do_not_get_shorter_while_the_pipeline_is_not_empty() -> None:
    """The longest one has cost what filling costs. Requests too few for such waves come first."""
    costs = [StageCosts(c0=0.004, c1=18e-6, c2=0.0)] * 8

    def budget(sizing: BalancedSizing, count: int, *, ring_waves: int) -> int:
        work = tuple(piece(f"{count}r{index}", M) for index in range(count))
        return sizing.size(Demand(pieces=work, ring_waves=ring_waves)).budget

    sizing = BalancedSizing(goals(b_min=1024), costs)
    long = budget(sizing, 16, ring_waves=0)
    one = [Cut(request_id=RequestId("x"), start=0, length=B, final=False)]
    sizing.decided(WaveNumber(1), one)
    for count in (8, 4):
        alone = budget(BalancedSizing(goals(b_min=1024), costs), count, ring_waves=1)
        kept = budget(sizing, count, ring_waves=1)
        assert alone < kept <= long, count
        sizing.decided(WaveNumber(2), one)
    assert kept < long  # for four requests on eight stages
    assert budget(sizing, 4, ring_waves=0) == alone  # it was empty: all anew


@given(left=st.integers(1, 4 * M), behind=st.lists(st.integers(1, 2 * M), max_size=6))
def test_a_part_of_a_long_piece_has_its_wave_alone(left: int, behind: list[int]) -> None:
    room = TimeRoom(TOKENS, seconds=4096.0, tokens_max=M, tokens_min=1024)
    rules = PackingRules(block_size=B, tail_tokens_min=1024, fragment_tokens_min=0)
    packed = pack_wave(pieces(left, *behind), room, rules)
    first, *others = packed.cuts
    assert first.final or not others


@given(left=st.integers(1, 8 * M), seconds=st.floats(512.0, 8 * M))
def test_a_piece_that_is_not_cut_is_short_in_time_or_in_tokens(left: int, seconds: float) -> None:
    room = TimeRoom(TOKENS, seconds=seconds, tokens_max=M, tokens_min=1024)
    if room.tokens_for(piece("a", left)) == left:
        assert left <= STRETCH * seconds or left < SHORT * 1024


def test_a_little_work_is_spread_over_the_stages() -> None:
    """One request of two waves on eight stages: more than two, but not below b_min / 2."""
    cuts = waves_of_one(BalancedSizing(goals(b_min=1024), [STEEP] * 8), 2 * M)
    assert len(cuts) > 8
    assert min(cut.length for cut in cuts[:-1]) >= 512


def test_without_timings_tokens_are_divided_evenly() -> None:
    cuts = waves_of_one(BalancedSizing(goals(b_min=64)), 48 * 1024)
    lengths = [cut.length for cut in cuts]
    assert max(lengths) < 1.15 * min(lengths)
    assert all(length % B == 0 for length in lengths)


@pytest.mark.parametrize("constant", [0.0, 1e-6])
def test_waves_with_hardly_a_constant_are_no_more_than_four_times_those_wanted(
    constant: float,
) -> None:
    """S = 24."""
    costs = [StageCosts(c0=constant, c1=1.0, c2=0.0)] * 8
    waves = waves_of_one(BalancedSizing(goals(b_min=64), costs), 48 * 1024)
    assert 88 <= len(waves) <= 4 * 24


def test_requests_in_admission_count_as_if_they_were_here() -> None:
    """The first of eight equal requests is not cut as if it were alone."""
    costs = [StageCosts(c0=0.015, c1=18e-6, c2=1.35e-10)] * 8
    work = (piece("a", 13_120, start=118_080),)
    alone = BalancedSizing(goals(b_min=2048), costs).size(Demand(pieces=work))
    joined = BalancedSizing(goals(b_min=2048), costs).size(Demand(pieces=work, in_admission=7))
    assert joined.room.tokens_for(work[0]) > 2 * alone.room.tokens_for(work[0])


def wave_of(count: int, *, behind: int = 0) -> int:
    """Tokens of the first wave of so many requests of M tokens each, with others behind them."""
    costs = [StageCosts(c0=0.0035, c1=18e-6, c2=0.0)] * 8
    work = tuple(piece(f"r{index}", M) for index in range(count))
    sizing = BalancedSizing(goals(b_min=1024), costs)
    return sizing.size(Demand(pieces=work, behind=behind)).budget


def test_waves_are_longer_where_more_requests_wait() -> None:
    """Up to the bound: as many again make the horizon twice as long, at sixteen requests."""
    sizes = [wave_of(16, behind=behind) for behind in (0, 8, 16, 32)]
    assert sizes == sorted(set(sizes))
    assert sizes[2] / sizes[0] == pytest.approx(math.sqrt(2), rel=0.01)
    bound = int(16 * HORIZON_MOST / HORIZON_LEAST) + 1
    assert wave_of(16, behind=bound) == wave_of(16, behind=4 * bound)


def test_the_horizon_grows_faster_than_work_that_is_plenty() -> None:
    """S = 24: up to 66 waves' worth, waves grow with the root of the work; then with the work."""
    plenty = int(PLENTY * 24)
    assert wave_of(plenty) / wave_of(plenty // 2) == pytest.approx(math.sqrt(2), rel=0.01)
    assert wave_of(plenty * 4 // 3) / wave_of(plenty) == pytest.approx(4 / 3, rel=0.01)


@pytest.mark.parametrize("count", [8, 9, 12])
def test_requests_that_come_back_have_time_to_be_admitted(count: int) -> None:
    """However long the horizon: their waves fill all stages and a bit more, in equal parts."""
    work = PipelineWork(seconds=float(count), requests=count, spread=1e-6)
    waves = count / best_wave_work(work, constant_s=0.1, num_stages=8)
    assert MARGIN * (1 / count + 7 / waves) == pytest.approx(1.0)


def test_the_slowest_stage_decides() -> None:
    """The last stage's context costs rule the cuts of a deep prompt."""
    flat = StageCosts(c0=0.001, c1=1e-5, c2=0.0)
    mixed = BalancedSizing(goals(num_stages=2, b_min=64), [flat, STEEP])
    steep = BalancedSizing(goals(num_stages=2, b_min=64), [STEEP, STEEP])
    tokens = 40_000
    assert waves_of_one(mixed, tokens) == waves_of_one(steep, tokens)


def test_timings_reach_the_model_by_wave_number() -> None:
    sizing = BalancedSizing(goals(num_stages=2))
    cut = pack_wave(
        pieces(100),
        TimeRoom(TOKENS, seconds=1e9, tokens_max=M, tokens_min=1),
        sizing.size(Demand(pieces=pieces(100))).rules,
    ).cuts
    sizing.decided(WaveNumber(1), cut)
    sizing.timed(WaveNumber(7), [1.0, 1.0])  # not one of ours
    assert sizing.model.costs == (None, None)
    sizing.timed(WaveNumber(1), [1.0, 2.0])
    first, second = sizing.model.costs
    assert first is not None
    assert second is not None
    load = WaveLoad.of(cut)
    assert first.seconds(load) == pytest.approx(1.0, rel=1e-3)
    assert second.seconds(load) == pytest.approx(2.0, rel=1e-3)


def test_work_in_the_ring_counts_as_long_as_it_is_there() -> None:
    """The same request is cut less finely beside 15 others in flight than alone."""

    def first_cut(in_flight: int) -> int:
        sizing = BalancedSizing(goals(b_min=64), [STEEP] * 8)
        others = tuple(piece(f"r{index}", 4096) for index in range(in_flight))
        chunks = tuple(Chunk(request_id=other.request_id, start=0, length=4096) for other in others)
        work = (piece("a", 4096),)
        demand = Demand(pieces=work, chunks=chunks, ring_waves=in_flight)
        return sizing.size(demand).room.tokens_for(work[0])

    assert first_cut(15) > first_cut(4) > first_cut(0)


def test_the_smallest_share_of_time_is_a_whole_block() -> None:
    """A budget of less than a block would cut inside one, which no other request could reuse."""
    work = pieces(6 * B, 3 * B + 1)
    size = BalancedSizing(goals(b_min=B)).size(Demand(pieces=work))
    cuts = pack_wave(work, size.room, size.rules).cuts
    assert all(cut.final or (cut.start + cut.length) % B == 0 for cut in cuts), cuts
