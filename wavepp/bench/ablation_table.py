"""The ablation as tables: on a terminal, and as a section of a Markdown page, beside the paper.

Owns: the paper's figures, and the marks between which the page is written. Pure but for that file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from rich import box
from rich.table import Table

from wavepp.bench.report import Row
from wavepp.bench.workloads import WorkloadName
from wavepp.errors import ConfigError

RowName = Literal["naive", "wave", "escrow", "mpu", "balanced", "tp", "greedy"]
TITLES: dict[RowName, str] = {
    "naive": "naive: serial admission, no reservation, static waves",
    "wave": "+ wave admission and transport",
    "escrow": "+ leases and escrows",
    "mpu": "+ MPU",
    "balanced": "balanced instead of MPU (not in the paper)",
    "tp": "tensor parallel, all devices one stage",
    "greedy": "leases, escrows, greedy waves",
}
BEGIN, END = "<!-- ablation: begin -->", "<!-- ablation: end -->"


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


def console_table(report: Mapping[str, Any]) -> Table:
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


def write_section(report: Mapping[str, Any], page: Path) -> None:
    """Puts the tables between the marks of a page; the rest of it stays.

    Raises:
        ConfigError: the page can't be read or written, or has no marks.
    """
    try:
        text = page.read_text(encoding="utf-8")
        if BEGIN not in text or END not in text:
            raise ConfigError(f"results {page}: needs the lines {BEGIN} and {END}")
        section = f"{BEGIN}\n{markdown(report)}{END}"
        pattern = f"{re.escape(BEGIN)}.*?{re.escape(END)}"
        page.write_text(re.sub(pattern, lambda _: section, text, flags=re.DOTALL), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"results {page}: {error.strerror}") from None


def markdown(report: Mapping[str, Any]) -> str:
    """The section: how it was run, throughput beside the paper's, and where the time went."""
    meta, config = report["meta"], report["meta"]["config"]
    head = (
        f"Emulated: cost model `{config['cost_model']}`, time scale {config['time_scale']:g}, "
        f"{meta['cores']} cores, {meta['date'][:10]}, WavePP {meta['wavepp']}, transport "
        f"{config['transport']}; medians of {meta['repeats']} runs.\n\n"
        f"```bash\n{meta['command']}\n```\n\n"
    )
    return head + _throughputs(report["rows"]) + "\n" + _details(report["rows"])


def _throughputs(rows: list[Row]) -> str:
    """Rows by cells: emulated input tokens a second, and the paper's in brackets."""
    cells = list(dict.fromkeys(map(_cell, rows)))
    lines = [
        "| input tokens/s, emulated (paper) | " + " | ".join(map(str, cells)) + " |",
        "|---|" + "---|" * len(cells),
    ]
    found = {(row["row"], _cell(row)): row for row in rows}
    for name in get_args(RowName):
        if not any(row["row"] == name for row in rows):
            continue
        parts = [_with_paper(found.get((name, cell)), name, cell) for cell in cells]
        lines.append(f"| {TITLES[name]} | " + " | ".join(parts) + " |")
    return "\n".join(lines) + "\n"


def _with_paper(row: Row | None, name: RowName, cell: CellKey) -> str:
    if row is None:
        return ""
    paper = PAPER.get(cell, {}).get(name)
    return f"{row['input_tok_s']:,.0f}" + ("" if paper is None else f" ({paper:,.0f})")


def _details(rows: list[Row]) -> str:
    lines = [
        "| row | cell | tokens/s min..max | p50, s (paper) | p95, s | good hits "
        "| waves, mean tokens | busy | no wave | activation | materialise | sending "
        "| driver, cores |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cell = _cell(row)
        paper = PAPER_P50.get(cell, {}).get(row["row"])
        hits = row["good_hit_rate"]
        gaps = [_mean(row["gaps"].get(reason, [0.0])) for reason in _REASONS]
        flag = " (over half: suspect)" if row["driver_bound"] else ""
        parts = [
            row["row"],
            str(cell),
            f"{row['input_tok_s_min']:,.0f}..{row['input_tok_s_max']:,.0f}",
            f"{row['p50_s']:.2f}" + ("" if paper is None else f" ({paper:.2f})"),
            f"{row['p95_s']:.2f}",
            "" if hits is None else f"{hits:.0%}",
            f"{row['waves']['count']:g}, {row['waves'].get('tokens_mean', 0):,.0f}",
            f"{_mean(row['stage_busy']):.0%}",
            *(f"{share:.0%}" for share in gaps),
            f"{row['driver_cores']:.2f}{flag}",
        ]
        lines.append(f"| {' | '.join(parts)} |")
    return "\n".join(lines) + "\n"


_REASONS = ("no_wave", "activation", "materialize", "sending")


def _mean(shares: list[float]) -> float:
    return sum(shares) / len(shares)


def _cell(row: Row) -> CellKey:
    return CellKey(row["workload"], row["prompt_len"], row["concurrency"])
