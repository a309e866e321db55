"""`wavepp bench admission`: what admission costs beside execution, at long prompts.

Owns: the plan, the goals, rows and the table. Every section is built for the prompt length and for
a quarter of it, and both are timed in turn, so that the ratio of their times meets the same noise.
Times are given by the wall clock and by the thread's CPU time: on a machine that is busy with other
things only the second says what the work takes.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.table import Table

from wavepp import __version__
from wavepp.bench.admission_load import Load
from wavepp.bench.admission_rounds import Admissions
from wavepp.bench.admission_stage import SECTIONS
from wavepp.bench.report import Row
from wavepp.bench.stopwatch import Stopwatch, collector_off
from wavepp.console import open_console
from wavepp.errors import ConfigError

SHORTER = 4
"""The prompts that are compared with are so many times shorter."""
RATIO_MAX = 5.0
SHORT_BLOCKS_MIN = 8
NOTES = (
    "Garbage collection is off while anything is timed. Quantiles are of each repeat; what is shown"
    " is their median over the repeats. Keys are made outside the tree mutex, as in a stage.",
    "longest hold: of each request its longest hold of the tree mutex, from claim to free.",
    "admission: a burst of requests through the real driver and stages, without a network; time per"
    " request. in all: the driver, and in each round the slowest stage, since stages answer side by"
    " side. rounds: those that began after a request came, until it was admitted; and those held"
    " for the whole burst.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure."""

    prompt_len: int
    concurrency: int
    block_size: int
    stages: int
    runs: int
    repeats: int
    seed: int

    def load(self, prompt_len: int) -> Load:
        """The prompts of one length."""
        return Load(
            prompt_len=prompt_len,
            concurrency=self.concurrency,
            block_size=self.block_size,
            runs=self.runs,
            stages=self.stages,
            seed=self.seed,
        )

    def check(self) -> None:
        """
        Raises:
            ConfigError: the shorter prompts would not have enough blocks.
        """
        blocks = self.prompt_len // SHORTER // self.block_size
        if blocks < SHORT_BLOCKS_MIN:
            raise ConfigError(
                f"prompt_len {self.prompt_len}: at least "
                f"{SHORT_BLOCKS_MIN * SHORTER * self.block_size} with block_size {self.block_size}"
            )
        if self.runs >= blocks:
            raise ConfigError(
                f"runs {self.runs}: at most {blocks - 1}, since a prompt of "
                f"{self.prompt_len // SHORTER} tokens has {blocks} blocks"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A limit on one quantile of one measure."""

    quantile: Literal["p50", "p99"]
    limit_us: float


def goals(runs: int) -> dict[str, Goal]:
    """Measure -> its goal; those of a prompt of 200,000 tokens in blocks of 64 on two cores."""
    probe = Goal(quantile="p50", limit_us=8.0)
    hold = Goal(quantile="p99", limit_us=1000.0)
    return {
        "probe: whole prompt held, warm": probe,
        "probe: part of it held, warm": probe,
        "probe: whole prompt held, one of a burst": probe,
        "probe: whole prompt held, after hashing": probe,
        "hint discovery": Goal(quantile="p99", limit_us=2350.0),
        "lease: one run": Goal(quantile="p50", limit_us=500.0),
        f"lease: {runs} runs": Goal(quantile="p50", limit_us=1000.0),
        "longest hold: one run": hold,
        f"longest hold: {runs} runs": hold,
        "longest hold: hybrid": hold,
        "longest hold: cold": hold,
        "one hold, in rounds": hold,
        "one hold, in waves": hold,
    }


def run(plan: Plan, json_file: Path | None) -> None:
    """Measures, prints a table and writes the JSON.

    Raises:
        ConfigError: the plan or the file can't be used.
    """
    plan.check()
    if json_file is not None and not json_file.parent.is_dir():
        raise ConfigError(f"json: folder {json_file.parent} does not exist")
    report = measure(plan)
    console = open_console()
    console.print(table(report["rows"], plan))
    for note in report["meta"]["notes"]:
        console.print(note, highlight=False, soft_wrap=True)
    if json_file is not None:
        try:
            json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"json {json_file}: {error.strerror}") from None


def measure(plan: Plan) -> dict[str, Any]:
    """The whole report: `{"meta": ..., "rows": [...]}`, two rows a measure, the longer first."""
    lengths = (plan.prompt_len, plan.prompt_len // SHORTER)
    began_s = time.perf_counter()
    rows: list[Row] = []
    for section in (*SECTIONS, Admissions):
        watches = {length: Stopwatch() for length in lengths}
        built = [section(plan.load(length), watch) for length, watch in watches.items()]
        for watch in watches.values():
            watch.clear()  # what was timed while it was built
        with collector_off():
            for _ in range(plan.repeats):
                for part, watch in zip(built, watches.values(), strict=True):
                    part.repeat()
                    watch.next_repeat()
        rows += _rows(plan, watches)
    return {"meta": _meta(plan, time.perf_counter() - began_s), "rows": rows}


def _rows(plan: Plan, watches: Mapping[int, Stopwatch]) -> list[Row]:
    rows: list[Row] = []
    aims = goals(plan.runs)
    measures = watches[plan.prompt_len].measures
    for measure in sorted(measures, key=lambda name: name.startswith("one hold")):
        long, short = (watch.summary(measure) for watch in watches.values())
        for length, values in zip(watches, (long, short), strict=True):
            row: Row = {
                "workload": "admission",
                "measure": measure,
                "prompt_len": length,
                "concurrency": plan.concurrency,
                "block_size": plan.block_size,
                **values,
            }
            if length == plan.prompt_len:
                row |= _judged(long, short, aims.get(measure))
            rows.append(row)
    return rows


def _judged(long: Row, short: Row, goal: Goal | None) -> Row:
    """How the time grows with the prompt, and whether it is within its goal."""
    if "count" in long:
        return {}
    found: Row = {
        f"{clock}_ratio": long[f"{clock}_p50_us"] / max(short[f"{clock}_p50_us"], 1e-3)
        for clock in ("wall", "cpu")
    }
    if goal is not None:
        found["goal"] = {"quantile": goal.quantile, "limit_us": goal.limit_us} | {
            clock: long[f"{clock}_{goal.quantile}_us"] <= goal.limit_us for clock in ("wall", "cpu")
        }
    return found


def _meta(plan: Plan, took_s: float) -> dict[str, Any]:
    return {
        "tool": "wavepp bench admission",
        "wavepp": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": list(os.getloadavg()),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "took_s": took_s,
        "prompt_len": plan.prompt_len,
        "shorter_prompt_len": plan.prompt_len // SHORTER,
        "concurrency": plan.concurrency,
        "block_size": plan.block_size,
        "stages": plan.stages,
        "runs": plan.runs,
        "repeats": plan.repeats,
        "seed": plan.seed,
        "ratio_max": RATIO_MAX,
        "notes": list(NOTES),
    }


def table(rows: list[Row], plan: Plan) -> Table:
    """The rows of the longer prompts for people; single holds are in the JSON only."""
    title = (
        f"admission: {plan.prompt_len:,} tokens in blocks of {plan.block_size}, "
        f"{plan.concurrency} at once, {plan.stages} stages (times in us)"
    )
    made = Table(box=box.SIMPLE, title=title, title_justify="left")
    made.add_column("measure")
    ratio = f"over {plan.prompt_len // SHORTER:,}: wall, cpu"
    for name in ("p50 wall", "cpu", "p99 wall", "cpu", ratio, "goal", "met"):
        made.add_column(name, justify="right")
    for row in rows:
        if row["prompt_len"] == plan.prompt_len and _is_shown(row["measure"]):
            made.add_row(row["measure"], *_cells(row))
    return made


def _is_shown(measure: str) -> bool:
    """Not the holds that make up a request's life: its longest one is shown."""
    return measure.partition(":")[0] not in (
        "claim", "materialize", "snapshot orders", "publish", "free", "release",
    )  # fmt: skip


def _cells(row: Row) -> list[str]:
    if "count" in row:
        return [f"{row['count']:.3g}", *[""] * 6]
    times = [row[f"{clock}_{q}_us"] for q in ("p50", "p99") for clock in ("wall", "cpu")]
    cells = [f"{value:,.1f}" for value in times]
    if row["samples"] == 1:
        cells[2:] = ["", ""]
    cells.append(f"{row['wall_ratio']:.2f}, {row['cpu_ratio']:.2f}")
    goal = row.get("goal")
    if goal is None:
        return [*cells, "", ""]
    met = "yes" if goal["wall"] else "by cpu time" if goal["cpu"] else "no"
    return [*cells, f"{goal['quantile']} <= {goal['limit_us']:,.0f}", met]
