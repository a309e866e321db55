"""What a watcher of a batch run is shown."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from wavepp.batch.progress import (
    BarProgress,
    LineProgress,
    busy_shares,
    describe,
    hit_rate,
    summary_table,
)
from wavepp.batch.runner import BatchReport, Tally
from wavepp.requests import EngineStats, StageStats


def stats(*, wall_s: float, busy_s: tuple[float, ...] = (), occupancy: int = 0) -> EngineStats:
    stages = tuple(
        StageStats(stage=stage, layers=(4 * stage, 4 * stage + 4), busy_s=seconds)
        for stage, seconds in enumerate(busy_s)
    )
    return EngineStats(
        requests_waiting=0,
        requests_running=0,
        requests_finished=0,
        prompt_tokens=0,
        cached_tokens=0,
        computed_tokens=0,
        waves=0,
        ring_depth=4,
        ring_occupancy=occupancy,
        wall_s=wall_s,
        stages=stages,
    )


TALLY = Tally(total=10, kept=2, answered=3, errors=1, input_tokens=2000, cached_tokens=500)


def test_description_has_speed_hits_ring_and_errors() -> None:
    words = describe(TALLY, stats(wall_s=1.0, occupancy=3), 2.0)
    assert words == "1,000 tok/s · hit rate 25% · ring 3/4 · 1 error"
    assert describe(Tally(), stats(wall_s=0.0), 0.0) == "0 tok/s · hit rate 0% · ring 0/4"


def test_hit_rate_of_nothing_is_zero() -> None:
    assert hit_rate(Tally()) == 0.0


def test_busy_shares_are_of_the_time_between_two_snapshots() -> None:
    before = stats(wall_s=10.0, busy_s=(5.0, 1.0))
    after = stats(wall_s=12.0, busy_s=(6.0, 2.5))
    assert busy_shares(before, after) == pytest.approx([0.5, 0.75])
    assert busy_shares(before, before) == [0.0, 0.0]


def test_bar_shows_requests_and_facts_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    bar = BarProgress(console)
    bar.update(TALLY, stats(wall_s=1.0, occupancy=3))
    bar.close()
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "5/10" in shown
    assert "ring 3/4" in shown


def test_lines_come_now_and_then() -> None:
    console = Console(file=io.StringIO(), width=120)
    assert isinstance(console.file, io.StringIO)
    rare = LineProgress(console, every_s=3600.0)
    rare.update(TALLY, stats(wall_s=1.0))
    said = console.file.getvalue()
    assert said.startswith("5/10 requests · ")
    rare.update(TALLY, stats(wall_s=2.0))
    assert console.file.getvalue() == said
    console.file.truncate(0)
    often = LineProgress(console, every_s=0.0)
    often.update(TALLY, stats(wall_s=1.0))
    often.close()
    assert console.file.getvalue().count("5/10 requests · ") == 1


def test_summary_of_a_run() -> None:
    report = BatchReport(
        tally=TALLY,
        wall_s=4.0,
        before=stats(wall_s=0.0, busy_s=(0.0,)),
        after=stats(wall_s=4.0, busy_s=(3.0,)),
    )
    console = Console(file=io.StringIO(), width=120)
    assert isinstance(console.file, io.StringIO)
    console.print(summary_table(report))
    rows = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert [row for row in rows if row] == [
        "batch",
        "requests 5",
        "of an earlier run 2",
        "errors 1",
        "input tokens 2,000",
        "seconds 4.00",
        "input tokens/s 500",
        "hit rate 25.0%",
        "stage 0 busy (layers 0-3) 75.0%",
    ]
