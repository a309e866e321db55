"""What pipelines on Ray leave behind: processes of their actors, names in shared memory."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from wavepp.actors.ports import EngineBackend

LEFT_S_MAX = 15.0
Left = tuple[frozenset[int], frozenset[str]]


async def stage_pids(pipeline: EngineBackend) -> list[int]:
    return [stage.pid for stage in (await pipeline.stats()).stages]


def actor_processes(*names: str) -> list[psutil.Process]:
    """This test run's worker processes that are one of our actors."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if any(name in title for name in names or ("StageActor", "DriverActor")):
            found.append(process)
    return found


def channel_semaphores() -> set[str]:
    """Those of this run's Ray."""
    (raylet,) = [
        child.pid for child in psutil.Process().children() if "raylet/raylet" in child.cmdline()[0]
    ]
    return {path.name for path in Path("/dev/shm").glob(f"sem.*{raylet}-*")}


def leftovers() -> Left:
    """What is there now."""
    return frozenset(process.pid for process in actor_processes()), frozenset(channel_semaphores())


def assert_nothing_new(before: Left) -> None:
    """Nothing is there that was not, soon."""
    deadline = time.monotonic() + LEFT_S_MAX
    while {process.pid for process in actor_processes()} - before[0]:
        assert time.monotonic() < deadline, actor_processes()
        time.sleep(0.1)
    assert channel_semaphores() - before[1] == set()
