"""Named semaphores that Ray's shared-memory channels leave in /dev/shm.

Each buffer of a compiled graph's channel has two, and Ray does not unlink them when the graph is
torn down and its actors end. A channel's reader sees their names in its own memory map (its writer
does not: it made them under passing names), and unlinking a name takes it from nobody who has it
mapped. The names are noted when the graph starts, for an actor that is killed can't clean up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

MAPS = Path("/proc/self/maps")
SHARED = Path("/dev/shm")
CHANNEL_SEMAPHORE = re.compile(r"/dev/shm/(sem\.(?:hdr|obj)\S+)")


def mapped_semaphores() -> frozenset[str]:
    """The channel semaphores this process has open. Empty where there is no /proc."""
    if not MAPS.exists():
        return frozenset()
    return frozenset(CHANNEL_SEMAPHORE.findall(MAPS.read_text()))


def unlink_semaphores(names: Iterable[str]) -> None:
    """Unlinks semaphores that are there; call it when their graph is torn down."""
    for name in names:
        (SHARED / name).unlink(missing_ok=True)  # the other end of the channel may have been first


def sweep_semaphores(raylet_pid: int) -> None:
    """Unlinks what is left of a raylet that has ended: its pid is part of the names."""
    for kind in ("hdr", "obj"):
        unlink_semaphores(path.name for path in SHARED.glob(f"sem.{kind}{raylet_pid}-*"))
