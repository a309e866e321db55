"""`wavepp trace`: a summary of a trace, the story of one request, and the file for Perfetto."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from wavepp.actors.perfetto import perfetto_events
from wavepp.actors.story import Request, Trace, read_trace
from wavepp.console import open_console
from wavepp.errors import ConfigError
from wavepp.validation import nearest

SLOWEST = 5


def run(path: Path, *, request: str | None, perfetto: Path | None) -> None:
    """Reads a trace and tells what was asked for.

    Raises:
        ConfigError: the file is no trace, the request is not in it, or the output can't be written.
    """
    if perfetto is not None and perfetto.exists() and perfetto.samefile(path):
        raise ConfigError(f"perfetto {perfetto}: is the trace itself")
    trace = read_trace(path)
    console = open_console()
    if request is not None:
        found = trace.named(request)
        if not found:
            known = [other.user_id for other in trace.requests.values()]
            raise ConfigError(
                f"request {request!r} is not among the {len(known)} of {path}"
                f"{nearest(request, known)}"
            )
        for one in found:
            tell_story(console, one)
    elif perfetto is None:
        tell_summary(console, trace)
    if trace.cut_short:
        open_console(stderr=True).print("the last line is incomplete and was left out")
    if perfetto is not None:
        _write(perfetto, trace)


def _write(path: Path, trace: Trace) -> None:
    text = json.dumps(perfetto_events(trace), separators=(",", ":")) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"perfetto {path}: {error.strerror}") from None
    open_console(stderr=True).print(
        f"{path}: open it at https://ui.perfetto.dev", highlight=False, soft_wrap=True
    )


def tell_story(console: Console, request: Request) -> None:
    """What happened to one request, with milliseconds since it arrived."""
    table = _table(f"{request.request_id}: {_ending(request)}")
    table.add_column("ms", justify="right")
    table.add_column("what happened", overflow="fold")
    for moment in request.moments:
        table.add_row(f"{(moment.at_s - request.arrived_s) * 1e3:,.3f}", moment.text)
    console.print(table)


def _ending(request: Request) -> str:
    took_s = request.took_s
    if took_s is None:
        return "not finished when the trace ends"
    waves = len(set(request.waves))
    return (
        f"{request.finish_reason} after {took_s * 1e3:,.1f} ms, {len(request.rounds)} rounds, "
        f"{waves} waves"
    )


def tell_summary(console: Console, trace: Trace) -> None:
    """The whole trace in a few numbers, and its slowest requests."""
    table = _table("trace")
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in _facts(trace).items():
        table.add_row(name, value)
    table.show_header = False
    console.print(table)
    ended = [request for request in trace.requests.values() if request.took_s is not None]
    if ended:
        console.print(_slowest(ended))


def _facts(trace: Trace) -> dict[str, str]:
    requests = list(trace.requests.values())
    reasons = Counter(request.finish_reason or "not finished" for request in requests)
    served = [request for request in requests if request.finish_reason in ("stop", "length")]
    prompt = sum(request.num_tokens for request in served)
    cached = sum(request.num_cached for request in served)
    facts = {
        "seconds": f"{trace.last_s - trace.first_s:,.3f}",
        "stages": str(trace.num_stages),
        "requests": f"{len(requests):,} ({', '.join(f'{c} {r}' for r, c in reasons.items())})",
        "prompt tokens served": f"{prompt:,}",
        "of them reused": f"{cached:,} ({cached / prompt:.1%})" if prompt else "0",
        "rounds": f"{len(trace.rounds):,}{_took('answered in', _round_ms(trace))}",
        "waves": f"{len(trace.waves):,}{_sizes(trace)}",
        "endpoints lowered": f"{sum(request.retries for request in requests):,}",
        "attempts undone": f"{sum(request.undone for request in requests):,}",
    }
    waits = [r.admitted_s - r.arrived_s for r in requests if r.admitted_s is not None]
    facts["admitted"] = f"{len(waits):,}{_took('after', [wait * 1e3 for wait in waits])}"
    return facts


def _round_ms(trace: Trace) -> list[float]:
    return [
        (round_.answered_s - round_.sent_s) * 1e3
        for round_ in trace.rounds.values()
        if round_.answered_s is not None
    ]


def _took(how: str, times_ms: list[float]) -> str:
    if not times_ms:
        return ""
    return f" ({how} {statistics.median(times_ms):,.2f} ms, at most {max(times_ms):,.2f})"


def _sizes(trace: Trace) -> str:
    sizes = [wave.num_tokens for wave in trace.waves.values()]
    if not sizes:
        return ""
    return f" ({statistics.median(sizes):,.0f} tokens, at most {max(sizes):,})"


def _slowest(ended: list[Request]) -> Table:
    table = _table("slowest requests")
    for name in ("request", "ended", "tokens", "reused", "admitted after ms", "took ms", "waves"):
        table.add_column(name, justify="left" if name in ("request", "ended") else "right")
    for request in sorted(ended, key=lambda one: -(one.took_s or 0.0))[:SLOWEST]:
        admitted_s, took_s = request.admitted_s, request.took_s
        assert took_s is not None, request
        table.add_row(
            request.request_id,
            request.finish_reason,
            f"{request.num_tokens:,}",
            f"{request.num_cached:,}",
            "" if admitted_s is None else f"{(admitted_s - request.arrived_s) * 1e3:,.2f}",
            f"{took_s * 1e3:,.2f}",
            str(len(set(request.waves))),
        )
    return table


def _table(title: str) -> Table:
    return Table(box=box.SIMPLE, title=title, title_justify="left")
