"""From timed runs to the rows of a report: medians, shares of time, sizes. Pure."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from wavepp.bench.closed_loop import LoopRun

Row = dict[str, Any]
NO_WAVE = "no_wave"


def make_row(cell: Mapping[str, Any], runs: Sequence[LoopRun], baseline_s: Sequence[float]) -> Row:
    """One row: medians over the runs of a cell, with their least and most throughput.

    Args:
        cell: workload, concurrency, prompt_len and so on; copied into the row.
        baseline_s: seconds the baseline took for the same tokens, one a run; may be empty.
    """
    assert runs, cell
    rates = [run.input_tokens / run.wall_s for run in runs]
    row: Row = {
        **cell,
        "requests": len(runs[0].results),
        "repeats": len(runs),
        "input_tok_s": statistics.median(rates),
        "input_tok_s_min": min(rates),
        "input_tok_s_max": max(rates),
        "computed_tok_s": _median(
            [(run.input_tokens - run.cached_tokens) / run.wall_s for run in runs]
        ),
        "p50_s": _median([quantile(run.completions_s, 0.50) for run in runs]),
        "p95_s": _median([quantile(run.completions_s, 0.95) for run in runs]),
        "cached_frac": _median([run.cached_tokens / run.input_tokens for run in runs]),
        "stage_busy": _by_stage(runs, _busy),
        "gaps": _gaps(runs),
        "waves": _waves(runs),
        "rounds": _median([run.after.rounds - run.before.rounds for run in runs]),
        "admission_ms_p50": _admission_ms(runs),
        "foreign_cores": _median([run.foreign_cores for run in runs]),
    }
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
    return (after.busy_s - before.busy_s) / run.wall_s


def _waited(run: LoopRun, stage: int, reason: str) -> float:
    """The share of a run in which a stage waited for one reason.

    A stage notes a wait when it ends, so the first one for a wave began before the run did: waiting
    for a wave can't be more than what is left beside computing and the other waits.
    """
    before, after = run.before.stages[stage].wait_s, run.after.stages[stage].wait_s
    share = (after.get(reason, 0.0) - before.get(reason, 0.0)) / run.wall_s
    if reason != NO_WAVE:
        return share
    others = sum(_waited(run, stage, other) for other in after if other != NO_WAVE)
    return max(0.0, min(share, 1.0 - _busy(run, stage) - others))


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
