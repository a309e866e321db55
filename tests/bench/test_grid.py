"""Planners under the virtual clock: rows that repeat, add up, and say what the cost model says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from wavepp.bench.closed_loop import Ask
from wavepp.bench.grid import GridPlan, measure, run
from wavepp.bench.grid_table import ratios, summary_lines, write_section
from wavepp.bench.report import make_row
from wavepp.bench.virtual import ABSENT, WAVE_DELAY_S, VirtualEngine, stage_models
from wavepp.config import EngineConfig
from wavepp.errors import ConfigError
from wavepp.planner.wave_time import WaveLoad, span_context

TRACE = Path(__file__).parents[2] / "examples" / "trace.jsonl"


def config(**options: Any) -> EngineConfig:
    named: dict[str, Any] = {
        "device": "emulated",
        "cost_model": "h200-dense-8b",
        "pipeline_parallel_size": 2,
        "max_num_batched_tokens": 256,
        **options,
    }
    return EngineConfig(**named)


def engine(**options: Any) -> VirtualEngine:
    made = config(**options)
    return VirtualEngine(made, stage_models(made))


def plan(**changes: Any) -> GridPlan:
    words: dict[str, Any] = {
        "planners": "static,mpu,balanced",
        "cells": "mixed:640",
        "concurrency": "2",
        "load": None,
        "trace": None,
        "trace_requests": None,
        "requests": 6,
        "reuse_frac": 0.8,
        "num_prefixes": 2,
        "seed": 0,
        **changes,
    }
    return GridPlan.parse(**words)


def test_one_wave_takes_what_the_cost_model_says() -> None:
    device = engine()
    done = device.closed_loop([Ask(tokens=list(range(100)))], 1)
    load = WaveLoad(tokens=100, context=span_context(0, 100))
    models = device.models
    computing = sum(model.costs.seconds(load) for model in models) + models[-1].head_s
    busy = [after.busy_s for after in done.after.stages]
    assert sum(busy) == pytest.approx(computing)
    (timings,) = (result.timings for result in done.results)
    assert timings.first_wave_s is not None
    waves_s = timings.done_s - timings.first_wave_s
    assert computing + models[0].transfer_s(100) < waves_s
    assert waves_s < computing + models[0].transfer_s(100) + 3 * 1.8 * WAVE_DELAY_S


def test_a_run_is_the_same_every_time_and_every_moment_is_accounted_for() -> None:
    first, second = (measure(config(), plan())["rows"] for _ in range(2))
    assert first == second
    for row in first:
        assert row["accounted"] == pytest.approx([1.0, 1.0])
        assert row["good_hit_rate"] == 1.0
        assert row["cached_frac"] == 0.4  # half of the prompts, 80 % of each
        assert not set(row) & set(ABSENT)


def test_one_cold_prompt_of_eight_waves_idles_stages_for_the_fill_only() -> None:
    """P = 4, c = 1: idle at most (P-1) / (8+P-1) and 5 points, admission included."""
    device = engine(cost_model="uniform", pipeline_parallel_size=4, max_num_batched_tokens=4096)
    done = device.closed_loop([Ask(tokens=list(range(4000)) * 8)], 1)
    row = make_row({}, [done], [])
    assert 1 - min(row["stage_busy"]) <= 3 / 11 + 0.05


def test_clients_of_a_closed_loop_wait_for_no_arrival() -> None:
    tokens = list(range(100))
    device = engine()
    done = device.closed_loop([Ask(tokens=tokens, at_s=100.0), Ask(tokens=tokens, at_s=200.0)], 1)
    assert done.wall_s < 1.0


def test_arrivals_come_at_so_many_times_what_greedy_carries() -> None:
    twice = measure(config(), plan(planners="greedy", cells="cold:640", load="0.5,2", requests=12))
    slow, fast = twice["rows"]
    assert fast["request_rate"] == pytest.approx(4 * slow["request_rate"])
    assert slow["p95_s"] < fast["p95_s"]
    assert slow["input_tok_s"] < fast["input_tok_s"]


def test_a_trace_is_run_as_a_closed_loop_and_at_a_load() -> None:
    words = {"cells": "trace", "trace": TRACE, "trace_requests": 12, "planners": "greedy,tp"}
    devices = config(max_num_batched_tokens=2048)
    for load in (None, "1.2"):
        rows = measure(devices, plan(**words, load=load))["rows"]
        assert [row["planner"] for row in rows] == ["greedy", "tp"]
        assert all(row["requests"] == 12 and row["cached_frac"] > 0 for row in rows)
        assert [len(row["stage_busy"]) for row in rows] == [2, 1]


def test_recurrent_models_find_the_turns_of_a_trace_replayed_in_its_own_blocks(
    tmp_path: Path,
) -> None:
    """A prompt's state is kept at its last whole block. In smaller blocks than the recorded ones
    that lies among tokens that the next turn does not repeat.
    """
    talks = [[9, n + 1, n + 2] for n in range(100, 700, 100)]  # 9: a first block that all share
    first = [(0, 1700, [*talk, talk[-1] + 1]) for talk in talks]
    turns = [(1, 2200, [*talk, talk[-1] + 2, talk[-1] + 3]) for talk in talks]
    file = tmp_path / "talks.jsonl"
    file.write_text(
        "".join(
            json.dumps({"timestamp": at, "input_length": length, "hash_ids": blocks}) + "\n"
            for at, length, blocks in [*first, *turns]
        )
    )
    found = {}
    for block in (512, 64):
        devices = config(
            cost_model="b300-kimi-k3",
            pipeline_parallel_size=8,
            max_num_batched_tokens=2048,
            block_size=block,
        )
        words = {"cells": "trace", "trace": file, "concurrency": "6", "planners": "mpu"}
        (row,) = measure(devices, plan(**words))["rows"]
        found[block] = row["good_hit_rate"]
        assert row["expected_frac"] == pytest.approx((5 * 512 + 6 * 1536) / (6 * 3900))
    assert found[512] == 6 / 11  # the burst of first turns computes the shared block itself
    assert found[64] == 0


def test_the_report_is_written_and_told(tmp_path: Path) -> None:
    file = tmp_path / "grid.json"
    run(config(), plan(), json_file=file, command="wavepp bench grid ...")
    report = json.loads(file.read_text())
    assert report["meta"]["virtual_clock"] is True
    (ratio,) = ratios(report["rows"]).values()
    lines = summary_lines(report["rows"])
    assert f"geometric mean {ratio:.3f}, least {ratio:.3f}" in lines
    assert lines[-1].startswith("p95 on mixed 1K, c=2: ")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- grid-x: begin -->\nold\n<!-- grid-x: end -->\nafter\n")
    write_section(report, "grid-x", page)
    text = page.read_text()
    assert text.startswith("before\n<!-- grid-x: begin -->\nEmulated, virtual clock")
    assert text.endswith("<!-- grid-x: end -->\nafter\n")
    assert text.count("| mixed 1K, c=2 |") == 3
    assert "old" not in text
    with pytest.raises(ConfigError, match="needs the lines <!-- grid-y: begin -->"):
        write_section(report, "grid-y", page)


def test_prompts_longer_than_the_model_takes_are_refused_before_they_are_made() -> None:
    with pytest.raises(ConfigError, match="cell cold:99999999999999 exceeds max_model_len"):
        measure(config(), plan(cells="cold:99999999999999", requests=1))


def test_rows_of_the_ablation_bring_their_switches() -> None:
    """In a pool that holds less than the requests want at once, what is pinned is not lost."""
    short = config(block_size=16, num_gpu_blocks_override=80, lease_headroom_waves=0)
    words = {"planners": "wave,lease,escrow,mpu", "cells": "reuse:640", "concurrency": "6"}
    report = measure(short, plan(**words, requests=24))
    hits = {row["planner"]: row["good_hit_rate"] for row in report["rows"]}
    assert list(hits) == ["wave", "lease", "escrow", "mpu"]
    assert hits["wave"] < hits["lease"] <= hits["escrow"] == 1.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"planners": "static,best"}, "planner 'best' is not one of greedy, static"),
        ({"cells": "storm:64"}, "cell 'storm:64': a grid runs"),
        ({"cells": "cold"}, "cell 'cold': write it as workload:tokens"),
        ({"cells": "trace:64"}, "cell 'trace:64': write it as"),
        ({"cells": "cold:many"}, "cell 'many'"),
        ({"cells": "warm:64"}, "workload 'warm'"),
        ({"cells": "trace"}, "--trace FILE go together"),
        ({"load": "fast"}, "load 'fast'"),
        ({"load": "0"}, "load '0'"),
    ],
)
def test_words_that_name_no_grid_are_told(words: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**words)


def test_real_devices_have_no_virtual_clock() -> None:
    with pytest.raises(ConfigError, match="device cpu"):
        measure(EngineConfig(model="m"), plan())
