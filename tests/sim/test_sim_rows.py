"""Faults that users of other engines met, as scenarios on the whole pipeline, named after their
rows. Every scenario ends with all checkers content: equal logs, everything given back, answers that
are the prompts' own.
"""

from __future__ import annotations

import random

import pytest
from sim_dsl import PHASES, Scenario, attention, distinct, hybrid, recurrent

from wavepp.cache.reclaim import discard
from wavepp.protocol.agreement import Agreement
from wavepp.protocol.states import Phase
from wavepp.sim.options import Faults
from wavepp.sim.stage import SimStage


@pytest.mark.parametrize("chunk", range(4))
def test_a1_an_abort_storm_on_a_shared_prefix_ends(chunk: int) -> None:
    """P = 4, pool 32: 16 requests `T(28)|T(4)`, each aborted at a random time, slow links."""
    shared = distinct(28, 0)
    for seed in range(10 * chunk, 10 * chunk + 10):
        rng = random.Random(seed)
        scenario = Scenario(*[attention(32)] * 4, seed=seed, round_delay_s=2.5e-3,
                            faults=Faults(interleave=0.2), calm_s=1.0)  # fmt: skip
        for number in range(16):
            name = f"r{number}"
            scenario.ask(name, shared + distinct(4, 1000 + 10 * number),
                         at=rng.uniform(0, 0.02))  # fmt: skip
            scenario.cancel(name, at=rng.uniform(0, 0.08))
        scenario.run()


@pytest.mark.parametrize("agreement", ["set", "stepwise"])
def test_a4_the_endpoint_is_the_all_stage_minimum(agreement: Agreement) -> None:
    tokens = distinct(24, 0)
    scenario = Scenario(*[attention(16)] * 3, agreement=agreement)
    for stage, blocks in enumerate((3, 5, 2)):
        scenario.warm(stage, tokens[: 4 * blocks])
    scenario.ask("a", tokens)
    assert scenario.run().cached("a") == 8


def test_a6_an_abort_that_comes_before_the_tokens_leaves_no_zombie() -> None:
    """The wave plane is fast, the round plane slow: the ending overtakes the announcement."""
    scenario = Scenario(*[attention(16)] * 3, round_delay_s=0.05)
    scenario.ask("busy", distinct(40, 500))
    scenario.ask("a", distinct(12, 0), at=0.12)
    scenario.cancel("a", at=0.1201)
    assert scenario.run().reason("a") == "abort"


@pytest.mark.parametrize("phase", PHASES)
def test_a7_c8_an_abort_in_each_phase_is_an_abort_and_leaves_nothing(phase: Phase) -> None:
    lanes = 1 if phase is Phase.READY else 4  # with a free lane nobody stays ready
    scenario = Scenario(*[attention(12)] * 2, ring_depth=1, wave_tokens_max=4, max_num_seqs=lanes)
    scenario.ask("before", distinct(16, 500))
    scenario.ask("a", distinct(24, 0), cancel_in=phase)
    scenario.ask("behind", distinct(9, 900))
    scenario.run()
    assert scenario.reason("a") == "abort"
    assert scenario.faults(f"cancel, {phase.value}") == 1
    assert (scenario.reason("before"), scenario.reason("behind")) == ("length", "length")


def test_a9_late_votes_and_a_name_used_again_are_no_trouble() -> None:
    faults = Faults(late=1.0)
    scenario = Scenario(*[attention(8)] * 3, faults=faults, calm_s=1.0)
    scenario.ask("a", distinct(20, 0), cancel_s=0.006)
    scenario.ask("b", distinct(20, 300))
    scenario.ask("a", distinct(12, 600), at=0.05)
    scenario.run()
    assert scenario.faults("late answer") > 5
    assert (scenario.reason("a"), scenario.reason("b")) == ("length", "length")


