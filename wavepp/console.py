"""Where commands print: a rich console that is wide enough for a table when nobody watches."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

LOG_COLUMNS = 140


def open_console(*, stderr: bool = False) -> Console:
    """The terminal as it is; a file or a pipe gets LOG_COLUMNS, so that no table is cut."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=LOG_COLUMNS)


def print_under(console: Console, heading: str, table: Table) -> None:
    """A table under a line that names what a user named: whole, however narrow the table, and as
    it was written (a table's own title would be wrapped, and read as markup).
    """
    console.print(Text(heading, style="italic"), soft_wrap=True)
    console.print(table)
