"""Sections of a Markdown page that a command writes: each stands between two marks of its name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from wavepp.errors import ConfigError


def marks(name: str) -> tuple[str, str]:
    """The lines before and after a section."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def put_sections(page: Path, sections: Mapping[str, str]) -> None:
    """Puts sections, by name, between their marks; the rest of the page stays. All or none.

    Raises:
        ConfigError: the page can't be read or written, or lacks marks.
    """
    try:
        text = page.read_text(encoding="utf-8")
        for name, section in sections.items():
            begin, end = marks(name)
            if begin not in text or end not in text:
                raise ConfigError(f"results {page}: needs the lines {begin} and {end}")
            before, _, rest = text.partition(begin)
            _, _, after = rest.partition(end)
            text = f"{before}{begin}\n{section}{end}{after}"
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"results {page}: {error.strerror}") from None