def test_a14_the_same_prompt_at_once_after_its_answer_hits_all_but_the_last_block() -> None:
    tokens = distinct(22, 0)
    scenario = Scenario(*[attention(16)] * 4)
    scenario.ask("a", tokens)
    scenario.ask("again", tokens, at=1.0)
    scenario.run()
    assert (scenario.cached("a"), scenario.cached("again")) == (0, 20)


def test_a15_a_prefix_lost_on_one_stage_after_the_hint_lowers_the_endpoint() -> None:
    tokens = distinct(24, 0)
    scenario = Scenario(*[attention(16)] * 3)
    for stage in range(3):
        scenario.warm(stage, tokens)

    def lose(stage: SimStage) -> None:
        if stage.index == 1:
            stage.control.reset()

    scenario.before_claims(lose)
    scenario.ask("a", tokens)
    scenario.run()
    assert scenario.cached("a") == 0
    assert scenario.world.driver.leader.books.tally.retries == 1


@pytest.mark.parametrize("pools", [(8, 8), (32, 8), (8, 32)])
def test_b1_a_request_larger_than_the_pool_of_one_stage_stops_nobody(
    pools: tuple[int, int],
) -> None:
    scenario = Scenario(*[attention(units) for units in pools])
    scenario.ask("large", distinct(36, 0))
    scenario.ask("small", distinct(4, 100))
    scenario.run()
    assert scenario.reason("large") == "refused on arrival: larger_than_pool"
    assert scenario.reason("small") == "length"


def test_b1_a_request_that_fits_by_the_stages_word_alone_is_refused_with_both_numbers() -> None:
    scenario = Scenario(attention(32), attention(8, told={"attn": 32}))
    scenario.ask("large", distinct(36, 0))
    scenario.ask("small", distinct(4, 100))
    scenario.run()
    assert scenario.reason("small") == "length"
    error = scenario.world.results["large"].error
    assert error == "stage 1 can't hold it: 9 units of attn are needed, 8 are there"


def test_b2_two_that_fit_only_one_at_a_time_both_finish() -> None:
    first, second = distinct(8, 0), distinct(8, 500)
    scenario = Scenario(*[attention(8)] * 2)
    for stage in range(2):
        scenario.warm(stage, first)
        scenario.warm(stage, second)
    scenario.ask("a", first + distinct(12, 1000))
    scenario.ask("b", second + distinct(12, 2000))
    scenario.run()
    assert scenario.order("a", "b") == ["a", "b"]
    assert scenario.cached("a") == 8


@pytest.mark.parametrize("stages", [(attention(7),) * 2, (hybrid(7, 2),) * 2])
def test_b3_the_tail_block_and_the_working_slot_are_reserved(stages: tuple) -> None:
    scenario = Scenario(*stages, max_num_seqs=2)
    scenario.ask("a", distinct(16, 0), max_tokens=3)
    scenario.ask("b", distinct(12, 500), max_tokens=3)
    scenario.run()
    assert (scenario.reason("a"), scenario.reason("b")) == ("length", "length")


def test_b11_two_oversized_requests_go_one_by_one_and_small_ones_do_not_starve_them() -> None:
    scenario = Scenario(*[attention(16)] * 2, headroom_tokens=16, max_num_seqs=4)
    for number in range(12):
        scenario.ask(f"small {number}", distinct(8, 20 * number), at=0.002 * number)
    scenario.ask("first", distinct(60, 1000), at=0.003)
    scenario.ask("second", distinct(60, 2000), at=0.003)
    scenario.run()
    late = [f"small {number}" for number in range(4, 12)]
    assert scenario.order("first", "second", *late)[:2] == ["first", "second"]


@pytest.mark.parametrize("seed", range(6))
def test_b12_prefixes_that_fill_the_pool_do_not_deadlock(seed: int) -> None:
    first, second = distinct(12, 0), distinct(12, 500)
    scenario = Scenario(*[attention(6)] * 3, seed=seed)
    for stage in range(3):
        scenario.warm(stage, first)
        scenario.warm(stage, second)
    scenario.ask("a", first + distinct(12, 1000))
    scenario.ask("b", second + distinct(12, 2000))
    scenario.run()
    assert (scenario.reason("a"), scenario.reason("b")) == ("length", "length")


