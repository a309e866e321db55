"""`wavepp bench compare A.json B.json`: ratios cell by cell, their geometric mean, wins."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from wavepp.console import open_console, print_under
from wavepp.errors import ConfigError

Cell = tuple[str, int, int]
"""workload, concurrency, prompt length"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A's throughput over B's in every cell both have; more than 1: A is faster."""

    ratios: Mapping[Cell, float]
    rates: Mapping[Cell, tuple[float, float]]
    only_one: tuple[Cell, ...]

    @property
    def geometric_mean(self) -> float:
        """Of all ratios."""
        return math.exp(sum(map(math.log, self.ratios.values())) / len(self.ratios))

    @property
    def wins(self) -> int:
        """Cells in which A is faster."""
        return sum(ratio > 1.0 for ratio in self.ratios.values())


def compare(first: Mapping[Cell, float], second: Mapping[Cell, float]) -> Comparison:
    """Compares two sets of throughputs.

    Raises:
        ConfigError: they have no cell in common.
    """
    both = [cell for cell in first if cell in second]
    if not both:
        raise ConfigError("the two results have no cell (workload, concurrency, length) in common")
    return Comparison(
        ratios={cell: first[cell] / second[cell] for cell in both},
        rates={cell: (first[cell], second[cell]) for cell in both},
        only_one=tuple(sorted(set(first) ^ set(second))),
    )


def read_rates(path: Path) -> dict[Cell, float]:
    """Cell -> input tokens a second, from a report's JSON.

    Raises:
        ConfigError: the file can't be read, or is not a report.
    """
    try:
        report: Any = json.loads(path.read_text(encoding="utf-8"))
        rates = {
            (_named(row), int(row["concurrency"]), int(row["prompt_len"])): float(
                row["input_tok_s"]
            )
            for row in report["rows"]
        }
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a throughput report ({type(error).__name__})") from None
    slow = [cell for cell, rate in rates.items() if not rate > 0]
    if slow:
        raise ConfigError(f"{path}: input_tok_s of {slow[0]} is not above 0")
    return rates


def _named(row: Mapping[str, Any]) -> str:
    """The workload, with its arrival rate where it has one."""
    rate = row.get("request_rate")
    return str(row["workload"]) if rate is None else f"{row['workload']} {float(rate):g}/s"


def run(first: Path, second: Path) -> None:
    """Prints the comparison of two reports."""
    found = compare(read_rates(first), read_rates(second))
    made = Table(box=box.SIMPLE)
    for name in ("workload", "c", "prompt", "A tok/s", "B tok/s", "A/B"):
        made.add_column(name, justify="left" if name == "workload" else "right")
    for (workload, concurrency, length), ratio in found.ratios.items():
        rate_a, rate_b = found.rates[(workload, concurrency, length)]
        made.add_row(
            workload,
            str(concurrency),
            str(length),
            f"{rate_a:,.0f}",
            f"{rate_b:,.0f}",
            f"{ratio:.3f}",
        )
    console = open_console()
    print_under(console, f"{first.name} over {second.name}", made)
    console.print(
        f"geometric mean {found.geometric_mean:.3f}, wins {found.wins} of {len(found.ratios)}",
        highlight=False,
    )
    if found.only_one:
        console.print(f"in one file only: {len(found.only_one)} cells", highlight=False)
