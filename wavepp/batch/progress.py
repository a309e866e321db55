"""How a batch run is told to whoever watches: a bar on a terminal, lines elsewhere, a table after.

Everything goes to standard error, so that answers may go to standard output.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from wavepp.batch.runner import BatchReport, Tally
from wavepp.requests import EngineStats

LINE_EVERY_S = 10.0


class BarProgress:
    """A live bar: requests, tokens a second, hit rate, ring use."""

    def __init__(self, console: Console) -> None:
        self._began = time.monotonic()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("[bold]requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._bar.add_task("batch", total=None, facts="")
        self._bar.start()

    def update(self, tally: Tally, stats: EngineStats) -> None:
        """Redraws the bar."""
        self._bar.update(
            self._task,
            total=tally.total,
            completed=tally.done,
            facts=describe(tally, stats, time.monotonic() - self._began),
        )

    def close(self) -> None:
        """Leaves the bar as it stands."""
        self._bar.stop()


class LineProgress:
    """A plain line at the start and then now and then, for logs."""

    def __init__(self, console: Console, every_s: float = LINE_EVERY_S) -> None:
        self._console = console
        self._every_s = every_s
        self._began = time.monotonic()
        self._last: float | None = None

    def update(self, tally: Tally, stats: EngineStats) -> None:
        """Prints a line when the last one is old enough."""
        now = time.monotonic()
        if self._last is not None and now - self._last < self._every_s:
            return
        self._last = now
        total = f"/{tally.total}" if tally.total is not None else ""
        self._console.print(
            f"{tally.done}{total} requests · {describe(tally, stats, now - self._began)}",
            highlight=False,
            soft_wrap=True,
        )

    def close(self) -> None:
        """Nothing to close."""


def describe(tally: Tally, stats: EngineStats, elapsed_s: float) -> str:
    """Tokens a second, hit rate, ring use and errors, in a few words."""
    speed = tally.input_tokens / elapsed_s if elapsed_s > 0 else 0.0
    words = [
        f"{speed:,.0f} tok/s",
        f"hit rate {hit_rate(tally):.0%}",
        f"ring {stats.ring_occupancy}/{stats.ring_depth}",
    ]
    if tally.errors:
        words.append(f"{tally.errors} error{'s' if tally.errors != 1 else ''}")
    return " · ".join(words)


def hit_rate(tally: Tally) -> float:
    """The share of input tokens whose state was reused."""
    return tally.cached_tokens / tally.input_tokens if tally.input_tokens else 0.0


def busy_shares(before: EngineStats, after: EngineStats) -> Sequence[float]:
    """Each stage's share of the time between two snapshots in which it computed."""
    wall_s = after.wall_s - before.wall_s
    if wall_s <= 0:
        return [0.0 for _ in after.stages]
    start = {stage.stage: stage.busy_s for stage in before.stages}
    return [(stage.busy_s - start.get(stage.stage, 0.0)) / wall_s for stage in after.stages]


def summary_table(report: BatchReport) -> Table:
    """The run in one table."""
    tally = report.tally
    table = Table(box=box.SIMPLE, show_header=False, title="batch", title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("requests", f"{tally.done:,}")
    if tally.kept:
        table.add_row("  of an earlier run", f"{tally.kept:,}")
    table.add_row("errors", f"{tally.errors:,}")
    table.add_row("input tokens", f"{tally.input_tokens:,}")
    table.add_row("seconds", f"{report.wall_s:,.2f}")
    if report.wall_s > 0:
        table.add_row("input tokens/s", f"{tally.input_tokens / report.wall_s:,.0f}")
    table.add_row("hit rate", f"{hit_rate(tally):.1%}")
    if report.before is not None and report.after is not None:
        for stage, share in enumerate(busy_shares(report.before, report.after)):
            first, end = report.after.stages[stage].layers
            table.add_row(f"stage {stage} busy (layers {first}-{end - 1})", f"{share:.1%}")
    return table
