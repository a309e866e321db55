"""Where the recurrent layers of a wave find and leave their states.

A recurrent group keeps one state a slot instead of blocks a token. A span starts from a slot (or
from nothing), ends in a slot, and may leave copies of the state at positions inside it:

    read_slot -> | tokens ...      | tokens ...      | tokens ... | -> write_slot
                               offset -> unit    offset -> unit        (snapshots)

Slots and snapshot units are places in the same pools, so a request may start by reading a snapshot
and go on in a working slot of its own: no copy is needed to restore. All recurrent layers of a
stage use the same slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CHUNK = 64  # tokens the delta rule takes at once, counted from the start of the sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSlots:
    """The slots of one span.

    Attributes:
        read_slot: holds the state after all tokens before the span; None: there are none.
        write_slot: gets the state after the span; may be the read slot.
        snapshots: (offset, unit), ascending: `unit` gets the state after the span's first
            `offset` tokens, 0 < offset <= length. Offsets that make start + offset a multiple of
            64 keep the result independent of how a prompt was cut into spans.
    """

    read_slot: int | None
    write_slot: int
    snapshots: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class StateSpan:
    """A span as recurrent kernels see it: flat rows [row, row + length) from position `start`."""

    row: int
    start: int
    length: int
    slots: RecurrentSlots


def plan_states(
    extents: Sequence[tuple[int, int]], slots: Sequence[RecurrentSlots]
) -> tuple[StateSpan, ...]:
    """The spans of a wave with their slots; `extents`: (start, length) in flat row order."""
    spans, row = [], 0
    written: set[int] = set()
    for (start, length), here in zip(extents, slots, strict=True):
        offsets = [offset for offset, _ in here.snapshots]
        assert offsets == sorted(set(offsets)), offsets
        assert all(0 < offset <= length for offset in offsets), (offsets, length)
        assert (here.read_slot is None) == (start == 0), (here, start)
        units = [here.write_slot, *(unit for _, unit in here.snapshots)]
        assert len(set(units)) == len(units), units
        assert written.isdisjoint(units), "two spans of a wave write to one slot"
        written.update(units)
        spans.append(StateSpan(row, start, length, here))
        row += length
    return tuple(spans)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [row, row + length) of span `span`; `keep`: the snapshot unit after it, if any."""

    span: int
    row: int
    length: int
    keep: int | None
    is_first: bool
    is_last: bool


def chunks_of(spans: Sequence[StateSpan]) -> list[Chunk]:
    """All spans cut at multiples of 64 positions and at their snapshots."""
    chunks = []
    for index, span in enumerate(spans):
        units = dict(span.slots.snapshots)
        first = CHUNK - span.start % CHUNK
        cuts = sorted({*range(first, span.length, CHUNK), *units, span.length})
        begin = 0
        for end in cuts:
            is_last = end == span.length
            place = (span.row + begin, end - begin, units.get(end))
            chunks.append(Chunk(index, *place, begin == 0, is_last))
            begin = end
    return chunks
