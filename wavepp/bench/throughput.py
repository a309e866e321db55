"""`wavepp bench throughput`: input tokens a second by workload and load.

The load is a closed loop at each concurrency, or arrivals: at each request rate, or as in a trace.
Every repeat of a cell runs the engine and then, when asked, the baseline on the same tokens, so
that both meet the same noise; medians are reported, and the ratio of medians.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import math
import os
import platform
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from rich import box
from rich.table import Table

from wavepp import __version__
from wavepp.bench import plots
from wavepp.bench.baseline import TransformersBaseline
from wavepp.bench.closed_loop import Ask, LoopRun, run_closed_loop, run_open_loop
from wavepp.bench.report import Row, make_row
from wavepp.bench.trace_file import TraceLine, read_trace_file, trace_asks
from wavepp.bench.workloads import (
    Shape,
    WorkloadName,
    arriving,
    asks,
    parse_workloads,
    prefixes,
    prompts,
    shares_prefixes,
)
from wavepp.config import EngineConfig
from wavepp.console import open_console
from wavepp.engine import Engine, check_folder
from wavepp.errors import ConfigError

REQUESTS_MIN = 8
RATES_FROM = 1 << 20  # above any concurrency
BASELINES = ("transformers",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure.

    Attributes:
        request_rates: arrivals a second, in seconds of the devices; empty: closed loop.
        trace, trace_scale: the file of workload trace, and how many times faster it arrives.
    """

    workloads: tuple[WorkloadName, ...]
    concurrency: tuple[int, ...]
    request_rates: tuple[float, ...]
    trace: Path | None
    trace_scale: float
    prompt_len: int
    requests: int | None
    repeats: int
    reuse_frac: float
    num_prefixes: int
    baseline: str | None
    seed: int

    @classmethod
    def parse(
        cls,
        *,
        workloads: str,
        concurrency: str,
        baseline: str | None,
        request_rate: str | None = None,
        trace: Path | None = None,
        trace_scale: float = 1.0,
        **rest: Any,
    ) -> Self:
        """A plan from the command's words.

        Raises:
            ConfigError: a list can't be read, a name is unknown, or words exclude each other.
        """
        if baseline is not None and baseline not in BASELINES:
            raise ConfigError(f"baseline {baseline!r} is not one of {', '.join(BASELINES)}")
        names = parse_workloads(workloads)
        if ("trace" in names) != (trace is not None):
            raise ConfigError("workload trace and --trace FILE go together")
        if request_rate is not None and "storm" in names:
            raise ConfigError("workload storm is a closed loop: give no --request-rate")
        return cls(
            workloads=names,
            concurrency=parse_counts("concurrency", concurrency),
            request_rates=() if request_rate is None else _parse_rates(request_rate),
            trace=trace,
            trace_scale=trace_scale,
            baseline=baseline,
            **rest,
        )


def parse_counts(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers of a comma-separated list.

    Raises:
        ConfigError: one is none, or 0.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"{name} {text!r}: write it as numbers, such as 1,4,8")
    return tuple(int(part) for part in parts)


def _parse_rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise ConfigError(f"request_rate {text!r}: write it as numbers above 0, such as 0.5,1")
    return rates


def run(
    config: EngineConfig, plan: Plan, json_file: Path | None, plot_file: Path | None = None
) -> None:
    """Measures, prints a table, writes the JSON and the plots.

    Raises:
        ConfigError: the checkpoint, the plan or a file can't be used.
    """
    check_folder(config)
    check_place(json_file)
    if plot_file is not None:
        plots.check_plot_file(plot_file)
    with plots.traced(config, plot_file) as traced:
        report = asyncio.run(measure(traced, plan))
        if plot_file is not None:
            plots.plot_throughput(report, traced, plot_file)
    console = open_console()
    console.print(table(report))
    for row in report["rows"]:
        if row["driver_bound"]:
            console.print(driver_warning(row), style="bold", highlight=False)
    write_json(report, json_file)


def check_place(file: Path | None) -> None:
    """
    Raises:
        ConfigError: the folder of the file isn't there.
    """
    if file is not None and not file.parent.is_dir():
        raise ConfigError(f"{file}: folder {file.parent} does not exist")


