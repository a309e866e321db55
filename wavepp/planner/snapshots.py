"""Where inside a span the recurrent state is to be saved.

Owns: the offsets. May not: cut a span (a span is packed before anyone asks for snapshots), or know
whether there is room to keep one. Source: paper, section on recurrent snapshots; the recurrent
kernels run in chunks of 64 tokens and their result does not depend on a split at such a boundary.

    span:  start |---- segment ----|---- segment ----|---- segment ----| end
    state saved:                inner[0]          inner[1]        (at_end)

Only the recurrent operation runs in segments; everything else sees one span.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from wavepp.units import align_down, align_up

OFFSET_STEP = 64
"""Inner offsets are multiples of this, counted from the span's start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotWants:
    """Positions at which a request's state is worth keeping, in tokens from its prompt's start.

    Attributes:
        interval: every so many tokens, at the next place that is allowed; None: no such.
        exact: positions wanted as they are (the tail B * floor((n-1)/B), junctions); where that is
            not allowed, the nearest allowed place before (a later one would be of no use).
    """

    interval: int | None = None
    exact: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPlaces:
    """Where one span saves its state.

    Attributes:
        inner: offsets from the span's start, ascending, each in (0, length), multiples of 64.
        at_end: also when the span ends.
    """

    inner: tuple[int, ...] = ()
    at_end: bool = False

    def positions(self, start: int, length: int) -> tuple[int, ...]:
        """The same as positions in the prompt, ascending."""
        ends = (start + length,) if self.at_end else ()
        return (*(start + offset for offset in self.inner), *ends)


def place_snapshots(
    start: int, length: int, wants: SnapshotWants, *, block_size: int, step: int = OFFSET_STEP
) -> SnapshotPlaces:
    """Places for the span [start, start + length), at block boundaries only.

    A place is the span's end, or `step` multiples from its start; in both cases a multiple of B.
    """
    assert length > 0, (start, length)
    grid = _Grid(start, length, block_size, step)
    places = {grid.at_or_after(point) for point in _interval_points(start, length, wants.interval)}
    places |= {grid.at_or_before(p) for p in wants.exact if start < p <= start + length}
    end = start + length
    found = sorted(place for place in places if place is not None)
    return SnapshotPlaces(
        inner=tuple(place - start for place in found if place < end),
        at_end=end in found,
    )


def _interval_points(start: int, length: int, interval: int | None) -> Iterable[int]:
    if interval is None:
        return ()
    assert interval > 0, interval
    first = (start // interval + 1) * interval
    return range(first, start + length + 1, interval)


class _Grid:
    """The positions of one span where a snapshot may be taken."""

    def __init__(self, start: int, length: int, block_size: int, step: int) -> None:
        self._start = start
        self._end = start + length
        self._ends_on_block = self._end % block_size == 0
        # Offsets o with o % step == 0 and (start + o) % B == 0: an arithmetic progression, or none.
        self._period = math.lcm(block_size, step)
        candidates = range(0, self._period, step)
        self._first = next((o for o in candidates if (start + o) % block_size == 0), None)

    def at_or_after(self, position: int) -> int | None:
        """The first place at or after a position of the span; None: the span has none there."""
        if self._first is not None:
            base = self._start + self._first
            place = base + align_up(max(position - base, 0), self._period)
            if self._start < place < self._end:
                return place
        return self._end if self._ends_on_block else None

    def at_or_before(self, position: int) -> int | None:
        """The last place in (start, position]; None: the span has none there."""
        if position == self._end and self._ends_on_block:
            return position
        base = self._start + (self._first or 0)
        if self._first is None or position < base:
            return None
        place = base + align_down(position - base, self._period)
        return place if self._start < place < self._end else None
