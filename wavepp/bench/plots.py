"""Figures of measurements: throughput by load, waves by stage, wave sizes over time.

Owns: what figures look like. matplotlib is an extra (`wavepp[plots]`) and imported when a figure is
asked for. Waves come from the engine's trace.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wavepp.actors.story import Trace, Wave, read_trace
from wavepp.bench.report import Row
from wavepp.config import EngineConfig
from wavepp.errors import ConfigError

GANTT_WAVES_MAX = 120  # more are not told apart
FORMATS = (".png", ".svg", ".pdf")


def check_plot_file(file: Path) -> None:
    """
    Raises:
        ConfigError: there is no matplotlib, or nowhere to write.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plot: matplotlib is missing; install wavepp[plots]")
    if file.suffix not in FORMATS:
        raise ConfigError(f"plot {file}: name it with one of {', '.join(FORMATS)}")
    if not file.parent.is_dir():
        raise ConfigError(f"plot: folder {file.parent} does not exist")


@contextmanager
def traced(config: EngineConfig, plot_file: Path | None) -> Iterator[EngineConfig]:
    """The configuration with a trace, if a plot needs one and there is none yet."""
    if plot_file is None or config.trace is not None:
        yield config
        return
    with tempfile.TemporaryDirectory(prefix="wavepp-plot-") as folder:
        yield config.model_copy(update={"trace": str(Path(folder) / "trace.jsonl")})


def plot_throughput(report: Mapping[str, Any], config: EngineConfig, file: Path) -> None:
    """Three figures in one file: throughput by load; the latest waves by stage; wave sizes."""
    assert config.trace is not None, "see traced()"
    trace = read_trace(Path(config.trace))
    figure, axes = _figure(3, _title(report, config))
    _throughput(axes[0], report["rows"])
    waves = _latest(trace)
    _gantt(axes[1], waves, config.time_scale)
    _sizes(axes[2], waves, config.time_scale)
    figure.savefig(file, dpi=120)


def plot_gantts(traces: Mapping[str, Path], time_scale: float, title: str, file: Path) -> None:
    """Waves by stage of several runs below each other, on one scale of time."""
    figure, axes = _figure(len(traces), title)
    longest = 0.0
    for ax, (name, path) in zip(axes, traces.items(), strict=True):
        waves = _latest(read_trace(path))
        _gantt(ax, waves, time_scale)
        ax.set_title(name, fontsize=9)
        longest = max(longest, ax.get_xlim()[1])
    for ax in axes:
        ax.set_xlim(0.0, longest)
    figure.savefig(file, dpi=120)


def _figure(rows: int, title: str) -> tuple[Any, Sequence[Any]]:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(rows, 1, figsize=(11, 3.2 * rows), layout="constrained")
    figure.suptitle(title, fontsize=10)
    return figure, [axes] if rows == 1 else list(axes)


def _title(report: Mapping[str, Any], config: EngineConfig) -> str:
    device = config.device if config.cost_model is None else f"emulated {config.cost_model}"
    stages = config.pipeline_parallel_size
    return f"WavePP {report['meta']['wavepp']}, {device}, P = {stages}, planner {config.planner}"


def _throughput(ax: Any, rows: Sequence[Row]) -> None:
    series: dict[str, list[Row]] = {}
    for row in rows:
        series.setdefault(row["workload"], []).append(row)
    for name, cells in series.items():
        loads = [str(cell.get("request_rate") or cell["concurrency"]) for cell in cells]
        rates = [cell["input_tok_s"] for cell in cells]
        low = [cell["input_tok_s"] - cell["input_tok_s_min"] for cell in cells]
        high = [cell["input_tok_s_max"] - cell["input_tok_s"] for cell in cells]
        ax.errorbar(loads, rates, yerr=[low, high], marker="o", capsize=3, label=name)
    ax.set_xlabel("requests a second" if "request_rate" in rows[0] else "concurrency")
    ax.set_ylabel("input tokens/s")
    ax.set_ylim(bottom=0)
    ax.legend()
    ax.grid(alpha=0.3)


def _latest(trace: Trace) -> list[Wave]:
    """The last waves that every stage has told of."""
    whole = [wave for wave in trace.waves.values() if len(wave.stages) == trace.num_stages]
    if not whole:
        raise ConfigError("plot: no wave went through all stages")
    return whole[-GANTT_WAVES_MAX:]


def _gantt(ax: Any, waves: Sequence[Wave], time_scale: float) -> None:
    """Each wave a bar a stage; a colour a request (the first of the wave)."""
    from matplotlib import colormaps

    begin_s = min(times.forward_from_s for times in waves[0].stages)
    colours = colormaps["tab20"].colors  # type: ignore[attr-defined]
    places = {name: n for n, name in enumerate(dict.fromkeys(w.spans[0][0] for w in waves))}
    for wave in waves:
        colour = colours[places[wave.spans[0][0]] % len(colours)]
        for times in wave.stages:
            from_s = (times.forward_from_s - begin_s) / time_scale
            long_s = (times.done_s - times.forward_from_s) / time_scale
            ax.barh(times.stage, long_s, left=from_s, height=0.8, color=colour, linewidth=0)
    ax.set_ylabel("stage")
    ax.set_yticks(range(len(waves[0].stages)))
    ax.invert_yaxis()
    ax.set_xlabel("seconds")
    ax.margins(x=0)


def _sizes(ax: Any, waves: Sequence[Wave], time_scale: float) -> None:
    begin_s = waves[0].launched_s
    at_s = [(wave.launched_s - begin_s) / time_scale for wave in waves]
    ax.plot(at_s, [wave.num_tokens for wave in waves], ".", markersize=4)
    ax.set_xlabel("launched, seconds")
    ax.set_ylabel("tokens in a wave")
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.3)
