"""The grid's rows for people: a table, and `balanced` beside `static` and `mpu`.

Pure but for the page that `write_section` writes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from wavepp.bench.page import put_sections
from wavepp.bench.report import Row

OTHERS = ("static", "mpu")
CellKey = tuple[str, int, int, float | None]
COLUMNS = (
    "tok/s",
    "p50 s",
    "p95 s",
    "busy",
    "cached",
    "expected",
    "good hits",
    "waves",
    "mean tokens",
)


def cell_of(row: Row) -> CellKey:
    """Workload, prompt length, concurrency, load."""
    return row["workload"], row["prompt_len"], row["concurrency"], row.get("load")


def cell_text(cell: CellKey) -> str:
    """For people."""
    workload, length, concurrency, load = cell
    size = f" {round(length / 1000)}K" if length else ""
    return f"{workload}{size}, " + (f"c={concurrency}" if load is None else f"{load:g}x greedy")


def cells_of_row(row: Row) -> list[str]:
    """A row's figures, in the order of COLUMNS."""
    busy, hits, expected = row["stage_busy"], row["good_hit_rate"], row.get("expected_frac")
    return [
        f"{row['input_tok_s']:,.0f}",
        f"{row['p50_s']:.2f}",
        f"{row['p95_s']:.2f}",
        f"{sum(busy) / len(busy):.1%}",
        f"{row['cached_frac']:.1%}",
        "" if expected is None else f"{expected:.1%}",
        "" if hits is None else f"{hits:.1%}",
        f"{row['waves']['count']:g}",
        f"{row['waves'].get('tokens_mean', 0):,.0f}",
    ]


def console_table(report: Mapping[str, Any]) -> Table:
    """All rows."""
    title = f"virtual clock, emulated: {report['meta']['config']['cost_model']}"
    made = Table(box=box.SIMPLE, title=title, title_justify="left")
    for name in ("cell", "planner", *COLUMNS):
        made.add_column(name, justify="left" if name in ("cell", "planner") else "right")
    for row in report["rows"]:
        made.add_row(cell_text(cell_of(row)), row["planner"], *cells_of_row(row))
    return made


def by_cell(rows: Sequence[Row]) -> dict[CellKey, dict[str, Row]]:
    """Cell -> planner -> row."""
    made: dict[CellKey, dict[str, Row]] = {}
    for row in rows:
        made.setdefault(cell_of(row), {})[row["planner"]] = row
    return made


def ratios(rows: Sequence[Row]) -> dict[CellKey, float]:
    """Throughput of `balanced` over the better of `static` and `mpu`, where all three ran."""
    made = {}
    for cell, found in by_cell(rows).items():
        if "balanced" in found and all(name in found for name in OTHERS):
            best = max(found[name]["input_tok_s"] for name in OTHERS)
            made[cell] = found["balanced"]["input_tok_s"] / best
    return made


def summary_lines(rows: Sequence[Row]) -> list[str]:
    """The ratios, their geometric mean and least, and the 95th percentiles on mixed."""
    found = ratios(rows)
    if not found:
        return []
    lines = ["balanced over the better of static and mpu, throughput:"]
    lines += [f"  {cell_text(cell)}: {ratio:.3f}" for cell, ratio in found.items()]
    mean = math.exp(sum(map(math.log, found.values())) / len(found))
    lines.append(f"geometric mean {mean:.3f}, least {min(found.values()):.3f}")
    grouped = by_cell(rows)
    for cell in found:
        if cell[0] == "mixed":
            best = min(grouped[cell][name]["p95_s"] for name in OTHERS)
            own = grouped[cell]["balanced"]["p95_s"]
            lines.append(f"p95 on {cell_text(cell)}: {own:.2f} s, best of the others {best:.2f} s")
    return lines


def markdown(report: Mapping[str, Any]) -> str:
    """A section of a page: how it was run, and every row."""
    meta, config = report["meta"], report["meta"]["config"]
    lines = [
        f"Emulated, virtual clock: cost model `{config['cost_model']}`, {meta['date'][:10]}, "
        f"WavePP {meta['wavepp']}; one run a cell.",
        "",
        "```bash",
        meta["command"],
        "```",
        "",
        f"| cell | planner | {' | '.join(COLUMNS)} |",
        "|---|---|" + "---|" * len(COLUMNS),
    ]
    for row in report["rows"]:
        parts = [cell_text(cell_of(row)), row["planner"], *cells_of_row(row)]
        lines.append(f"| {' | '.join(parts)} |")
    summary = summary_lines(report["rows"])
    if summary:
        lines += ["", "```", *summary, "```"]
    return "\n".join(lines) + "\n"


def write_section(report: Mapping[str, Any], name: str, page: Path) -> None:
    """Puts a report between the marks of its name on a page; the rest of it stays.

    Raises:
        ConfigError: the page can't be read or written, or lacks the marks.
    """
    put_sections(page, {name: markdown(report)})
