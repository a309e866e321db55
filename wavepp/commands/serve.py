"""`wavepp serve`: the server on this process' Ray, or on RAY_ADDRESS, until it is told to stop.

On SIGTERM or Ctrl-C requests in flight may finish (`shutdown_timeout_s`), then nothing is left.
While it starts, both end it at once.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import typer

from wavepp.config import EngineConfig
from wavepp.console import open_console
from wavepp.engine import check_folder
from wavepp.errors import ConfigError

NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def run(config: EngineConfig, options: dict[str, Any], *, host: str, port: int) -> None:
    """Serves until SIGTERM or Ctrl-C.

    Args:
        options: fields of ServeOptions.

    Raises:
        ConfigError: the configuration or checkpoint can't be used, or the port is taken.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)} not found: pip install 'wavepp[serve]'")
    check_folder(config)
    from wavepp.serve.options import ServeOptions
    from wavepp.serve.running import RunningServer

    console = open_console(stderr=True)
    told = threading.Event()
    with _interrupted_by(signal.SIGTERM):
        server = RunningServer.start(config, ServeOptions(**options), host=host, port=port)
        _on_stop(told)
    try:
        line = f"serving {config.model_name} at {server.url}"
        console.print(line, soft_wrap=True, markup=False)
        told.wait()
        console.print("stopping")
    finally:
        server.stop()


@contextmanager
def _interrupted_by(number: signal.Signals) -> Iterator[None]:
    """Lets a signal end what runs in order, with the status that a shell gives it.

    Ray, when it starts, puts a handler in the place of ours: it exits too, with whatever status.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        sys.exit(number)

    signal.signal(number, stop)
    try:
        yield
    except SystemExit:
        raise typer.Exit(128 + number) from None


def _on_stop(told: threading.Event) -> None:
    """SIGTERM and Ctrl-C end the wait; a second one does nothing more."""

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        told.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
