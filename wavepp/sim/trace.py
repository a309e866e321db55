"""One aligned line an event, and the digest of them all.

Owns: the form of a line. May not: decide what is worth a line. Two runs of one seed are equal when
their digests are.
"""

from __future__ import annotations

from collections.abc import Callable

import xxhash

HEADING = f"{'time':>11}  {'place':<8} {'what':<9} {'which':<12} detail"


class Trace:
    """Lines, in order.

    Args:
        show: where they go; None: they only count for the digest.
    """

    def __init__(self, show: Callable[[str], None] | None = None) -> None:
        self._show = show
        self._digest = xxhash.xxh3_64()
        self._recent: list[str] = []

    def line(self, now: float, place: str, what: str, which: str, detail: str = "") -> None:
        """One event."""
        text = f"{now:11.6f}  {place:<8} {what:<9} {which:<12} {detail}"
        self._digest.update(text.encode())
        if self._show is not None:
            self._show(text)

    @property
    def digest(self) -> str:
        """Of everything so far, in hexadecimal."""
        return self._digest.hexdigest()
