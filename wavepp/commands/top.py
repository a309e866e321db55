"""`wavepp top URL`: what a server does now, from its metrics: queue, ring, stages, hit rate.

Rates are differences between two readings. Owns no engine: it needs nothing but the address.
"""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table

from wavepp.console import open_console
from wavepp.errors import ConfigError

PREFIX = "wavepp:"
TIMEOUT_S = 5.0
BAR_CELLS = 24

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """All metrics at one moment: (name without prefix, labels but the model's) -> value."""

    at_s: float
    values: Mapping[tuple[str, Labels], float]

    def get(self, name: str, **labels: str) -> float:
        """One value; 0 when the server does not tell it."""
        return self.values.get((name, tuple(sorted(labels.items()))), 0.0)

    def total(self, name: str) -> float:
        """The sum over all labels."""
        return sum(value for (found, _), value in self.values.items() if found == name)

    def stages(self) -> list[str]:
        """Labels of the stages, in order."""
        found = {dict(labels)["stage"] for _, labels in self.values if "stage" in dict(labels)}
        return sorted(found, key=int)


def run(url: str, *, api_key: str | None, every_s: float, once: bool) -> None:
    """Shows the server until Ctrl-C, or once over one interval.

    Raises:
        ConfigError: nothing that serves WavePP's metrics answers there.
    """
    console = open_console()
    before = read(url, api_key)
    if once:
        time.sleep(every_s)
        console.print(view(before, read(url, api_key)))
        return
    with Live(view(before, before), console=console, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(every_s)
                now = read(url, api_key)
                live.update(view(before, now), refresh=True)
                before = now
        except KeyboardInterrupt:
            return


def read(url: str, api_key: str | None) -> Reading:
    """The server's metrics now.

    Raises:
        ConfigError: it does not answer, or not with WavePP's metrics.
    """
    address = f"{url.rstrip('/')}/metrics"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        request = urllib.request.Request(address, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            text = answer.read().decode("utf-8")
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        raise ConfigError(f"top {url}: {getattr(error, 'reason', None) or error}") from None
    return parse(text, url)


def parse(text: str, url: str) -> Reading:
    """Prometheus' text as a reading.

    Raises:
        ConfigError: these are not WavePP's metrics.
    """
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[tuple[str, Labels], float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
                name = sample.name.removeprefix(PREFIX).removesuffix("_total")
                values[name, tuple(sorted(labels.items()))] = sample.value
    except ValueError:
        values = {}
    if not any(name == "num_requests_running" for name, _ in values):
        raise ConfigError(f"top {url}: no metrics of WavePP there")
    return Reading(time.monotonic(), values)


def view(before: Reading, now: Reading) -> RenderableType:
    """Two readings as tables."""
    return Group(_engine(before, now), _stages(before, now))


def _engine(before: Reading, now: Reading) -> Table:
    table = Table(title="engine", title_justify="left", show_header=False, box=None)
    table.add_column(justify="left")
    table.add_column(justify="right")
    queried = _rise(before, now, "prefix_cache_queries")
    hits = _rise(before, now, "prefix_cache_hits")
    lines = {
        "running": f"{now.get('num_requests_running'):,.0f}",
        "waiting": f"{now.get('num_requests_waiting'):,.0f}",
        "waves in the ring": f"{now.get('ring_occupancy'):,.0f}",
        "waves/s": f"{_rate(before, now, 'waves'):,.1f}",
        "input tokens/s": f"{_rate(before, now, 'prompt_tokens'):,.0f}",
        "computed tokens/s": f"{_rate(before, now, 'computed_tokens'):,.0f}",
        "hit rate": f"{hits / queried:.1%}" if queried else "-",
        "hit rate since start": _share(now, "prefix_cache_hits", "prefix_cache_queries"),
        "answers/s": f"{_rate(before, now, 'request_success'):,.1f}",
        "refused": f"{now.total('admission_rejections'):,.0f}",
        "leases": f"{now.get('leases'):,.0f}",
    }
    for name, value in lines.items():
        table.add_row(name, value)
    return table


def _stages(before: Reading, now: Reading) -> Table:
    table = Table(title="stages", title_justify="left", box=None)
    for heading in ("stage", "busy", "", "cache held", "escrow blocks"):
        table.add_column(heading, justify="left" if heading == "" else "right")
    for stage in now.stages():
        busy = _busy(before, now, stage)
        table.add_row(
            stage,
            "-" if busy is None else f"{busy:.0%}",
            "" if busy is None else "█" * round(busy * BAR_CELLS),
            f"{now.get('kv_cache_usage_perc', stage=stage):.0%}",
            f"{now.get('escrow_blocks', stage=stage):,.0f}",
        )
    return table


def _busy(before: Reading, now: Reading, stage: str) -> float | None:
    """Share of the time between the readings that a stage computed, from 0 (the server was started
    anew) to 1 (a wave that ends now counts whole). None: no time has passed."""
    spent = now.get("stage_busy_seconds", stage=stage) - before.get(
        "stage_busy_seconds", stage=stage
    )
    passed = now.at_s - before.at_s
    return min(max(spent / passed, 0.0), 1.0) if passed > 0 else None


def _rise(before: Reading, now: Reading, name: str) -> float:
    """How much a counter grew; a server that was started anew counts from 0."""
    return max(now.total(name) - before.total(name), 0.0)


def _rate(before: Reading, now: Reading, name: str) -> float:
    passed = now.at_s - before.at_s
    return _rise(before, now, name) / passed if passed > 0 else 0.0


def _share(now: Reading, part: str, whole: str) -> str:
    return f"{now.total(part) / now.total(whole):.1%}" if now.total(whole) else "-"
