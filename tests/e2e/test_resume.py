"""A batch that is killed half way and taken up again ends as one that was left alone."""

from __future__ import annotations

import random
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from e2e_commands import (
    BIN,
    clean_environment,
    make_tiny,
    processes_with,
    read_jsonl,
    run,
    same_answers,
    wait_until,
    write_jsonl,
)

LINES = 160
HALF = LINES // 2


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command but for its output: mixed lengths, short waves, so that it lasts a while."""
    folder = tmp_path_factory.mktemp("resume")
    dice = random.Random(7)
    lines = [
        {
            "custom_id": f"line-{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "prompt": [dice.randrange(3, 500) for _ in range(dice.randint(100, 300))],
                "max_tokens": 1,
                "logprobs": 1,
            },
        }
        for i in range(LINES)
    ]
    source = write_jsonl(folder / "in.jsonl", lines)
    model = make_tiny(folder / "tiny", "qwen3")
    command = [str(BIN / "wavepp"), "run-batch", "-i", str(source), "--model", str(model)]
    return [*command, "-pp", "2", "--dtype", "float32", "--max-num-batched-tokens", "64"]


@pytest.fixture(scope="module")
def left_alone(batch: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The answers when nobody disturbs it, without Ray."""
    whole = tmp_path_factory.mktemp("whole") / "whole.jsonl"
    done = run([*batch, "--transport", "local", "-o", str(whole)])
    assert done.returncode == 0, done.stderr
    return read_jsonl(whole)


def finished(path: Path) -> int:
    """Whole lines in an output file."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("transport", ["local", pytest.param("ray", marks=pytest.mark.ray)])
@pytest.mark.timeout(600)
def test_killed_batch_resumes_to_the_same_answers(
    batch: list[str], left_alone: list[Any], transport: str, tmp_path: Path
) -> None:
    command = [*batch, "--transport", transport]
    killed = tmp_path / "killed.jsonl"
    mark = f"mark-of-{tmp_path.name}-{transport}"
    with subprocess.Popen(
        [*command, "-o", str(killed)],
        env=clean_environment(WAVEPP_TEST_MARK=mark),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert wait_until(lambda: finished(killed) >= HALF, seconds=200)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    before = killed.read_bytes()
    kept = before[: before.rfind(b"\n") + 1]
    assert HALF <= kept.count(b"\n") < LINES, "killed too late: make the batch longer"

    resumed = run([*command, "-o", str(killed), "--resume"])
    assert resumed.returncode == 0, resumed.stderr
    assert killed.read_bytes().startswith(kept)
    assert same_answers(read_jsonl(killed), left_alone)
    # Nobody could tidy up after the killed one; its Ray notices and ends by itself.
    assert wait_until(lambda: processes_with(mark) == [], seconds=60), processes_with(mark)