def write_json(report: dict[str, Any], file: Path | None) -> None:
    """Writes a report where it is wanted.

    Raises:
        ConfigError: it can't be written.
    """
    if file is None:
        return
    try:
        file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"json {file}: {error.strerror}") from None


def driver_warning(row: Row) -> str:
    """That a row may say more of the measuring machine than of the pipeline."""
    return (
        f"{row['workload']} c={row['concurrency']}: the driver's process used "
        f"{row['driver_cores']:.2f} of a core, more than half: its own speed may be what was "
        "measured"
    )


async def measure(config: EngineConfig, plan: Plan) -> dict[str, Any]:
    """The whole report: `{"meta": ..., "rows": [...]}`."""
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(Engine(config))
        other = None
        if plan.baseline is not None:
            cores = len(os.sched_getaffinity(0))
            other = await stack.enter_async_context(TransformersBaseline(config, cores))
        rows = await measure_rows(engine, plan, other)
        return {"meta": _meta(engine, plan, other), "rows": rows}


async def measure_rows(
    engine: Engine, plan: Plan, other: TransformersBaseline | None = None
) -> list[Row]:
    """The rows of a plan, on a running engine."""
    lines = read_trace_file(plan.trace, plan.requests) if plan.trace is not None else []
    shape = _shape(engine, plan)
    short_len = min(shape.prompt_len, engine.config.max_num_batched_tokens)
    short = replace(shape, prompt_len=short_len)
    await run_closed_loop(engine, prompts("cold", short, 2, run=-1), 2)  # warm up
    return [
        await _cell(engine, plan, _Cell(shape, workload, *load, lines), other)
        for workload in plan.workloads
        for load in _loads(plan, workload)
    ]


def _loads(plan: Plan, workload: WorkloadName) -> list[tuple[int, float | None]]:
    """(concurrency, request rate) of the cells of a workload; concurrency 0: arrivals."""
    if workload == "trace":
        return [(0, None)]
    if plan.request_rates:
        return [(0, rate) for rate in plan.request_rates]
    return [(concurrency, None) for concurrency in plan.concurrency]


@dataclass(frozen=True, slots=True)
class _Cell:
    shape: Shape
    workload: WorkloadName
    concurrency: int
    request_rate: float | None
    lines: Sequence[TraceLine]


async def _cell(engine: Engine, plan: Plan, cell: _Cell, other: TransformersBaseline | None) -> Row:
    runs: list[LoopRun] = []
    baseline_s: list[float] = []
    for repeat in range(plan.repeats):
        made = _asks(plan, cell, repeat)
        if shares_prefixes(cell.workload) and cell.shape.prefix_len:
            primed = [[*prefix, 5] for prefix in prefixes(cell.shape)]
            await run_closed_loop(engine, primed, len(primed))
        elif cell.workload == "trace":
            await engine.reset_prefix_cache()
        runs.append(await _timed_run(engine, cell, made, repeat))
        if other is not None:
            baseline_s.append(await other.seconds([list(ask.tokens) for ask in made]))
        _tell(cell, repeat, runs[-1])
    named: dict[str, Any] = {
        "workload": cell.workload,
        "concurrency": cell.concurrency,
        "prompt_len": plan.prompt_len,
    }
    if cell.request_rate is not None:
        named["request_rate"] = cell.request_rate
    if cell.workload == "trace":
        named["prompt_len"] = 0
        named["trace_scale"] = plan.trace_scale
    row = make_row(named, runs, baseline_s)
    if other is not None:
        row["baseline"] |= {"name": plan.baseline, "threads": other.threads}
    return row


def _asks(plan: Plan, cell: _Cell, repeat: int) -> list[Ask]:
    """The requests of one timed run."""
    shape = cell.shape
    if cell.workload == "trace":
        return trace_asks(
            cell.lines,
            vocab_size=shape.vocab_size,
            block_size=shape.block_size,
            seed=shape.seed + repeat,
            scale=plan.trace_scale,
        )
    count = plan.requests or max(REQUESTS_MIN, cell.concurrency)
    run_number = _run_number(cell, repeat)
    made = asks(cell.workload, shape, count, run_number)
    if cell.request_rate is not None:
        return arriving(made, cell.request_rate, shape.seed + repeat)
    return made


