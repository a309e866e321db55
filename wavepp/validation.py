"""Turns pydantic's complaints into one sentence: the field, the value, the nearest known name.

Owns no rules: the rules stand on the models (`EngineConfig`, `PrefillRequest`, the batch lines).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pydantic import ValidationError

VALUE_CHARS_MAX = 80


def nearest(name: str, known: Iterable[str]) -> str:
    """A question such as "; did you mean 'x'?" when some known name is close, else nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def shown(value: object) -> str:
    """The value as a user would recognise it, cut to a length that fits a line."""
    text = repr(value)
    return text if len(text) <= VALUE_CHARS_MAX else f"{text[:VALUE_CHARS_MAX]}..."


def first_problem(error: ValidationError, known: Iterable[str]) -> tuple[str, str | None]:
    """The first complaint as (sentence, field); the field is None when several fields disagree.

    An unknown name comes before all else: it is often the reason for a missing one.

    Args:
        error: what pydantic raised.
        known: the names that would have been accepted at the top level.
    """
    problems = error.errors(include_url=False)
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    where = ".".join(str(part) for part in problem["loc"])
    field = str(problem["loc"][0]) if problem["loc"] else None
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        return f"unknown field {where!r}{nearest(where, known)}", field
    if problem["type"] == "missing":
        return f"{where} is required", field
    if not where:
        return message, None
    return f"{where}: {message} (got {shown(problem['input'])})", field