def test_c1_an_abort_while_the_last_wave_runs_is_an_abort() -> None:
    scenario = Scenario(*[attention(8)] * 4)
    scenario.ask("a", distinct(12, 0), cancel_in=Phase.COMPLETING)
    scenario.run()
    assert scenario.reason("a") == "abort"
    assert scenario.world.results["a"].token_ids == ()


@pytest.mark.parametrize("cancel_s", [0.004 + 0.0005 * step for step in range(12)])
def test_c3_c7_blocks_of_an_aborted_request_are_not_used_while_its_waves_write(
    cancel_s: float,
) -> None:
    """Every block of b was a's; a is given up with three chunks in flight."""
    scenario = Scenario(*[attention(6)] * 4, wave_tokens_max=8, ring_depth=8)
    scenario.ask("a", distinct(24, 0), cancel_s=cancel_s)
    scenario.ask("b", distinct(24, 500), at=0.001)
    scenario.run()
    assert scenario.reason("b") == "length"


def test_c9_what_an_aborted_request_had_finished_is_reused_rightly() -> None:
    tokens = distinct(32, 0)
    scenario = Scenario(*[attention(16)] * 2, wave_tokens_max=8, ring_depth=1)
    scenario.ask("a", tokens, cancel_s=0.0062)
    scenario.ask("b", tokens[:16] + distinct(8, 500), at=1.0)
    scenario.run()
    assert scenario.reason("a") == "abort"
    assert 0 < scenario.cached("b") <= 16


def test_c13_an_escrow_refused_on_one_stage_leaves_no_snapshot_pinned() -> None:
    tokens = distinct(16, 0)
    scenario = Scenario(hybrid(16, 6), hybrid(8, 6), max_num_seqs=2)
    for stage in range(2):
        scenario.warm(stage, tokens, snapshots=(8,))
    scenario.ask("holder", distinct(20, 500))
    scenario.ask("a", tokens[:8] + distinct(12, 900), at=0.001)
    scenario.run()
    assert scenario.world.driver.leader.books.tally.no_room > 0
    assert scenario.cached("a") in (0, 8)


def test_c14_chunks_of_one_prompt_tile_it_on_every_stage() -> None:
    scenario = Scenario(*[attention(16)] * 4, wave_tokens_max=8, ring_depth=8)
    scenario.ask("a", distinct(32, 0))
    assert scenario.run().reason("a") == "length"
    assert scenario.world.driver.ring.completed == 4


def test_d2_a_snapshot_at_the_shared_junction_gives_the_third_prompt_a_hit() -> None:
    shared = distinct(20, 0)
    scenario = Scenario(hybrid(32, 12), hybrid(32, 12), wave_tokens_max=4)
    for number in range(3):
        scenario.ask(f"r{number}", shared + distinct(12, 1000 * number + 500), at=float(number))
    scenario.run()
    assert scenario.cached("r2") >= 16


def test_d5_a_working_slot_starts_empty_for_the_next_request() -> None:
    scenario = Scenario(recurrent(4), recurrent(4), max_num_seqs=1)
    scenario.ask("a", distinct(20, 0))
    scenario.ask("b", distinct(20, 500))
    assert scenario.run().reason("b") == "length"


@pytest.mark.parametrize(
    "stages",
    [
        (recurrent(8), recurrent(8), recurrent(8), attention(16)),
        (attention(16), attention(16), recurrent(8)),
    ],
)
def test_d6_a_stage_without_a_kind_of_window_does_not_limit_the_others(stages: tuple) -> None:
    tokens = distinct(22, 0)
    scenario = Scenario(*stages, wave_tokens_max=4)
    scenario.ask("a", tokens)
    scenario.ask("again", tokens, at=1.0)
    scenario.run()
    assert scenario.cached("again") == 20


