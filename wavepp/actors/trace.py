"""The trace: facts, effects and waves as JSON lines, when the configuration names a file.

Owns: the file, and what a record looks like. May not: hold up the pipeline for more than a write.
Prompts are written as their length only: a trace can be shown to others.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from wavepp.errors import ConfigError


class TraceWriter:
    """Appends one JSON object a line: {"t": seconds, "kind": ..., ...}."""

    def __init__(self, path: str) -> None:
        """
        Raises:
            ConfigError: the file can't be written.
        """
        try:
            self._file: TextIO = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  # close() is ours
        except OSError as error:
            raise ConfigError(f"trace {path}: {error.strerror}") from None

    def write(self, kind: str, now: float, value: object) -> None:
        """Writes one record; `value` is a dataclass or plain data."""
        record = {"t": round(now, 6), "kind": kind, "value": plain(value)}
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def flush(self) -> None:
        """Makes what was written visible to readers."""
        self._file.flush()

    def close(self) -> None:
        """Writes out what is buffered."""
        self._file.close()


def plain(value: object) -> Any:
    """JSON-ready form: dataclasses and named tuples as {"type": name, fields...}, arrays as
    {"len": n}."""
    if (names := field_names(value)) is not None:
        fields = {name: plain(len_only(name, getattr(value, name))) for name in names}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, np.ndarray):
        return {"len": len(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return type(value).__name__


def field_names(value: object) -> Sequence[str] | None:
    """Of a dataclass or a named tuple; None: it is neither."""
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    return getattr(value, "_fields", None) if isinstance(value, tuple) else None


def len_only(name: str, value: object) -> object:
    """A field's value; scores of a prompt name its tokens, so of those, too, only the length."""
    if name == "prompt_logprobs" and isinstance(value, tuple):
        return {"len": len(value)}
    return value
