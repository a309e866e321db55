"""Named semaphores that Ray's shared-memory channels leave in /dev/shm.

Each buffer of a compiled graph's channel has two, and Ray does not unlink them when the graph is
torn down and its actors end. Whoever has mapped them can see their names, and unlinking a name
takes it from nobody who has it mapped.
"""

from __future__ import annotations

import re
from pathlib import Path

MAPS = Path("/proc/self/maps")
CHANNEL_SEMAPHORE = re.compile(r"(/dev/shm/sem\.(?:hdr|obj)\S+)")


def mapped_semaphores() -> frozenset[Path]:
    """The channel semaphores this process has open. Empty where there is no /proc."""
    if not MAPS.exists():
        return frozenset()
    return frozenset(Path(name) for name in CHANNEL_SEMAPHORE.findall(MAPS.read_text()))


def unlink_semaphores() -> int:
    """Unlinks this process's channel semaphores; call it when the graph is torn down.

    Returns:
        How many there were.
    """
    names = mapped_semaphores()
    for name in names:
        name.unlink(missing_ok=True)  # the other end of the channel may have been first
    return len(names)


def sweep_semaphores(raylet_pid: int) -> None:
    """Unlinks what is left of a raylet that has ended: its pid is part of the names."""
    for kind in ("hdr", "obj"):
        for name in Path("/dev/shm").glob(f"sem.{kind}{raylet_pid}-*"):
            name.unlink(missing_ok=True)
