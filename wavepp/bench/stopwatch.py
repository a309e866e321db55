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
    numbers: dict[str, list[float]] = field(default_factory=dict)  # what is counted, not timed
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

    def number(self, name: str, value: float) -> None:
        """Adds something that was counted."""
        self.numbers.setdefault(name, []).append(value)

    def time(self, name: str, action: Callable[[], T]) -> T:
        """Runs an action and adds its duration."""
        result, wall_us, cpu_us = timed(action)
        self.note(name, wall_us, cpu_us)
        return result

    @property
    def measures(self) -> tuple[str, ...]:
        """Everything that has samples, in the order in which it came."""
        return (*self.repeats, *self.numbers)

    def clear(self) -> None:
        """Forgets everything."""
        self.repeats.clear()
        self.numbers.clear()
        self._repeat = 0

    def summary(self, name: str) -> Row:
        """Wall and CPU quantiles of one thing: medians over the repeats that have it; or the median
        of what was counted."""
        if name in self.numbers:
            return {"count": statistics.median(self.numbers[name])}
        runs = [run for run in self.repeats[name] if run.wall_us]
        assert runs, name
        row: Row = {"samples": len(runs[0].wall_us), "repeats": len(runs)}
        for clock in ("wall", "cpu"):
            lists: list[Sequence[float]] = [getattr(run, f"{clock}_us") for run in runs]
            for label, share in (("p50", 0.50), ("p99", 0.99)):
                row[f"{clock}_{label}_us"] = statistics.median(quantile(v, share) for v in lists)
            row[f"{clock}_max_us"] = statistics.median(max(values) for values in lists)
            row[f"{clock}_min_us"] = min(min(values) for values in lists)
        return row


class Timer:
    """One duration at a time."""

    def __init__(self) -> None:
        self._cpu_ns = self._wall_ns = 0

    def start(self) -> None:
        """Now."""
        self._cpu_ns, self._wall_ns = time.thread_time_ns(), time.perf_counter_ns()

    def stop(self) -> tuple[float, float]:
        """(wall, CPU of this thread) since the start, in microseconds."""
        wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        return (wall_ns - self._wall_ns) / NS_PER_US, (cpu_ns - self._cpu_ns) / NS_PER_US


def timed(action: Callable[[], T]) -> tuple[T, float, float]:
    """(result, wall, CPU of this thread), in microseconds."""
    timer = Timer()
    timer.start()
    result = action()
    return (result, *timer.stop())


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
