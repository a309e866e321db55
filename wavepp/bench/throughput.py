"""`wavepp bench throughput`: input tokens a second by workload and concurrency, closed loop.

Every repeat of a cell runs the engine and then, when asked, the baseline on the same tokens, so
that both meet the same noise; medians are reported, and the ratio of medians.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rich import box
from rich.table import Table

from wavepp import __version__
from wavepp.bench.baseline import TransformersBaseline
from wavepp.bench.closed_loop import LoopRun, run_closed_loop
from wavepp.bench.report import Row, make_row
from wavepp.bench.workloads import Shape, WorkloadName, parse_workloads, prefixes, prompts
from wavepp.config import EngineConfig
from wavepp.console import open_console
from wavepp.engine import Engine, check_folder
from wavepp.errors import ConfigError

REQUESTS_MIN = 8
BASELINES = ("transformers",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure."""

    workloads: tuple[WorkloadName, ...]
    concurrency: tuple[int, ...]
    prompt_len: int
    requests: int | None
    repeats: int
    reuse_frac: float
    num_prefixes: int
    baseline: str | None
    seed: int

    @classmethod
    def parse(cls, *, workloads: str, concurrency: str, baseline: str | None, **rest: Any) -> Self:
        """A plan from the command's words.

        Raises:
            ConfigError: a list can't be read, or a name is unknown.
        """
        if baseline is not None and baseline not in BASELINES:
            raise ConfigError(f"baseline {baseline!r} is not one of {', '.join(BASELINES)}")
        parts = [part.strip() for part in concurrency.split(",")]
        if not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise ConfigError(f"concurrency {concurrency!r}: write it as numbers, such as 1,4,8")
        return cls(
            workloads=parse_workloads(workloads),
            concurrency=tuple(int(part) for part in parts),
            baseline=baseline,
            **rest,
        )


def run(config: EngineConfig, plan: Plan, json_file: Path | None) -> None:
    """Measures, prints a table and writes the JSON.

    Raises:
        ConfigError: the checkpoint, the plan or the file can't be used.
    """
    check_folder(config)
    if json_file is not None and not json_file.parent.is_dir():
        raise ConfigError(f"json: folder {json_file.parent} does not exist")
    report = asyncio.run(measure(config, plan))
    open_console().print(table(report["rows"]))
    if json_file is not None:
        try:
            json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"json {json_file}: {error.strerror}") from None


async def measure(config: EngineConfig, plan: Plan) -> dict[str, Any]:
    """The whole report: `{"meta": ..., "rows": [...]}`."""
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(Engine(config))
        other = None
        if plan.baseline is not None:
            cores = len(os.sched_getaffinity(0))
            other = await stack.enter_async_context(TransformersBaseline(config, cores))
        shape = _shape(engine, plan)
        await run_closed_loop(engine, prompts("cold", shape, 2, run=-1), 2)  # warm up
        meta = _meta(engine, plan, other)
        rows = [
            await _cell(engine, plan, _Cell(shape, workload, concurrency), other)
            for workload in plan.workloads
            for concurrency in plan.concurrency
        ]
    return {"meta": meta, "rows": rows}


@dataclass(frozen=True, slots=True)
class _Cell:
    shape: Shape
    workload: WorkloadName
    concurrency: int


async def _cell(engine: Engine, plan: Plan, cell: _Cell, other: TransformersBaseline | None) -> Row:
    count = plan.requests or max(REQUESTS_MIN, cell.concurrency)
    runs: list[LoopRun] = []
    baseline_s: list[float] = []
    for repeat in range(plan.repeats):
        made = prompts(cell.workload, cell.shape, count, _run_number(cell.concurrency, repeat))
        if cell.workload != "cold" and cell.shape.prefix_len:
            await run_closed_loop(engine, [[*p, 5] for p in prefixes(cell.shape)], 1)  # prime
        runs.append(await run_closed_loop(engine, made, cell.concurrency))
        if other is not None:
            baseline_s.append(await other.seconds(made))
        _tell(cell, repeat, runs[-1])
    named: Mapping[str, Any] = {
        "workload": cell.workload,
        "concurrency": cell.concurrency,
        "prompt_len": plan.prompt_len,
    }
    row = make_row(named, runs, baseline_s)
    if other is not None:
        row["baseline"] |= {"name": plan.baseline, "threads": other.threads}
    return row


def _tell(cell: _Cell, repeat: int, done: LoopRun) -> None:
    """A line for whoever waits: a benchmark of a large model is long."""
    open_console(stderr=True).print(
        f"{cell.workload} c={cell.concurrency} run {repeat + 1}: "
        f"{done.input_tokens / done.wall_s:,.0f} tok/s in {done.wall_s:.1f} s",
        highlight=False,
    )


def _run_number(concurrency: int, repeat: int) -> int:
    """A number of its own for every timed run, so that no two share cold prompts."""
    return concurrency * 1000 + repeat


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


def _meta(engine: Engine, plan: Plan, other: TransformersBaseline | None) -> dict[str, Any]:
    import torch

    return {
        "tool": "wavepp bench throughput",
        "wavepp": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "config": engine.config.model_dump(mode="json"),
        "stages": [list(stage.layers) for stage in engine.facts],
        "prompt_len": plan.prompt_len,
        "reuse_frac": plan.reuse_frac,
        "num_prefixes": plan.num_prefixes,
        "seed": plan.seed,
        "baseline": None if other is None else plan.baseline,
    }


def table(rows: list[Row]) -> Table:
    """The rows for people."""
    made = Table(box=box.SIMPLE, title="throughput (input tokens/s)", title_justify="left")
    for name in (
        "workload",
        "c",
        "tok/s",
        "min",
        "max",
        "p50 s",
        "p95 s",
        "cached",
        "stage busy",
        "foreign",
    ):
        made.add_column(name, justify="left" if name == "workload" else "right")
    if any("baseline" in row for row in rows):
        made.add_column("baseline tok/s", justify="right")
        made.add_column("ratio", justify="right")
    for row in rows:
        cells = [
            row["workload"],
            str(row["concurrency"]),
            f"{row['input_tok_s']:,.0f}",
            f"{row['input_tok_s_min']:,.0f}",
            f"{row['input_tok_s_max']:,.0f}",
            f"{row['p50_s']:.3f}",
            f"{row['p95_s']:.3f}",
            f"{row['cached_frac']:.0%}",
            " ".join(f"{share:.0%}" for share in row["stage_busy"]),
            f"{row['foreign_cores']:.2f}",
        ]
        if "baseline" in row:
            cells += [f"{row['baseline']['input_tok_s']:,.0f}", f"{row['baseline']['ratio']:.2f}"]
        made.add_row(*cells)
    return made
