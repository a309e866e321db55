"""`wavepp trace` on the trace of a real run: summary, story, Perfetto, and wrong usage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WAVEPP = [sys.executable, "-m", "wavepp.cli"]


def wavepp(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*WAVEPP, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """The trace that `run-batch --trace` wrote of three prompts with a shared prefix."""
    folder = tmp_path_factory.mktemp("traced")
    path, lines = folder / "trace.jsonl", folder / "in.jsonl"
    shared = list(range(10, 74))
    prompts = [{"prompt_token_ids": [*shared, last]} for last in (5, 6, 7)]
    lines.write_text("".join(json.dumps(line) + "\n" for line in prompts))
    flags = ["-pp", "2", "--transport", "local", "--block-size", "16", "--threads-per-stage", "1"]
    done = wavepp(
        "run-batch", "-i", lines, "-o", folder / "out.jsonl", "--model", tiny_llama,
        *flags, "--trace", path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return path


def test_summary_counts_requests_waves_and_reuse(traced: Path) -> None:
    done = wavepp("trace", traced)
    assert done.returncode == 0, done.stderr
    rows = {" ".join(line.split()) for line in done.stdout.splitlines()}
    assert "requests 3 (3 length)" in rows
    assert "prompt tokens served 195" in rows
    assert "stages 2" in rows
    effects = [
        effect
        for line in traced.read_text().splitlines()
        if (record := json.loads(line))["kind"] == "effects"
        for effect in record["value"]
    ]
    results = [effect["result"] for effect in effects if effect["type"] == "Finish"]
    reused = sum(result["num_cached_tokens"] for result in results)
    waves = sum(effect["type"] == "LaunchWave" for effect in effects)
    assert f"of them reused {reused} ({reused / 195:.1%})" in rows
    assert any(row.startswith(f"waves {waves} (") for row in rows)
    assert "slowest requests" in rows


def test_story_of_one_request(traced: Path) -> None:
    first = json.loads(traced.read_text().splitlines()[0])["value"]["arrival"]["user_id"]
    done = wavepp("trace", traced, "--request", first)
    assert done.returncode == 0, done.stderr
    assert f"{first}#1: length after" in done.stdout
    for step in ("arrived: 65 tokens", "announced in round 1", "claimed in round", "freed"):
        assert step in done.stdout
    assert "slowest" not in done.stdout


def test_perfetto_file_is_a_chrome_trace(traced: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = wavepp("trace", traced, "--perfetto", out)
    assert done.returncode == 0, done.stderr
    assert "ui.perfetto.dev" in done.stderr
    events = json.loads(out.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "b", "e"}


def test_cut_trace_is_told(traced: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl"
    cut.write_text(traced.read_text()[:-100])
    done = wavepp("trace", cut)
    assert done.returncode == 0
    assert "the last line is incomplete and was left out" in done.stderr


def test_mistakes_end_in_one_line(traced: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"t": 1}\n')
    cases = {
        "No such file": [tmp_path / "none"],
        "line 1 is no record of a trace": [bad],
        "request 'nobody' is not among the 3 of": [traced, "--request", "nobody"],
        "perfetto": [traced, "--perfetto", tmp_path / "no" / "out.json"],
        "is the trace itself": [traced, "--perfetto", traced],
    }
    for message, words in cases.items():
        done = wavepp("trace", *words)
        assert done.returncode == 2, message
        assert message in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
        assert "Traceback" not in done.stderr