@pytest.mark.parametrize("defer", [True, False])
def test_d11_a_state_is_seen_on_a_stage_only_after_that_stage_made_it(defer: bool) -> None:
    tokens = distinct(24, 0)
    scenario = Scenario(*[hybrid(32, 8)] * 3, defer_shared_prefix=defer, wave_tokens_max=8,
                        faults=Faults(interleave=0.5), calm_s=1.0)  # fmt: skip
    for number in range(4):
        scenario.ask(f"r{number}", tokens, at=0.0012 * number)
    scenario.run()


@pytest.mark.parametrize(
    ("agreement", "retries"), [("set", 1), ("stepwise", 2)]
)  # limits 80, 64 and 80, 72, 64
def test_d12_the_paper_s_snapshots_agree_on_64(agreement: Agreement, retries: int) -> None:
    """Snapshots at 64, 72, 90 and 64, 80 (in blocks of one token); the hints were better."""
    tokens = distinct(100, 0)
    scenario = Scenario(hybrid(256, 16), hybrid(256, 16), block_size=1, agreement=agreement)
    scenario.warm(0, tokens, snapshots=(64, 72, 80, 90))
    scenario.warm(1, tokens, snapshots=(64, 80))

    def lose(stage: SimStage) -> None:
        """Stage 0 lost the snapshot at 80 since it was hinted."""
        if stage.index == 0:
            parts = stage.control.cache._parts
            asked = stage.control._asked[scenario.world.names["a"]]
            places = parts.tree.walk(asked.prompt, 80).places
            discard(parts, 1, places[1, 79:80].copy())

    scenario.before_claims(lose)
    scenario.ask("a", tokens)
    scenario.run()
    assert scenario.cached("a") == 64
    assert scenario.world.driver.leader.books.tally.retries == retries


def test_e1_keys_of_8_bits_cost_time_and_nothing_else() -> None:
    rng = random.Random(0)
    scenario = Scenario(*[attention(24, host=8)] * 2, weak_keys=True)
    family = distinct(24, 0)
    for number in range(30):
        cut = rng.randint(0, 24)
        scenario.ask(f"r{number}", family[:cut] + distinct(rng.randint(1, 20), 40 * number + 100),
                     at=0.004 * number)  # fmt: skip
    scenario.run()


def test_e2_salts_share_nothing_and_no_salt_is_the_empty_one() -> None:
    tokens = distinct(22, 0)
    scenario = Scenario(*[attention(32)] * 2)
    for number, salt in enumerate(("a", "b", "", "", "a")):
        scenario.ask(f"r{number}", tokens, salt=salt, at=float(number))
    scenario.run()
    assert [scenario.cached(f"r{number}") for number in range(5)] == [0, 0, 0, 20, 20]


def test_e3_e4_a_full_hit_leaves_a_token_and_is_counted_after_the_cap() -> None:
    scenario = Scenario(*[attention(16)] * 2)
    for number in range(2):
        scenario.ask(f"even {number}", distinct(8, 0), at=float(number))
        scenario.ask(f"one {number}", distinct(1, 500), at=float(number))
    scenario.run()
    assert (scenario.cached("even 1"), scenario.cached("one 1")) == (4, 0)


def test_host_tier_that_is_full_never_blocks_admission() -> None:
    scenario = Scenario(*[attention(8, host=2)] * 2)
    for number in range(8):
        scenario.ask(f"r{number}", distinct(24, 30 * number), at=0.5 * number)
    scenario.ask("again", distinct(24, 210), at=5.0)
    scenario.run()
    assert scenario.cached("again") > 0
    assert scenario.cache(0).stats().offloaded > 0


def test_a_stage_that_dies_costs_time_and_no_answers() -> None:
    scenario = Scenario(*[attention(16)] * 3, death_s=0.006)
    for number in range(6):
        scenario.ask(f"r{number}", distinct(20, 30 * number), at=0.001 * number)
    scenario.run()
    assert scenario.world.epoch == 2
    assert [scenario.reason(f"r{number}") for number in range(6)] == ["length"] * 6
