"""Where commands print: a rich console that is wide enough for a table when nobody watches."""

from __future__ import annotations

from rich.console import Console

LOG_COLUMNS = 140


def open_console(*, stderr: bool = False) -> Console:
    """The terminal as it is; a file or a pipe gets LOG_COLUMNS, so that no table is cut."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=LOG_COLUMNS)
