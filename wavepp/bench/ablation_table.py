"""The ablation as tables: on a terminal, and as sections of a Markdown page, beside the paper.

Owns: the paper's figures, and the marks between which the page is written, a section a cell. Pure
but for that file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from rich import box
from rich.table import Table

from wavepp.bench.page import put_sections
from wavepp.bench.report import Row
from wavepp.bench.workloads import WorkloadName

Report = Mapping[str, Any]
RowName = Literal["naive", "wave", "lease", "escrow", "mpu", "balanced", "tp", "greedy"]
TITLES: dict[RowName, str] = {
    "naive": "naive: serial admission, no reservation, static waves",
    "wave": "+ wave admission and transport",
    "lease": "+ leases alone (not in the paper)",
    "escrow": "+ leases and escrows",
    "mpu": "+ MPU",
    "balanced": "balanced instead of MPU (not in the paper)",
    "tp": "tensor parallel, all devices one stage",
    "greedy": "leases, escrows, greedy waves",
}


class CellKey(NamedTuple):
    """One workload at one load."""

    workload: WorkloadName
    prompt_len: int
    concurrency: int

    def __str__(self) -> str:
        return f"{self.workload} {round(self.prompt_len / 1000)}K, c={self.concurrency}"


# Input tokens a second, Kimi K3 on eight B300, as published.
PAPER: dict[CellKey, dict[RowName, float]] = {
    CellKey("cold", 131072, 16): {"naive": 8826, "wave": 29692},
    CellKey("reuse", 131072, 8): {"wave": 96796, "escrow": 149021, "mpu": 211214},
    CellKey("reuse", 262144, 32): {"escrow": 175305, "mpu": 158238, "tp": 127099},
}
PAPER_P50: dict[CellKey, dict[RowName, float]] = {
    CellKey("cold", 131072, 16): {"escrow": 69.69, "mpu": 43.03},
    CellKey("reuse", 131072, 8): {"escrow": 6.51, "mpu": 4.20},
}


def console_table(report: Report) -> Table:
    """All figures for people."""
    title = f"ablation, emulated: {report['meta']['config']['cost_model']}"
    made = Table(box=box.SIMPLE, title=title, title_justify="left")
    names = ("row", "cell", "tok/s", "min", "max", "paper", "p50 s", "p95 s", "busy", "driver")
    for name in names:
        made.add_column(name, justify="left" if name in ("row", "cell") else "right")
    for row in report["rows"]:
        cell = _cell(row)
        paper = PAPER.get(cell, {}).get(row["row"])
        busy = row["stage_busy"]
        made.add_row(
            row["row"],
            str(cell),
            f"{row['input_tok_s']:,.0f}",
            f"{row['input_tok_s_min']:,.0f}",
            f"{row['input_tok_s_max']:,.0f}",
            "" if paper is None else f"{paper:,.0f}",
            f"{row['p50_s']:.2f}",
            f"{row['p95_s']:.2f}",
            f"{sum(busy) / len(busy):.0%}",
            f"{row['driver_cores']:.2f}",
        )
    return made


def section_name(cell: CellKey, title: str = "ablation") -> str:
    """By which a page's marks call a cell's section."""
    return f"{title} {cell.workload} {cell.prompt_len} {cell.concurrency}"


def write_sections(reports: Sequence[Report], page: Path, title: str = "ablation") -> None:
    """Puts each cell's table between its marks on a page; the rest of it stays.

    Args:
        reports: their rows are put together; of a row that several have, the last one counts.
        title: of the marks: the same cell may have sections of several titles.

    Raises:
        ConfigError: the page can't be read or written, or lacks marks.
    """
    cells = dict.fromkeys(_cell(row) for report in reports for row in report["rows"])
    put_sections(page, {section_name(cell, title): markdown(reports, cell) for cell in cells})


def markdown(reports: Sequence[Report], cell: CellKey) -> str:
    """A cell's section: how it was run, throughput beside the paper's, and where the time went."""
    rows: dict[str, Row] = {}
    parts: list[str] = []
    for report in reports:
        found = {row["row"]: row for row in report["rows"] if _cell(row) == cell}
        if found:
            rows |= found
            parts.append(_head(report, list(found)))
    ordered = [rows[name] for name in get_args(RowName) if name in rows]
    return "".join(parts) + f"{_throughputs(ordered, cell)}\n{_details(ordered)}"


def _head(report: Report, names: Sequence[str]) -> str:
    meta, config = report["meta"], report["meta"]["config"]
    return (
        f"Emulated ({', '.join(names)}): cost model `{config['cost_model']}`, time scale "
        f"{config['time_scale']:g}, transport {config['transport']}, {meta['cores']} cores, "
        f"{meta['date'][:10]}, WavePP {meta['wavepp']}; medians of {meta['repeats']} runs.\n\n"
        f"```bash\n{meta['command']}\n```\n\n"
    )


def _throughputs(rows: list[Row], cell: CellKey) -> str:
    """Throughput and completion beside the paper's."""
    lines = [
        "| | input tokens/s, emulated | paper | min..max | p50 s, emulated | paper | p95 s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        paper = PAPER.get(cell, {}).get(row["row"])
        paper_p50 = PAPER_P50.get(cell, {}).get(row["row"])
        parts = [
            TITLES[row["row"]],
            f"{row['input_tok_s']:,.0f}",
            "" if paper is None else f"{paper:,.0f}",
            f"{row['input_tok_s_min']:,.0f}..{row['input_tok_s_max']:,.0f}",
            f"{row['p50_s']:.2f}",
            "" if paper_p50 is None else f"{paper_p50:.2f}",
            f"{row['p95_s']:.2f}",
        ]
        lines.append(f"| {' | '.join(parts)} |")
    return "\n".join(lines) + "\n"


def _details(rows: list[Row]) -> str:
    """Where the stages' time went, in the mean over the stages."""
    lines = [
        "| | busy | no wave | activation | materialise | sending | waves, mean tokens | good hits "
        "| driver, cores | others, cores |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        hits = row["good_hit_rate"]
        gaps = [_mean(row["gaps"].get(reason, [0.0])) for reason in _REASONS]
        flag = " (over half: suspect)" if row["driver_bound"] else ""
        parts = [
            row["row"],
            f"{_mean(row['stage_busy']):.0%}",
            *(f"{share:.0%}" for share in gaps),
            f"{row['waves']['count']:g}, {row['waves'].get('tokens_mean', 0):,.0f}",
            "" if hits is None else f"{hits:.0%}",
            f"{row['driver_cores']:.2f}{flag}",
            f"{row['foreign_cores']:.2f}",
        ]
        lines.append(f"| {' | '.join(parts)} |")
    return "\n".join(lines) + "\n"


_REASONS = ("no_wave", "activation", "materialize", "sending")


def _mean(shares: list[float]) -> float:
    return sum(shares) / len(shares)


def _cell(row: Row) -> CellKey:
    return CellKey(row["workload"], row["prompt_len"], row["concurrency"])
