"""How much of the machine others used while something was measured.

A throughput measured beside other work says little, so every row of a report carries it.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class CpuReading:
    """CPU seconds so far: of the whole machine, and of this process with its descendants."""

    machine_s: float
    own_s: float


def read_cpu() -> CpuReading:
    """A reading now; descendants that have ended are not counted as own any more."""
    times = psutil.cpu_times()
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    guest_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # within user, nice
    own_s = 0.0
    root = psutil.Process()
    for process in (root, *root.children(recursive=True)):
        try:
            used = process.cpu_times()
        except psutil.Error:  # it ended meanwhile
            continue
        own_s += used.user + used.system
    return CpuReading(machine_s=sum(times) - idle_s - guest_s, own_s=own_s)


def foreign_cores(before: CpuReading, after: CpuReading, wall_s: float) -> float:
    """Cores that other processes kept busy between two readings, on average."""
    machine_s = after.machine_s - before.machine_s
    return max(0.0, machine_s - (after.own_s - before.own_s)) / wall_s
