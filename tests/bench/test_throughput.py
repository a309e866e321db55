"""The throughput benchmark on a real engine, through the command and in process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from wavepp.bench.closed_loop import run_closed_loop
from wavepp.bench.throughput import Plan, measure
from wavepp.config import EngineConfig
from wavepp.engine import Engine
from wavepp.errors import ConfigError, RequestError

WAVEPP = [sys.executable, "-m", "wavepp.cli", "bench"]
ROW_FIELDS = {
    "workload",
    "concurrency",
    "requests",
    "repeats",
    "prompt_len",
    "input_tok_s",
    "input_tok_s_min",
    "input_tok_s_max",
    "computed_tok_s",
    "p50_s",
    "p95_s",
    "cached_frac",
    "stage_busy",
    "gaps",
    "waves",
    "rounds",
    "admission_ms_p50",
    "foreign_cores",
    "accounted",
    "expected_frac",
    "good_hit_rate",
    "aborted",
    "capacity_refusals",
    "rolled_back",
    "driver_cores",
    "stage_cores",
    "driver_bound",
}


def config(folder: Path) -> EngineConfig:
    return EngineConfig(
        model=folder, transport="local", pipeline_parallel_size=2, threads_per_stage=1
    )


def plan(**changes: object) -> Plan:
    words = {
        "workloads": "cold",
        "concurrency": "2",
        "prompt_len": 40,
        "requests": 3,
        "repeats": 1,
        "reuse_frac": 0.9,
        "num_prefixes": 2,
        "baseline": None,
        "seed": 0,
    }
    return Plan.parse(**{**words, **changes})  # type: ignore[arg-type]


def test_command_writes_rows_and_compares_them(tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = "--transport local -pp 2 --prompt-len 96 --workload cold,mixed --concurrency 1,3 "
    flags += "--requests 4 --repeats 2 --baseline transformers --block-size 16"
    done = subprocess.run(
        [*WAVEPP, "throughput", "--model", str(tiny_llama), *flags.split(), "--json", str(out)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "throughput (input tokens/s)" in done.stdout
    report = json.loads(out.read_text())
    cells = [(row["workload"], row["concurrency"]) for row in report["rows"]]
    assert cells == [("cold", 1), ("cold", 3), ("mixed", 1), ("mixed", 3)]
    for row in report["rows"]:
        assert set(row) == ROW_FIELDS | {"baseline"}
        assert row["baseline"]["name"] == "transformers"
        assert row["baseline"]["ratio"] == pytest.approx(
            row["input_tok_s"] / row["baseline"]["input_tok_s"]
        )
        assert len(row["stage_busy"]) == 2
        assert all(0 < share <= 1.01 for share in row["stage_busy"])
        assert row["input_tok_s_min"] <= row["input_tok_s"] <= row["input_tok_s_max"]
        assert (row["requests"], row["repeats"], row["prompt_len"]) == (4, 2, 96)
    assert report["meta"]["config"]["pipeline_parallel_size"] == 2
    assert report["meta"]["stages"] == [[0, 4], [4, 8]]
    compared = subprocess.run(
        [*WAVEPP, "compare", str(out), str(out)], capture_output=True, text=True, check=False
    )
    assert compared.returncode == 0
    assert "geometric mean 1.000, wins 0 of 4" in compared.stdout


async def test_requests_are_at_least_the_concurrency(tiny_llama: Path) -> None:
    report = await measure(config(tiny_llama), plan(requests=None, concurrency="1,10"))
    assert [row["requests"] for row in report["rows"]] == [8, 10]


async def test_prompt_that_is_too_long_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="prompt_len 5000 exceeds max_model_len 4096"):
        await measure(config(tiny_llama), plan(prompt_len=5000))


async def test_closed_loop_keeps_its_clients_and_its_order(tiny_llama: Path) -> None:
    async with Engine(config(tiny_llama)) as engine:
        most = 0
        submit = engine.submit
        live = 0

        async def counting(request):  # type: ignore[no-untyped-def]
            nonlocal most, live
            live += 1
            most = max(most, live)
            await asyncio.sleep(0)
            try:
                return await submit(request)
            finally:
                live -= 1

        engine.submit = counting  # type: ignore[method-assign]
        run = await run_closed_loop(engine, [[5] * n for n in range(1, 20)], 4)
    assert most == 4
    assert [result.num_prompt_tokens for result in run.results] == list(range(1, 20))
    assert run.input_tokens == sum(range(1, 20))
    assert all(0 < seconds <= run.wall_s for seconds in run.completions_s)


async def test_closed_loop_stops_at_the_first_refusal(tiny_llama: Path) -> None:
    async with Engine(config(tiny_llama)) as engine:
        with pytest.raises(RequestError, match="outside the vocabulary"):
            await run_closed_loop(engine, [[5], [9999], [5]], 2)


def test_plan_names_what_it_cannot_read() -> None:
    with pytest.raises(ConfigError, match="concurrency '1,x'"):
        plan(concurrency="1,x")
    with pytest.raises(ConfigError, match="baseline 'other' is not one of transformers"):
        plan(baseline="other")
