"""`wavepp bench grid`: planners against each other, workload by workload, under the virtual clock.

Rows of the ablation go beside them, each with its own switches; the planners take those given.
Every cell runs on a pipeline of its own, empty at first. The load of a cell is a closed loop, or
arrivals at so many times what `greedy` carries there (`--load`), which is measured first, in a
closed loop that keeps all lanes full. Nothing is measured on a GPU, and no second is a real one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, get_args

from wavepp.bench.ablation import REQUESTS_PER_CLIENT, ROWS, options_of
from wavepp.bench.ablation_table import RowName
from wavepp.bench.closed_loop import Ask, LoopRun
from wavepp.bench.grid_table import console_table, summary_lines
from wavepp.bench.report import Row, make_row
from wavepp.bench.throughput import check_place, machine_meta, parse_counts, write_json
from wavepp.bench.trace_file import TraceLine, read_trace_file, trace_asks
from wavepp.bench.virtual import (
    ABSENT,
    ROUND_DELAY_S,
    WAVE_DELAY_S,
    VirtualEngine,
    stage_models,
)
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
from wavepp.config import EngineConfig, build_config
from wavepp.console import open_console
from wavepp.emulated.stage_model import StageModel
from wavepp.errors import ConfigError
from wavepp.planner.factory import PlannerName

PLANNERS = get_args(PlannerName)
ROWS_BESIDE: dict[str, RowName] = {row: row for row in ROWS if row not in PLANNERS}
"""Of the ablation: what is no planner's name brings switches of its own."""
NAMES = (*PLANNERS, *ROWS_BESIDE)
REQUESTS_OPEN = 64  # where there are no clients
PRIMED_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One workload at one load: `concurrency`, or (then that is 0) `load`."""

    workload: WorkloadName
    prompt_len: int
    concurrency: int = 0
    load: float | None = None

    @property
    def text(self) -> str:
        """For people."""
        length = f" {round(self.prompt_len / 1000)}K" if self.prompt_len else ""
        load = f"c={self.concurrency}" if self.load is None else f"{self.load:g}x greedy"
        return f"{self.workload}{length}, {load}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GridPlan:
    """What to run: all planners on all cells.

    Attributes:
        wave_times: file of what `balanced` starts from.
        lines: of the trace; empty: none. requests: in a run of a made workload; None: by the load.
    """

    planners: tuple[str, ...]
    cells: tuple[Cell, ...]
    lines: tuple[TraceLine, ...]
    requests: int | None
    reuse_frac: float
    num_prefixes: int
    seed: int
    wave_times: Path | None = None

    @classmethod
    def parse(
        cls,
        *,
        planners: str,
        cells: str,
        concurrency: str,
        load: str | None,
        trace: Path | None,
        trace_requests: int | None,
        **rest: Any,
    ) -> Self:
        """A plan from the command's words.

        Raises:
            ConfigError: a list can't be read, a name is unknown, or a trace is missing.
        """
        names = tuple(name.strip() for name in planners.split(","))
        unknown = [name for name in names if name not in NAMES]
        if unknown:
            raise ConfigError(f"planner {unknown[0]!r} is not one of {', '.join(NAMES)}")
        pairs = [_workload(word.strip()) for word in cells.split(",")]
        if any(kind == "trace" for kind, _ in pairs) != (trace is not None):
            raise ConfigError("cell trace and --trace FILE go together")
        loads = _loads(concurrency, load)
        made = [
            Cell(workload=kind, prompt_len=length, concurrency=clients, load=times)
            for kind, length in pairs
            for clients, times in loads
        ]
        lines = () if trace is None else tuple(read_trace_file(trace, trace_requests))
        return cls(planners=names, cells=tuple(made), lines=lines, **rest)


@dataclass(frozen=True, slots=True)
class _Devices:
    """A configuration and its stages."""

    config: EngineConfig
    models: tuple[StageModel, ...]

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        return cls(config, stage_models(config))


def _workload(word: str) -> tuple[WorkloadName, int]:
    """A workload and its prompts' length, from `cold:65536`; a trace has its own lengths."""
    name, colon, length = word.partition(":")
    (kind,) = parse_workloads(name)
    if kind == "storm":
        raise ConfigError(f"cell {word!r}: a grid runs cold, reuse, mixed and trace")
    if (kind == "trace") == bool(colon):
        raise ConfigError(f"cell {word!r}: write it as workload:tokens, or trace alone")
    return kind, parse_counts("cell", length)[0] if colon else 0


def _loads(concurrency: str, load: str | None) -> list[tuple[int, float | None]]:
    """(concurrency, load) of every cell of a workload."""
    if load is None:
        return [(clients, None) for clients in parse_counts("concurrency", concurrency)]
    try:
        loads = [float(part) for part in load.split(",")]
    except ValueError:
        loads = []
    if not loads or not all(0 < times < math.inf for times in loads):
        raise ConfigError(f"load {load!r}: write it as numbers above 0, such as 0.5,1.2")
    return [(0, times) for times in loads]


def run(config: EngineConfig, plan: GridPlan, *, json_file: Path | None, command: str) -> None:
    """Runs all cells, prints the table and the ratios, writes the JSON.

    Raises:
        ConfigError: the configuration or a file can't be used, or the device is not emulated.
    """
    check_place(json_file)
    report = measure(config, plan, command)
    console = open_console()
    console.print(console_table(report))
    for line in summary_lines(report["rows"]):
        console.print(line, highlight=False)
    write_json(report, json_file)


