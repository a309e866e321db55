"""From timed runs to the rows of a report: medians, shares of time, sizes. Pure."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from wavepp.bench.closed_loop import LoopRun

Row = dict[str, Any]
NO_WAVE = "no_wave"
GOOD_HIT = 0.8  # of the expected prefix
DRIVER_CORES_MAX = 0.5  # beyond it the machine that measures may be what is measured


def make_row(cell: Mapping[str, Any], runs: Sequence[LoopRun], baseline_s: Sequence[float]) -> Row:
    """One row: medians over the runs of a cell, with their least and most throughput.

    Seconds and rates are the devices': with a time scale, not the clock's. Shares, counts, cores
    and admission times are what they were here.

    Args:
        cell: workload, concurrency, prompt_len and so on; copied into the row.
        baseline_s: seconds the baseline took for the same tokens, one a run; may be empty.
    """
    assert runs, cell
    rates = [run.input_tokens / run.device_s for run in runs]
    row: Row = {
        **cell,
        "requests": len(runs[0].results),
        "repeats": len(runs),
        "input_tok_s": statistics.median(rates),
        "input_tok_s_min": min(rates),
        "input_tok_s_max": max(rates),
        "computed_tok_s": _median(
            [(run.input_tokens - run.cached_tokens) / run.device_s for run in runs]
        ),
        "p50_s": _median([quantile(run.latencies_s, 0.50) for run in runs]),
        "p95_s": _median([quantile(run.latencies_s, 0.95) for run in runs]),
        "cached_frac": _median([run.cached_tokens / max(run.input_tokens, 1) for run in runs]),
        "stage_busy": _by_stage(runs, _busy),
        "gaps": _gaps(runs),
        "accounted": _by_stage(runs, _accounted),
        "waves": _waves(runs),
        "rounds": _median([run.after.rounds - run.before.rounds for run in runs]),
        "admission_ms_p50": _admission_ms(runs),
        "expected_frac": _expected(runs),
        "good_hit_rate": _good_hits(runs),
        "aborted": _median([len(run.results) - len(run.done) for run in runs]),
        "capacity_refusals": _median(
            [run.after.capacity_refusals - run.before.capacity_refusals for run in runs]
        ),
        "rolled_back": _median([run.after.rolled_back - run.before.rolled_back for run in runs]),
        "driver_cores": _median([_driver_cores(run) for run in runs]),
        "stage_cores": _by_stage(runs, _stage_cores),
        "foreign_cores": _median([run.foreign_cores for run in runs]),
    }
    row["driver_bound"] = row["driver_cores"] > DRIVER_CORES_MAX
    if baseline_s:
        row["baseline"] = _baseline(runs, rates, baseline_s)
    return row


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which that share of the values lies (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _by_stage(runs: Sequence[LoopRun], shares: Callable[[LoopRun, int], float]) -> list[float]:
    """For each stage the median over the runs of a share of their wall time."""
    stages = range(len(runs[0].after.stages))
    return [_median([shares(run, stage) for run in runs]) for stage in stages]


def _busy(run: LoopRun, stage: int) -> float:
    before, after = run.before.stages[stage], run.after.stages[stage]
    return (after.busy_s - before.busy_s) / run.read_s


def _waited(run: LoopRun, stage: int, reason: str) -> float:
    """The share of a run in which a stage waited for one reason.

    A stage notes a wait when the wave it waited for has ended; what it has waited since the latest
    one is its idle time, which counts as waiting for a wave.
    """
    before, after = run.before.stages[stage], run.after.stages[stage]
    waited_s = after.wait_s.get(reason, 0.0) - before.wait_s.get(reason, 0.0)
    if reason == NO_WAVE:
        waited_s += after.idle_s - before.idle_s
    return waited_s / run.read_s


def _accounted(run: LoopRun, stage: int) -> float:
    """Busy and all gaps together: 1 when every moment of the run is known."""
    reasons = run.after.stages[stage].wait_s
    return _busy(run, stage) + sum(_waited(run, stage, reason) for reason in reasons)


def _driver_cores(run: LoopRun) -> float:
    return (run.after.driver_cpu_s - run.before.driver_cpu_s) / run.read_s


def _stage_cores(run: LoopRun, stage: int) -> float:
    return (run.after.stages[stage].cpu_s - run.before.stages[stage].cpu_s) / run.read_s


def _expected(runs: Sequence[LoopRun]) -> float | None:
    """The share of prompt tokens that was expected in the cache: what `cached_frac` would be with
    room for all of it. None: none was.
    """
    tokens = sum(run.expected[n] for run in runs if run.expected for n in run.done)
    return tokens / sum(run.input_tokens for run in runs) if tokens else None


def _good_hits(runs: Sequence[LoopRun]) -> float | None:
    """The share of requests whose expected prefix was reused to GOOD_HIT; None: none expected."""
    reused = [
        run.results[n].num_cached_tokens >= GOOD_HIT * run.expected[n]
        for run in runs
        for n in run.done
        if run.expected and run.expected[n]
    ]
    return sum(reused) / len(reused) if reused else None


def _gaps(runs: Sequence[LoopRun]) -> dict[str, list[float]]:
    """Why stages did not compute: reason -> share of the wall time, by stage."""
    reasons = sorted({reason for stage in runs[0].after.stages for reason in stage.wait_s})
    return {
        reason: _by_stage(runs, functools.partial(_waited, reason=reason)) for reason in reasons
    }


def _waves(runs: Sequence[LoopRun]) -> Row:
    """How many waves a run took, and the tokens in them (of the latest ones that are known)."""
    counts = [run.after.waves - run.before.waves for run in runs]
    sizes: list[int] = []
    for run, count in zip(runs, counts, strict=True):
        sizes += run.after.wave_tokens[-count:] if count else ()
    if not sizes:
        return {"count": _median(counts)}
    return {
        "count": _median(counts),
        "tokens_min": min(sizes),
        "tokens_p50": statistics.median(sizes),
        "tokens_max": max(sizes),
        "tokens_mean": statistics.fmean(sizes),
    }


def _admission_ms(runs: Sequence[LoopRun]) -> float | None:
    """Median milliseconds from arrival to admission; None when nobody noted them."""
    timings = [result.timings for run in runs for result in run.results]
    waits = [t.admitted_s - t.queued_s for t in timings if t.admitted_s is not None]
    return statistics.median(waits) * 1e3 if waits else None


def _baseline(runs: Sequence[LoopRun], rates: Sequence[float], seconds: Sequence[float]) -> Row:
    theirs = [run.input_tokens / took for run, took in zip(runs, seconds, strict=True)]
    return {
        "input_tok_s": statistics.median(theirs),
        "input_tok_s_min": min(theirs),
        "input_tok_s_max": max(theirs),
        "ratio": statistics.median(rates) / statistics.median(theirs),
    }
