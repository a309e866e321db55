"""Durations of small things, wall clock and thread's own CPU time side by side.

Owns: how a duration is taken, and its summary: quantiles of each repeat, then medians over the
repeats. On a busy machine the wall clock counts other programs' turns too; the CPU time does not.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from wavepp.bench.report import Row, quantile

T = TypeVar("T")

NS_PER_US = 1000.0


@dataclass(slots=True)
class Samples:
    """Durations of one thing in one repeat, in microseconds."""

    wall_us: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Stopwatch:
    """Samples by name, one `Samples` a repeat."""

    repeats: dict[str, list[Samples]] = field(default_factory=dict)
    _repeat: int = 0

    def next_repeat(self) -> None:
        """What follows belongs to another repeat."""
        self._repeat += 1

    def note(self, name: str, wall_us: float, cpu_us: float) -> None:
        """Adds one sample."""
        runs = self.repeats.setdefault(name, [])
        while len(runs) <= self._repeat:
            runs.append(Samples())
        runs[self._repeat].wall_us.append(wall_us)
        runs[self._repeat].cpu_us.append(cpu_us)

    def time(self, name: str, action: Callable[[], T]) -> T:
        """Runs an action and adds its duration."""
        result, wall_us, cpu_us = timed(action)
        self.note(name, wall_us, cpu_us)
        return result

    def summary(self, name: str) -> Row:
        """Wall and CPU quantiles of one thing: medians over the repeats that have it."""
        runs = [run for run in self.repeats[name] if run.wall_us]
        assert runs, name
        row: Row = {"samples": len(runs[0].wall_us), "repeats": len(runs)}
        for clock in ("wall", "cpu"):
            lists: list[Sequence[float]] = [getattr(run, f"{clock}_us") for run in runs]
            for label, share in (("p50", 0.50), ("p99", 0.99)):
                row[f"{clock}_{label}_us"] = statistics.median(quantile(v, share) for v in lists)
            row[f"{clock}_min_us"] = min(min(values) for values in lists)
        return row


def timed(action: Callable[[], T]) -> tuple[T, float, float]:
    """(result, wall, CPU of this thread), in microseconds."""
    cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
    result = action()
    wall_after, cpu_after = time.perf_counter_ns(), time.thread_time_ns()
    return result, (wall_after - wall) / NS_PER_US, (cpu_after - cpu) / NS_PER_US


@contextmanager
def collector_off() -> Iterator[None]:
    """No garbage collection meanwhile: one pass over what a benchmark has built takes longer than
    all that is timed."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