def measure(config: EngineConfig, plan: GridPlan, command: str = "") -> dict[str, Any]:
    """The whole report: `{"meta": ..., "rows": [...]}`.

    Raises:
        ConfigError: the configuration can't be used, or the device is not emulated.
    """
    devices = {
        name: _Devices.of(_config_of(name, config, plan.wave_times)) for name in plan.planners
    }
    greedy = _Devices.of(_config_of("greedy", config))
    _check_lengths(plan.cells, greedy.models[0].facts.max_model_len)
    rows: list[Row] = []
    for cell in plan.cells:
        rate = None
        if cell.load is not None:
            full = Cell(
                workload=cell.workload,
                prompt_len=cell.prompt_len,
                concurrency=2 * config.max_num_seqs,
            )
            carried = _timed(greedy, plan, full, None)
            rate = cell.load * len(carried.results) / carried.wall_s
        rows += [_row(name, of_name, plan, cell, rate) for name, of_name in devices.items()]
    return {"meta": _meta(config, plan, command), "rows": rows}


def _check_lengths(cells: Sequence[Cell], longest: int) -> None:
    """Before anything runs.

    Raises:
        ConfigError: a cell's prompts are longer than the model takes.
    """
    for cell in cells:
        if cell.prompt_len > longest:
            raise ConfigError(
                f"cell {cell.workload}:{cell.prompt_len} exceeds max_model_len {longest}"
            )


def _config_of(name: str, config: EngineConfig, wave_times: Path | None = None) -> EngineConfig:
    if name in ROWS_BESIDE:
        return options_of(ROWS_BESIDE[name], config)
    options = {**config.model_dump(exclude_unset=True), "planner": name}
    if name == "balanced" and wave_times is not None:
        options["wave_times"] = str(wave_times)
    return build_config(options)


def _row(name: str, devices: _Devices, plan: GridPlan, cell: Cell, rate: float | None) -> Row:
    run = _timed(devices, plan, cell, rate)
    named: dict[str, Any] = {
        "planner": name,
        "workload": cell.workload,
        "prompt_len": cell.prompt_len,
        "concurrency": cell.concurrency,
    }
    if rate is not None:
        named |= {"load": cell.load, "request_rate": rate}
    made = make_row(named, [run], [])
    open_console(stderr=True).print(
        f"{cell.text}, {name}: {made['input_tok_s']:,.0f} tok/s", highlight=False
    )
    return {field: value for field, value in made.items() if field not in ABSENT}


def _timed(devices: _Devices, plan: GridPlan, cell: Cell, rate: float | None) -> LoopRun:
    """One cell on a new pipeline.

    Args:
        rate: requests that arrive a second; None: a closed loop.
    """
    engine = VirtualEngine(devices.config, devices.models, seed=plan.seed)
    made = _prepared(engine, plan, cell, rate)
    if rate is None:
        return engine.closed_loop(made, cell.concurrency)
    return engine.open_loop(made)


def _prepared(
    engine: VirtualEngine, plan: GridPlan, cell: Cell, rate: float | None
) -> Sequence[Ask]:
    """Warms the pipeline up, fills its cache with shared prefixes; returns the timed requests."""
    config = engine.config
    shape = Shape(
        prompt_len=cell.prompt_len or config.max_num_batched_tokens,
        vocab_size=engine.vocab_size,
        block_size=config.block_size,
        reuse_frac=plan.reuse_frac,
        num_prefixes=plan.num_prefixes,
        seed=plan.seed,
    )
    warm = [Ask(tokens=tokens) for tokens in prompts("cold", shape, 2, run=-1)]
    engine.closed_loop(warm, len(warm))
    if cell.workload == "trace":
        return _trace_asks(plan, shape, rate)
    if shares_prefixes(cell.workload) and shape.prefix_len:
        primed = [Ask(tokens=[*prefix, 5]) for prefix in prefixes(shape)]
        engine.closed_loop(primed, PRIMED_AT_ONCE)
    count = plan.requests or REQUESTS_PER_CLIENT * cell.concurrency or REQUESTS_OPEN
    made = asks(cell.workload, shape, count, run=0)
    return made if rate is None else arriving(made, rate, plan.seed)


def _trace_asks(plan: GridPlan, shape: Shape, rate: float | None) -> list[Ask]:
    """The trace's requests; with a rate they arrive as recorded, but at that mean rate."""
    lines = plan.lines
    recorded_s = (lines[-1].timestamp_ms - lines[0].timestamp_ms) / 1000.0
    scale = 1.0
    if rate is not None and recorded_s > 0:
        scale = rate * recorded_s / len(lines)
    return trace_asks(
        lines,
        vocab_size=shape.vocab_size,
        block_size=shape.block_size,
        seed=plan.seed,
        scale=scale,
    )


def _meta(config: EngineConfig, plan: GridPlan, command: str) -> dict[str, Any]:
    return {
        "tool": "wavepp bench grid",
        **machine_meta(),
        "emulated": True,
        "virtual_clock": True,
        "round_delay_s": ROUND_DELAY_S,
        "wave_delay_s": WAVE_DELAY_S,
        "command": command,
        "config": config.model_dump(mode="json"),
        "trace_requests": len(plan.lines),
        "reuse_frac": plan.reuse_frac,
        "num_prefixes": plan.num_prefixes,
        "seed": plan.seed,
    }