async def _timed_run(engine: Engine, cell: _Cell, made: list[Ask], repeat: int) -> LoopRun:
    if not cell.concurrency:
        return await run_open_loop(engine, made)
    seed = cell.shape.seed + repeat if cell.workload == "storm" else None
    return await run_closed_loop(engine, made, cell.concurrency, storm_seed=seed)


def _tell(cell: _Cell, repeat: int, done: LoopRun) -> None:
    """A line for whoever waits: a benchmark of a large model is long."""
    open_console(stderr=True).print(
        f"{cell.workload} {_load_text(cell.concurrency, cell.request_rate)} run {repeat + 1}: "
        f"{done.input_tokens / done.device_s:,.0f} tok/s in {done.wall_s:.1f} s",
        highlight=False,
    )


def _load_text(concurrency: int, request_rate: float | None) -> str:
    if concurrency:
        return f"c={concurrency}"
    return "as recorded" if request_rate is None else f"{request_rate:g}/s"


def _run_number(cell: _Cell, repeat: int) -> int:
    """A number of its own for every timed run, so that no two share cold prompts."""
    load = cell.concurrency
    if cell.request_rate is not None:
        load = RATES_FROM + round(cell.request_rate * 1000)
    return load * 1000 + repeat


def _shape(engine: Engine, plan: Plan) -> Shape:
    facts = engine.facts
    limit = min(stage.max_model_len for stage in facts)
    if plan.prompt_len > limit:
        raise ConfigError(f"prompt_len {plan.prompt_len} exceeds max_model_len {limit}")
    return Shape(
        prompt_len=plan.prompt_len,
        vocab_size=min(stage.vocab_size for stage in facts),
        block_size=facts[0].block_size,
        reuse_frac=plan.reuse_frac,
        num_prefixes=plan.num_prefixes,
        seed=plan.seed,
    )


def machine_meta() -> dict[str, Any]:
    """Where and with what something was measured."""
    return {
        "wavepp": __version__,
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _meta(engine: Engine, plan: Plan, other: TransformersBaseline | None) -> dict[str, Any]:
    return {
        "tool": "wavepp bench throughput",
        **machine_meta(),
        "emulated": engine.config.device == "emulated",
        "config": engine.config.model_dump(mode="json"),
        "stages": [list(stage.layers) for stage in engine.facts],
        "prompt_len": plan.prompt_len,
        "reuse_frac": plan.reuse_frac,
        "num_prefixes": plan.num_prefixes,
        "seed": plan.seed,
        "baseline": None if other is None else plan.baseline,
    }


def table(report: dict[str, Any]) -> Table:
    """The rows for people."""
    rows: list[Row] = report["rows"]
    title = "throughput (input tokens/s)"
    if report["meta"]["emulated"]:
        title += f", emulated: {report['meta']['config']['cost_model']}"
    made = Table(box=box.SIMPLE, title=title, title_justify="left")
    for name in (
        "workload",
        "c",
        "tok/s",
        "min",
        "max",
        "p50 s",
        "p95 s",
        "cached",
        "good hits",
        "stage busy",
        "driver",
        "foreign",
    ):
        made.add_column(name, justify="left" if name == "workload" else "right")
    if any("baseline" in row for row in rows):
        made.add_column("baseline tok/s", justify="right")
        made.add_column("ratio", justify="right")
    for row in rows:
        cells = [
            row["workload"],
            _load_text(row["concurrency"], row.get("request_rate")).removeprefix("c="),
            f"{row['input_tok_s']:,.0f}",
            f"{row['input_tok_s_min']:,.0f}",
            f"{row['input_tok_s_max']:,.0f}",
            f"{row['p50_s']:.3f}",
            f"{row['p95_s']:.3f}",
            f"{row['cached_frac']:.0%}",
            "" if row["good_hit_rate"] is None else f"{row['good_hit_rate']:.0%}",
            " ".join(f"{share:.0%}" for share in row["stage_busy"]),
            f"{row['driver_cores']:.2f}",
            f"{row['foreign_cores']:.2f}",
        ]
        if "baseline" in row:
            cells += [f"{row['baseline']['input_tok_s']:,.0f}", f"{row['baseline']['ratio']:.2f}"]
        made.add_row(*cells)
    return made
