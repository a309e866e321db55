"""`wavepp run-batch` as a process: files, pipes, kills, interrupts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

WAVEPP = [sys.executable, "-m", "wavepp.cli", "run-batch"]
ENV = {**os.environ, "HF_HUB_OFFLINE": "1"}


def flags(model: Path, *more: str) -> list[str]:
    return ["--model", str(model), "--transport", "local", "--threads-per-stage", "1", *more]


def run(*arguments: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*WAVEPP, *arguments], input=stdin, capture_output=True, timeout=200, check=False, env=ENV
    )


def start(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*WAVEPP, *arguments], stderr=subprocess.PIPE, stdin=subprocess.PIPE, env=ENV, **options
    )


@pytest.fixture
def long_input(tmp_path: Path) -> Path:
    """Enough work to be stopped in the middle of it."""
    path = tmp_path / "in.jsonl"
    lines = [
        {"custom_id": f"c{n}", "method": "POST", "url": "/v1/completions", "body": {"prompt": p}}
        for n, p in ((n, [5 + n % 500] * (30 + n % 50)) for n in range(150))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def wait_for_lines(path: Path, count: int) -> None:
    deadline = time.monotonic() + 100
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline, "no answers came"
        time.sleep(0.002)


def test_file_to_file_with_a_summary(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\noops\n')
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    (tmp_path / "out.jsonl").write_text("what an earlier run left\n" * 100)
    done = run(*files, *flags(tiny_llama, "-pp", "2"))
    assert (done.returncode, done.stdout) == (0, b"")
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [answer["response"]["status_code"] for answer in answers] == [200, 400]
    summary = done.stderr.decode()
    for words in ("requests", "errors", "input tokens/s", "hit rate", "stage 1 busy (layers"):
        assert words in summary


def test_pipes_carry_answers_and_nothing_else(tiny_llama: Path) -> None:
    done = run("-i", "-", "-o", "-", *flags(tiny_llama), stdin=b'{"prompt": "a"}\n[]\n')
    assert done.returncode == 0
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["response"]["status_code"] for answer in answers] == [200, 400]


def test_pipe_is_answered_before_it_ends(tiny_llama: Path) -> None:
    with start("-i", "-", "-o", "-", *flags(tiny_llama), stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(2):
            process.stdin.write(b'{"prompt": "a"}\n')
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["error"] is None
        process.send_signal(signal.SIGINT)  # while nobody writes
        assert process.wait(timeout=60) == 130


def test_killed_run_is_resumed_to_the_same_file(
    tiny_llama: Path, tmp_path: Path, long_input: Path
) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    options = flags(tiny_llama, "--max-num-batched-tokens", "32", "--block-size", "16")
    assert run("-i", str(long_input), "-o", str(whole), *options).returncode == 0
    for seen in (1, 60):
        with start("-i", str(long_input), "-o", str(cut), *options, "--resume") as process:
            wait_for_lines(cut, seen)
            process.kill()
            assert process.wait() == -signal.SIGKILL
        assert seen <= cut.read_bytes().count(b"\n") < 150
    before = cut.read_bytes()
    kept = before[: before.rfind(b"\n") + 1]
    done = run("-i", str(long_input), "-o", str(cut), *options, "--resume")
    assert done.returncode == 0
    assert f"{kept.count(bytes([10]))}" in done.stderr.decode()
    assert cut.read_bytes().startswith(kept)
    check_same(whole, cut)
    again = run("-i", str(long_input), "-o", str(cut), *options, "--resume")
    assert again.returncode == 0
    check_same(whole, cut)


def check_same(first: Path, second: Path) -> None:
    """Equal lines; the numbers of log probabilities aside, none are asked for here."""
    assert first.read_text().splitlines() == second.read_text().splitlines()


@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)]
)
def test_stopped_run_ends_in_order_and_can_be_resumed(
    tiny_llama: Path, tmp_path: Path, long_input: Path, sent: signal.Signals, status: int
) -> None:
    out = tmp_path / "out.jsonl"
    options = flags(tiny_llama, "--max-num-batched-tokens", "32", "--block-size", "16")
    with start("-i", str(long_input), "-o", str(out), *options) as process:
        wait_for_lines(out, 5)
        process.send_signal(sent)
        _, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert err.decode().endswith("wavepp: interrupted\n")
    assert "Traceback" not in err.decode()
    kept = out.read_bytes()
    assert kept.endswith(b"\n")
    assert run("-i", str(long_input), "-o", str(out), *options, "--resume").returncode == 0
    assert out.read_bytes().startswith(kept)
    assert out.read_bytes().count(b"\n") == 150


def test_output_survives_an_engine_that_cannot_start(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    out = tmp_path / "out.jsonl"
    out.write_text("precious\n")
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(out)]
    done = run(*files, *flags(tiny_llama, "-pp", "2", "--layer-partition", "1,1"))
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)
    assert out.read_text() == "precious\n"


def test_nobody_reads_the_pipe(tiny_llama: Path, long_input: Path) -> None:
    command = [*WAVEPP, "-i", str(long_input), "-o", "-", *flags(tiny_llama)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        err = process.stderr.read().decode()
        assert process.wait(timeout=100) == 1
    assert err.endswith("wavepp: output -: Broken pipe\n")
    assert "Traceback" not in err
