"""`wavepp top`: what it shows comes from the text a server's metrics really have."""

from __future__ import annotations

import http.server
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from test_cli import wavepp_cli

from wavepp.commands.top import Reading, parse, view
from wavepp.config import EngineConfig
from wavepp.errors import ConfigError
from wavepp.requests import EngineStats, StageStats
from wavepp.serve.metrics import Metrics

STATS = EngineStats(
    requests_waiting=7,
    requests_running=3,
    requests_finished=0,
    prompt_tokens=0,
    cached_tokens=0,
    computed_tokens=1000,
    waves=10,
    ring_depth=4,
    ring_occupancy=2,
    wall_s=1.0,
    prefix_queries=1000,
    prefix_hits=400,
    stages=(
        StageStats(stage=0, layers=(0, 2), busy_s=1.0, blocks_total=10, blocks_used=5),
        StageStats(stage=1, layers=(2, 4), busy_s=2.0, blocks_total=10, escrow_blocks=6),
    ),
)
LATER = replace(
    STATS,
    computed_tokens=5000,
    waves=30,
    prefix_queries=2000,
    prefix_hits=1300,
    stages=(replace(STATS.stages[0], busy_s=2.0), replace(STATS.stages[1], busy_s=2.5)),
)


def metrics_text(stats: EngineStats) -> str:
    return Metrics(EngineConfig(model="m")).text(stats).decode()


def shown(before: Reading, now: Reading) -> str:
    console = Console(width=100)
    with console.capture() as captured:
        console.print(view(before, now))
    return captured.get()


def test_rates_are_those_between_two_readings() -> None:
    before = replace(parse(metrics_text(STATS), "u"), at_s=10.0)
    now = replace(parse(metrics_text(LATER), "u"), at_s=12.0)
    text = shown(before, now)
    words = {line.rsplit(maxsplit=1)[0].strip(): line.split()[-1] for line in text.splitlines()}
    assert (words["running"], words["waiting"], words["waves in the ring"]) == ("3", "7", "2")
    assert words["waves/s"] == "10.0"
    assert words["computed tokens/s"] == "2,000"
    assert words["hit rate"] == "90.0%"
    assert words["hit rate since start"] == "65.0%"
    first, second = (line.split() for line in text.splitlines()[-2:])
    assert (first[0], first[1], first[-2:]) == ("0", "50%", ["50%", "0"])
    assert (second[0], second[1], second[-2:]) == ("1", "25%", ["0%", "6"])


def test_a_server_that_started_anew_shows_no_negative_rates() -> None:
    before = replace(parse(metrics_text(LATER), "u"), at_s=10.0)
    now = replace(parse(metrics_text(STATS), "u"), at_s=12.0)
    assert not re.search(r"-\d", shown(before, now))


@pytest.mark.parametrize("text", ["", "other_metric 1\n", "<html>no</html>", "a{b 1"])
def test_what_is_not_wavepps_is_said(text: str) -> None:
    with pytest.raises(ConfigError, match="no metrics of WavePP there"):
        parse(text, "u")


@contextmanager
def serving(text: str) -> Iterator[str]:
    """A server that answers every path with this text."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/metrics"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_command_prints_one_look_and_ends() -> None:
    with serving(metrics_text(STATS)) as url:
        done = wavepp_cli("top", url, "--once", "--every", "0.1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "waves in the ring" in done.stdout


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/", "nonsense", "http://[bad"])
def test_an_address_without_a_server_is_one_line(url: str) -> None:
    done = wavepp_cli("top", url, "--once")
    assert done.returncode == 2
    assert done.stderr.startswith(f"wavepp: top {url}")
    assert done.stderr.count("\n") == 1
