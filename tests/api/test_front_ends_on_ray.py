"""The front ends on Ray: the same answers as on the local transport, and clean ends."""

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

from wavepp import LLM, Engine, EngineConfig, RequestError
from wavepp.batch.runner import BatchRun, Tally
from wavepp.requests import EngineStats

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

LINES: list[dict[str, Any]] = [
    {"prompt": "The quick brown fox", "logprobs": 2, "prompt_logprobs": 1},
    {"prompt": [9999]},
    {"prompt": [["5"]]},
    {"prompt": [[5, 6], [7]], "max_tokens": 0},
    {"prompt": [5 + n for n in range(200)], "logprobs": 0},
]


class Silence:
    def update(self, tally: Tally, stats: EngineStats) -> None:
        pass

    def close(self) -> None:
        pass


def config(folder: Path, transport: str) -> EngineConfig:
    return EngineConfig(
        model=folder,
        transport=transport,
        pipeline_parallel_size=2,
        max_num_batched_tokens=64,
        num_cpus_per_stage=0.5,
        threads_per_stage=1,
    )


async def answers(folder: Path, transport: str, source: Path) -> list[Any]:
    target = source.with_name(f"{transport}.jsonl")
    async with Engine(config(folder, transport)) as engine:
        await BatchRun(engine.config, str(source), str(target)).run(engine, Silence())
        with pytest.raises(RequestError, match="outside the vocabulary"):
            await engine.prefill([9999])
    return [json.loads(line) for line in target.read_text().splitlines()]


@pytest.mark.usefixtures("ray_session")
async def test_batch_on_ray_equals_batch_on_local(tiny_llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    on_ray = await answers(tiny_llama, "ray", source)
    on_local = await answers(tiny_llama, "local", source)
    assert len(on_ray) == len(LINES)
    assert strip_numbers(on_ray) == strip_numbers(on_local)
    for first, second in zip(numbers(on_ray), numbers(on_local), strict=True):
        assert first == pytest.approx(second, abs=2e-5)


def strip_numbers(value: Any) -> Any:
    """The value without its floats."""
    if isinstance(value, dict):
        return {key: strip_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [strip_numbers(item) for item in value]
    return None if isinstance(value, float) else value


def numbers(value: Any) -> list[float]:
    """The floats of a value, in order."""
    if isinstance(value, dict):
        return [number for item in value.values() for number in numbers(item)]
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, float) else []


@pytest.mark.usefixtures("ray_session")
def test_llms_follow_one_another_on_ray(tiny_llama: Path) -> None:
    tokens = []
    for _ in range(2):
        with LLM(model=tiny_llama, num_cpus_per_stage=0.5, threads_per_stage=1) as llm:
            tokens.append([result.token_ids for result in llm.prefill(["a", [5, 6, 7]])])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)]
)
def test_stopped_command_leaves_no_ray_behind(
    tiny_llama: Path, tmp_path: Path, sent: signal.Signals, status: int
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": [5, 6, 7, 8]}\n' * 3000)
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "wavepp.cli", "run-batch", "-i", str(source)]
    command += ["-o", str(target), "--model", str(tiny_llama), "-pp", "2"]
    command += ["--num-cpus-per-stage", "0.5", "--max-num-batched-tokens", "4", "--block-size", "4"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=env) as process:
        deadline = time.monotonic() + 300
        while not target.exists() or target.stat().st_size == 0:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        children = descendants(process.pid)
        assert len(children) > 2
        process.send_signal(sent)
        _, err = process.communicate(timeout=120)
    assert process.returncode == status, err.decode()
    assert "Traceback" not in err.decode()
    assert target.read_bytes().endswith(b"\n")
    assert still_there(children) == []


def descendants(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def still_there(pids: list[int]) -> list[int]:
    """Those that run on after a few seconds of grace."""
    import psutil

    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        left = [pid for pid in pids if psutil.pid_exists(pid)]
        if not left:
            return []
        time.sleep(0.1)
    return left
