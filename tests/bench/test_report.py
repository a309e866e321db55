"""Rows from runs made by hand, and the comparison of two reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from wavepp.bench.closed_loop import LoopRun
from wavepp.bench.compare import compare, read_rates
from wavepp.bench.report import make_row, quantile
from wavepp.errors import ConfigError
from wavepp.requests import EngineStats, PrefillResult, RequestTimings, StageStats


def stats(
    *,
    busy_s: float,
    no_wave_s: float,
    waves: int,
    sizes: tuple[int, ...],
    idle_s: float = 0.0,
    cpu_s: float = 0.0,
) -> EngineStats:
    stage = StageStats(
        stage=0,
        layers=(0, 4),
        busy_s=busy_s,
        wait_s={"no_wave": no_wave_s, "activation": busy_s / 5},
        idle_s=idle_s,
        cpu_s=cpu_s / 2,
    )
    return EngineStats(
        requests_waiting=0,
        requests_running=0,
        requests_finished=0,
        prompt_tokens=0,
        cached_tokens=0,
        computed_tokens=0,
        waves=waves,
        ring_depth=2,
        ring_occupancy=0,
        wall_s=0.0,
        rounds=waves * 2,
        stages=(stage,),
        wave_tokens=sizes,
        driver_cpu_s=cpu_s,
    )


def run(
    wall_s: float,
    *,
    cached: int = 0,
    idle_s: float = 0.0,
    time_scale: float = 1.0,
    cpu_s: float = 0.0,
    expected: tuple[int, ...] = (),
    aborted: tuple[int, ...] = (),
) -> LoopRun:
    results = tuple(
        PrefillResult(
            request_id=str(n),
            token_ids=(1,),
            finish_reason="abort" if n in aborted else "length",
            num_prompt_tokens=50,
            num_cached_tokens=cached,
            timings=RequestTimings(queued_s=1.0, admitted_s=1.0 + n / 1000),
        )
        for n in range(3)
    )
    return LoopRun(
        wall_s=wall_s,
        completions_s=(0.3, 0.1, 0.2),
        results=results,
        before=stats(busy_s=1.0, no_wave_s=5.0, waves=10, sizes=(7, 7), idle_s=idle_s),
        after=stats(
            busy_s=1.0 + wall_s / 2,
            no_wave_s=5.1 + idle_s,
            waves=13,
            sizes=(7, 7, 50, 60, 40),
            cpu_s=cpu_s,
        ),
        time_scale=time_scale,
        expected=expected,
    )


def test_row_holds_medians_and_shares() -> None:
    row = make_row({"workload": "cold"}, [run(1.0), run(2.0), run(4.0)], [2.0, 4.0, 8.0])
    assert row["input_tok_s"] == 75.0
    assert (row["input_tok_s_min"], row["input_tok_s_max"]) == (37.5, 150.0)
    assert (row["p50_s"], row["p95_s"]) == (0.2, 0.3)
    assert (row["requests"], row["repeats"], row["rounds"]) == (3, 3, 6)
    assert row["stage_busy"] == [0.5]
    assert row["gaps"]["activation"] == [pytest.approx(0.1)]
    assert row["gaps"]["no_wave"] == [pytest.approx(0.05)]
    assert row["waves"] == {
        "count": 3,
        "tokens_min": 40,
        "tokens_p50": 50,
        "tokens_max": 60,
        "tokens_mean": 50,
    }
    assert row["admission_ms_p50"] == pytest.approx(1.0)
    assert row["baseline"]["input_tok_s"] == 37.5
    assert row["baseline"]["ratio"] == 2.0


def test_idle_time_before_a_run_is_no_gap_of_it() -> None:
    row = make_row({}, [run(1.0, idle_s=100.0)], [])
    assert row["gaps"]["no_wave"] == [pytest.approx(0.1)]
    assert row["accounted"] == [pytest.approx(0.5 + 0.1 + 0.1)]
    assert "baseline" not in row


def test_a_time_scale_turns_seconds_here_into_seconds_of_the_devices() -> None:
    row = make_row({}, [run(2.0, time_scale=0.1)], [])
    assert row["input_tok_s"] == pytest.approx(150 / 20.0)
    assert (row["p50_s"], row["p95_s"]) == pytest.approx((2.0, 3.0))
    assert row["stage_busy"] == [0.5]


def test_a_busy_driver_is_flagged() -> None:
    assert make_row({}, [run(1.0, cpu_s=0.4)], [])["driver_bound"] is False
    row = make_row({}, [run(2.0, cpu_s=1.2)], [])
    assert (row["driver_bound"], row["driver_cores"], row["stage_cores"]) == (True, 0.6, [0.3])


def test_good_hits_are_most_of_what_was_expected() -> None:
    row = make_row({}, [run(1.0, cached=40)], [])
    assert (row["good_hit_rate"], row["expected_frac"]) == (None, None)
    row = make_row({}, [run(1.0, cached=40, expected=(50, 51, 0))], [])
    assert row["good_hit_rate"] == 0.5
    assert row["expected_frac"] == pytest.approx(101 / 150)


def test_aborted_requests_count_for_nothing() -> None:
    row = make_row({}, [run(1.0, aborted=(0, 2))], [])
    assert (row["aborted"], row["input_tok_s"], row["p95_s"]) == (2, 50.0, 0.1)


def test_computed_tokens_leave_cached_ones_out() -> None:
    row = make_row({}, [run(1.0, cached=40)], [])
    assert (row["input_tok_s"], row["computed_tok_s"], row["cached_frac"]) == (150.0, 30.0, 0.8)


def test_quantile_is_the_nearest_rank() -> None:
    assert [quantile([4, 1, 3, 2], share) for share in (0.0, 0.5, 0.95, 1.0)] == [1, 3, 4, 4]


def report(path: Path, **rates: Any) -> Path:
    rows = [
        {"workload": name, "concurrency": 1, "prompt_len": 8, "input_tok_s": rate}
        for name, rate in rates.items()
    ]
    path.write_text(json.dumps({"meta": {}, "rows": rows}))
    return path


def test_comparison_of_two_reports(tmp_path: Path) -> None:
    first = read_rates(report(tmp_path / "a.json", cold=200.0, reuse=50.0, mixed=1.0))
    second = read_rates(report(tmp_path / "b.json", cold=100.0, reuse=100.0, other=1.0))
    found = compare(first, second)
    assert found.ratios == {("cold", 1, 8): 2.0, ("reuse", 1, 8): 0.5}
    assert found.geometric_mean == pytest.approx(1.0)
    assert found.wins == 1
    assert found.only_one == (("mixed", 1, 8), ("other", 1, 8))


def test_reports_that_cannot_be_compared_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no cell"):
        compare({("cold", 1, 8): 1.0}, {("cold", 2, 8): 1.0})
    (tmp_path / "x.json").write_text('{"rows": [{}]}')
    with pytest.raises(ConfigError, match=r"x\.json: not a throughput report"):
        read_rates(tmp_path / "x.json")
    (tmp_path / "y.json").write_text("not json")
    with pytest.raises(ConfigError, match="not a throughput report"):
        read_rates(tmp_path / "y.json")
    with pytest.raises(ConfigError, match="is not above 0"):
        read_rates(report(tmp_path / "z.json", cold=0.0))
