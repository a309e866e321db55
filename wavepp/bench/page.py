"""Sections of a Markdown page that a command writes: each stands between two marks of its name."""

from __future__ import annotations

from pathlib import Path

from wavepp.errors import ConfigError


def marks(name: str) -> tuple[str, str]:
    """The lines before and after a section."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def put_section(page: Path, name: str, section: str) -> None:
    """Puts a section between its marks; the rest of the page stays.

    Raises:
        ConfigError: the page can't be read or written, or lacks the marks.
    """
    begin, end = marks(name)
    try:
        text = page.read_text(encoding="utf-8")
        if begin not in text or end not in text:
            raise ConfigError(f"results {page}: needs the lines {begin} and {end}")
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        page.write_text(f"{before}{begin}\n{section}{end}{after}", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"results {page}: {error.strerror}") from None
