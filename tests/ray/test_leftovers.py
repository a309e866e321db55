"""An engine on a Ray of its own leaves nothing behind, however its program ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.ray

SCRIPT = Path(__file__).parent / "own_cluster_script.py"
MARK = "WAVEPP_TEST_MARK"


def marked_processes(mark: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
        except psutil.Error:
            continue
    return found


def shared_files(pids: set[int]) -> list[Path]:
    """Files in shared memory that carry one of the pids in their name."""
    return [f for f in Path("/dev/shm").iterdir() if any(f"{pid}-" in f.name for pid in pids)]


class Program:
    """The script, running; remembers the pids of all it started."""

    def __init__(self, mode: str, **variables: str) -> None:
        self.mark = uuid.uuid4().hex
        self.pids: set[int] = set()
        environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | variables
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), mode],
            env={**environment, MARK: self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def lines(self) -> Iterator[str]:
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            for line in stdout:
                self.pids |= {int(name.split()[0]) for name in marked_processes(self.mark)}
                yield line.strip()

    def wait(self) -> str:
        output = "\n".join(self.lines())
        self.process.wait(timeout=60)
        return output

    def check_nothing_left(self, *, started: bool = True) -> None:
        deadline = time.monotonic() + 20
        while left := marked_processes(self.mark):
            assert time.monotonic() < deadline, left
            time.sleep(0.2)
        assert len(self.pids) > 5 or not started  # else there was nothing to leave behind
        assert shared_files(self.pids) == []
        sessions = [path for path in Path("/tmp/ray").glob("session_*") if path.is_dir()]
        own = [path for path in sessions if path.name.endswith(f"_{self.process.pid}")]
        assert own == []


@pytest.mark.parametrize(
    ("mode", "code", "words"),
    [
        ("closed", 0, "done"),
        ("unclosed", 0, "started"),
        ("exception", 1, "ValueError: the program's own trouble"),
        ("failed-start", 1, "stage 1 broke down"),
    ],
)
def test_program_leaves_nothing(mode: str, code: int, words: str) -> None:
    program = Program(mode)
    output = program.wait()
    assert program.process.returncode == code, output
    assert words in output
    program.check_nothing_left(started=mode != "failed-start")


def test_program_interrupted_while_it_starts_leaves_nothing() -> None:
    program = Program("closed")
    deadline = time.monotonic() + 60
    while not any("gcs_server" in line for line in marked_processes(program.mark)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    program.process.send_signal(signal.SIGINT)
    output = program.wait()
    assert program.process.returncode != 0
    assert "KeyboardInterrupt" in output
    assert "done" not in output
    program.check_nothing_left(started=False)


def test_interrupted_program_leaves_nothing() -> None:
    program = Program("interrupted")
    lines = program.lines()
    assert next(lines) == "started"
    time.sleep(1.0)
    program.process.send_signal(signal.SIGINT)
    output = "\n".join(lines)
    program.process.wait(timeout=60)
    assert program.process.returncode != 0
    assert "KeyboardInterrupt" in output
    program.check_nothing_left()


def test_program_joins_a_cluster_and_leaves_it_as_it_was(ray_session: Any) -> None:
    """As inside a Ray job: RAY_ADDRESS names the cluster, which is somebody else's."""
    semaphores = set(Path("/dev/shm").glob("sem.*"))
    before = ray_session.available_resources()["CPU"]  # pipelines of other tests may hold some
    address = ray_session.get_runtime_context().gcs_address
    program = Program("closed", RAY_ADDRESS=address)
    output = program.wait()
    assert program.process.returncode == 0, output
    assert "done" in output

    @ray_session.remote(num_cpus=0)
    def lives() -> bool:
        return True

    assert ray_session.get(lives.remote(), timeout=60) is True
    (raylet,) = [
        child.pid for child in psutil.Process().children() if "raylet/raylet" in child.cmdline()[0]
    ]
    new = set(Path("/dev/shm").glob("sem.*")) - semaphores
    assert [path for path in new if f"{raylet}-" in path.name] == []
    # What is free is told to the cluster's head from time to time, not at once.
    deadline = time.monotonic() + 30
    while (free := ray_session.available_resources().get("CPU", 0.0)) < before:
        assert time.monotonic() < deadline, (free, before)
        time.sleep(0.2)
