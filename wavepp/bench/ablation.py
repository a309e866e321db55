"""`wavepp bench ablation`: what each mechanism is worth, on emulated devices, beside the paper.

Every row is a configuration of the same code; it boots one engine, on which all cells are run, as
the paper's did. Nothing is measured on a GPU: reports and tables say "emulated". A row whose
switches this version lacks is an error, not a blank.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, get_args

from wavepp.bench import plots
from wavepp.bench.ablation_table import TITLES, CellKey, RowName, console_table, write_sections
from wavepp.bench.report import Row
from wavepp.bench.throughput import (
    Plan,
    check_place,
    driver_warning,
    machine_meta,
    measure_rows,
    parse_counts,
    write_json,
)
from wavepp.bench.workloads import parse_workloads
from wavepp.config import EngineConfig, build_config
from wavepp.console import open_console
from wavepp.engine import Engine
from wavepp.errors import ConfigError

Options = Mapping[str, Any]

NAIVE: Options = {"admission": "serial", "reservation": "none", "planner": "static"}
WAVE: Options = {"admission": "wave", "reservation": "none", "planner": "static"}
LEASE: Options = {"admission": "wave", "reservation": "lease", "planner": "static"}
ESCROW: Options = {"admission": "wave", "reservation": "escrow", "planner": "static"}
ROWS: dict[RowName, Options] = {
    "naive": NAIVE,
    "wave": WAVE,
    "lease": LEASE,
    "escrow": ESCROW,
    "mpu": {**ESCROW, "planner": "mpu"},
    "balanced": {**ESCROW, "planner": "balanced"},
    "tp": ESCROW,  # and one stage of all devices, see `options_of`
    "greedy": {**ESCROW, "planner": "greedy"},
}
TP_FACTOR = 2  # the reference has waves of twice the tokens and twice the lanes
REQUESTS_PER_CLIENT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationPlan:
    """What to run: rows, each on every cell."""

    rows: tuple[RowName, ...]
    cells: tuple[CellKey, ...]
    requests: int | None
    repeats: int
    reuse_frac: float
    num_prefixes: int
    seed: int

    @classmethod
    def parse(
        cls, *, rows: str, workloads: str, prompt_lens: str, concurrency: str, **rest: Any
    ) -> Self:
        """A plan from the command's words: three lists of equal length name the cells.

        Raises:
            ConfigError: a list can't be read, or they differ in length.
        """
        names = [row.strip() for row in rows.split(",")]
        unknown = [name for name in names if name not in ROWS]
        if unknown:
            raise ConfigError(f"row {unknown[0]!r} is not one of {', '.join(ROWS)}")
        lists = (
            parse_workloads(workloads),
            parse_counts("prompt_len", prompt_lens),
            parse_counts("concurrency", concurrency),
        )
        if len({len(found) for found in lists}) != 1:
            raise ConfigError(
                "workload, prompt-len and concurrency name cells together: give lists of one length"
            )
        wrong = [name for name in lists[0] if name not in ("cold", "reuse", "mixed")]
        if wrong:
            raise ConfigError(f"workload {wrong[0]!r}: an ablation runs cold, reuse and mixed")
        cells = tuple(CellKey(*cell) for cell in zip(*lists, strict=True))
        return cls(rows=tuple(row for row in ROWS if row in names), cells=cells, **rest)


def options_of(row: RowName, given: EngineConfig) -> EngineConfig:
    """The configuration of a row.

    Raises:
        ConfigError: this version lacks a switch that the row needs.
    """
    options = dict(ROWS[row])
    for name, value in ROWS[row].items():
        field = EngineConfig.model_fields.get(name)
        if field is None or value not in get_args(field.annotation):
            raise ConfigError(
                f"row {row!r} needs --{name} {value}, which this version does not have; "
                "leave the row out with --rows"
            )
    if row == "tp":
        options |= {
            "tensor_parallel_size": given.pipeline_parallel_size,
            "pipeline_parallel_size": 1,
            "layer_partition": None,
            "max_num_batched_tokens": TP_FACTOR * given.max_num_batched_tokens,
            "min_wave_tokens": None,
            "max_num_seqs": TP_FACTOR * given.max_num_seqs,
        }
    if options.get("planner", given.planner) != "balanced":
        options["wave_times"] = None
    if options.get("reservation", given.reservation) != "escrow":
        options["lease_headroom_waves"] = None
    return build_config({**given.model_dump(exclude_unset=True), **options})


def run(
    config: EngineConfig,
    plan: AblationPlan,
    *,
    json_file: Path | None,
    results: Path | None,
    plot_file: Path | None,
    command: str,
) -> None:
    """Measures all rows, prints the table, writes what is wanted.

    Raises:
        ConfigError: a row or a file can't be used, or the device is not emulated.
    """
    if config.device != "emulated":
        raise ConfigError(f"device {config.device}: an ablation is run on emulated devices")
    configs = {row: options_of(row, config) for row in plan.rows}
    check_place(json_file)
    if plot_file is not None:
        plots.check_plot_file(plot_file)
    report: dict[str, Any] = {"meta": _meta(config, plan, command), "rows": []}
    with tempfile.TemporaryDirectory(prefix="wavepp-ablation-") as folder:
        traces: dict[str, Path] = {}
        for row, of_row in configs.items():
            if plot_file is not None:
                traces[TITLES[row]] = Path(folder) / f"{row}.jsonl"
                of_row = of_row.model_copy(update={"trace": str(traces[TITLES[row]])})
            report["rows"] += asyncio.run(_measure_row(row, of_row, plan))
        if plot_file is not None:
            title = f"emulated {config.cost_model}: {plan.cells[-1]}"
            plots.plot_gantts(traces, config.time_scale, title, plot_file)
    write_json(report, json_file)
    console = open_console()
    console.print(console_table(report))
    for row in report["rows"]:
        if row["driver_bound"]:
            console.print(f"{row['row']}: {driver_warning(row)}", style="bold", highlight=False)
    if results is not None:
        write_sections([report], results)


async def _measure_row(name: RowName, config: EngineConfig, plan: AblationPlan) -> list[Row]:
    """All cells of a row, on one engine; each begins with an empty cache."""
    made: list[Row] = []
    async with Engine(config) as engine:
        for cell in plan.cells:
            open_console(stderr=True).print(f"row {name}: {cell}", highlight=False)
            await engine.reset_prefix_cache()
            made += [
                {"row": name, **row} for row in await measure_rows(engine, _cell_plan(plan, cell))
            ]
    return made


def _cell_plan(plan: AblationPlan, cell: CellKey) -> Plan:
    return Plan(
        workloads=(cell.workload,),
        concurrency=(cell.concurrency,),
        request_rates=(),
        trace=None,
        trace_scale=1.0,
        prompt_len=cell.prompt_len,
        requests=plan.requests or REQUESTS_PER_CLIENT * cell.concurrency,
        repeats=plan.repeats,
        reuse_frac=plan.reuse_frac,
        num_prefixes=plan.num_prefixes,
        baseline=None,
        seed=plan.seed,
    )


def _meta(config: EngineConfig, plan: AblationPlan, command: str) -> dict[str, Any]:
    return {
        "tool": "wavepp bench ablation",
        **machine_meta(),
        "emulated": True,
        "command": command,
        "config": config.model_dump(mode="json"),
        "repeats": plan.repeats,
        "reuse_frac": plan.reuse_frac,
        "num_prefixes": plan.num_prefixes,
        "seed": plan.seed,
    }
