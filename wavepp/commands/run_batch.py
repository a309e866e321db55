"""`wavepp run-batch`: a BatchRun on an Engine, told on standard error.

Ctrl-C and SIGTERM stop it in order: the engine is closed, and the output can be resumed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import typer
from rich.console import Console

from wavepp.batch.files import PIPE
from wavepp.batch.progress import BarProgress, LineProgress, summary_table
from wavepp.batch.runner import BatchReport, BatchRun, Progress
from wavepp.config import EngineConfig
from wavepp.console import open_console
from wavepp.engine import Engine, check_folder


def run(config: EngineConfig, source: str, target: str, *, resume: bool) -> None:
    """Runs the batch to its end and prints a summary.

    Raises:
        ConfigError: a file, the configuration or the checkpoint can't be used.
        EngineDeadError: the pipeline stopped.
        KeyboardInterrupt, typer.Exit: it was told to stop; the output can be resumed.
    """
    check_folder(config)
    batch = BatchRun(config, source, target, resume=resume)
    console = open_console(stderr=True)
    if batch.is_finished():
        report = batch.finish_without_engine()
    else:
        if target == PIPE:
            batch.write_to(_own_stdout())
        try:
            report = asyncio.run(_answer(batch, console))
        except asyncio.CancelledError:  # by SIGTERM; asyncio makes a KeyboardInterrupt of Ctrl-C
            raise typer.Exit(128 + signal.SIGTERM) from None
    console.print(summary_table(report))


async def _answer(batch: BatchRun, console: Console) -> BatchReport:
    _cancel_on_sigterm()
    async with Engine(batch.config) as engine:
        _cancel_on_sigterm()  # Ray has put a handler of its own over ours meanwhile
        progress: Progress = BarProgress(console) if console.is_terminal else LineProgress(console)
        try:
            return await batch.run(engine, progress)
        finally:
            progress.close()


def _cancel_on_sigterm() -> None:
    """Makes SIGTERM cancel the current task, so that it ends in order."""
    task = asyncio.current_task()
    assert task is not None

    def stop() -> None:
        signal.alarm(0)  # Ray's handler, where it came first, would abort us within 3 s
        task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)


def _own_stdout() -> int:
    """Keeps standard output for answers: whatever else is printed there goes to standard error."""
    sys.stdout.flush()
    own = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return own
