"""Named semaphores that Ray's shared-memory channels leave in /dev/shm.

Each buffer of a compiled graph's channel has two, and Ray does not unlink them when the graph is
torn down and its actors end. Who opened one has it in its memory map by its name; who made it, by
the number of its file only, since it was made under a passing name (and between nodes nobody else
opens the writer's). Unlinking a name takes it from nobody who has it mapped. The names are noted
when the graph starts, for an actor that is killed can't clean up.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

MAPS = Path("/proc/self/maps")
SHARED = Path("/dev/shm")
PREFIXES = ("sem.hdr", "sem.obj")
MAPPED_SEMAPHORE = re.compile(r" (\d+) +/dev/shm/sem\.")


def mapped_semaphores() -> frozenset[str]:
    """The channel semaphores this process has open. Empty where there is no /proc."""
    if not MAPS.exists():
        return frozenset()
    numbers = {int(found) for found in MAPPED_SEMAPHORE.findall(MAPS.read_text())}
    with os.scandir(SHARED) as entries:
        named = [entry for entry in entries if entry.name.startswith(PREFIXES)]
    return frozenset(entry.name for entry in named if entry.inode() in numbers)


def unlink_semaphores(names: Iterable[str]) -> None:
    """Unlinks semaphores that are there; call it when their graph is torn down."""
    for name in names:
        (SHARED / name).unlink(missing_ok=True)  # the other end of the channel may have been first


def sweep_semaphores(raylet_pid: int) -> None:
    """Unlinks what is left of a raylet that has ended: its pid is part of the names."""
    for prefix in PREFIXES:
        unlink_semaphores(path.name for path in SHARED.glob(f"{prefix}{raylet_pid}-*"))
