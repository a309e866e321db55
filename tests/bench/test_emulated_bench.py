"""Benchmarks on emulated devices: loads of every kind, where the time went, figures, plans."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from wavepp.bench.throughput import Plan, measure
from wavepp.config import EngineConfig
from wavepp.errors import ConfigError

WAVEPP = [sys.executable, "-m", "wavepp.cli"]
EXAMPLE = Path(__file__).parents[2] / "examples" / "trace.jsonl"
EMULATED = "--device emulated --cost-model uniform --transport local --block-size 16 "


def config(**options: Any) -> EngineConfig:
    named: dict[str, Any] = {
        "device": "emulated",
        "cost_model": "uniform",
        "transport": "local",
        "block_size": 16,
        "pipeline_parallel_size": 2,
        "max_num_batched_tokens": 256,
        "time_scale": 0.05,
        **options,
    }
    return EngineConfig(**named)


def plan(**changes: Any) -> Plan:
    words: dict[str, Any] = {
        "workloads": "cold",
        "concurrency": "4",
        "prompt_len": 640,
        "requests": 8,
        "repeats": 1,
        "reuse_frac": 0.9,
        "num_prefixes": 2,
        "baseline": None,
        "seed": 0,
    }
    return Plan.parse(**{**words, **changes})


def command(words: str, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*WAVEPP, *words.split(), *more],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )


async def test_busy_time_and_gaps_are_the_whole_time() -> None:
    """On a run long enough that the readings before and after it do not count."""
    report = await measure(config(time_scale=1.0), plan(prompt_len=2560, requests=12))
    (row,) = report["rows"]
    assert set(row["gaps"]) == {"no_wave", "activation", "materialize", "sending"}
    assert row["accounted"] == pytest.approx([1.0, 1.0], abs=0.02)
    assert report["meta"]["emulated"] is True


async def test_reused_prefixes_are_good_hits_at_any_load() -> None:
    closed = await measure(config(), plan(workloads="reuse"))
    arriving = await measure(config(), plan(workloads="reuse", request_rate="20,40"))
    rows = closed["rows"] + arriving["rows"]
    assert [row["concurrency"] for row in rows] == [4, 0, 0]
    assert [row.get("request_rate") for row in rows] == [None, 20, 40]
    assert [row["good_hit_rate"] for row in rows] == [1.0, 1.0, 1.0]
    assert all(row["cached_frac"] == pytest.approx(0.9) for row in rows)


@pytest.mark.parametrize("time_scale", [0.001, 0.05, 1.0])
async def test_storm_aborts_some_however_fast_the_device(time_scale: float) -> None:
    """An engine that is done before a timer goes off has its share of aborts too."""
    wanted = plan(workloads="storm", requests=24, concurrency="6")
    report = await measure(config(time_scale=time_scale), wanted)
    (row,) = report["rows"]
    assert 0 < row["aborted"] < 24
    assert row["input_tok_s"] > 0


async def test_more_clients_than_requests_are_no_more_than_those() -> None:
    report = await measure(config(), plan(concurrency="999999999", requests=2))
    assert report["rows"][0]["requests"] == 2


async def test_trace_runs_as_recorded() -> None:
    wanted = plan(workloads="trace", trace=EXAMPLE, trace_scale=400.0, requests=40)
    report = await measure(config(max_num_batched_tokens=4096, time_scale=0.2), wanted)
    (row,) = report["rows"]
    assert (row["requests"], row["prompt_len"], row["trace_scale"]) == (40, 0, 400.0)
    assert 0 < row["cached_frac"] < 1
    assert row["good_hit_rate"] is not None


def test_plan_names_what_excludes_what() -> None:
    with pytest.raises(ConfigError, match="go together"):
        plan(workloads="trace")
    with pytest.raises(ConfigError, match="go together"):
        plan(trace=EXAMPLE)
    with pytest.raises(ConfigError, match="request_rate '1,x'"):
        plan(request_rate="1,x")
    with pytest.raises(ConfigError, match="storm is a closed loop"):
        plan(workloads="storm", request_rate="1")


def test_command_draws_figures_and_says_emulated(tmp_path: Path) -> None:
    assert importlib.util.find_spec("matplotlib") is not None
    out, figure = tmp_path / "out.json", tmp_path / "out.png"
    flags = "-pp 2 --time-scale 0.02 --prompt-len 400 --concurrency 1,2 --requests 4 --repeats 2 "
    files = ("--json", str(out), "--plot", str(figure))
    done = command(f"bench throughput {EMULATED}{flags}", *files)
    assert done.returncode == 0, done.stderr
    assert "emulated: uniform" in done.stdout
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert [row["concurrency"] for row in json.loads(out.read_text())["rows"]] == [1, 2]


def test_plan_command_gives_layers_and_reasons(tmp_path: Path) -> None:
    words = "plan --device emulated --cost-model b300-kimi-k3 -pp 8 --max-num-batched-tokens 16384"
    done = command(words)
    assert done.returncode == 0, done.stderr
    assert "--layer-partition 12,12,12,12,12,12,12,9" in done.stdout
    assert "Cold prompts of 131,072 tokens: 36,8" in done.stdout


def test_profile_of_this_machine_is_a_cost_model(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "here.yaml"
    words = "plan -pp 2 --max-num-batched-tokens 128 --block-size 16 --model"
    done = command(words, str(tiny_llama), "--profile", str(file))
    assert done.returncode == 0, done.stderr
    assert "device emulated" in done.stdout
    run = command(
        f"bench throughput --device emulated --cost-model {file} --transport local -pp 2 "
        "--block-size 16 --prompt-len 200 --concurrency 2 --requests 4 --repeats 1"
    )
    assert run.returncode == 0, run.stderr
