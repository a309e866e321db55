"""Fills one wave with spans of admitted requests, first come first served.

Owns: which tokens go into a wave of a given budget. May not: choose the budget, number the wave,
know stages. Source: paper, section on wave planning. Legend: B tokens in a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wavepp.units import RequestId, align_down


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one admitted request still has to compute: [start, start + remaining).

    `solo` pieces share their wave with nobody (a request that was in a failed wave is tried again
    alone, so that the next failure says who is at fault).
    """

    request_id: RequestId
    start: int
    remaining: int
    solo: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A span taken from a piece; `final`: it takes the piece to its end."""

    request_id: RequestId
    start: int
    length: int
    final: bool


def pack_greedy(pieces: Sequence[Piece], *, budget: int, block_size: int) -> tuple[Cut, ...]:
    """Spans of at most `budget` tokens together, taken from the pieces in order.

    A span that is not its piece's end ends at a multiple of B when it can: the first span of a wave
    is cut anywhere when the budget holds no boundary (progress before alignment), later spans are
    left out instead. A later whole piece may fill what an aligned cut left.
    """
    assert budget > 0, budget
    cuts: list[Cut] = []
    room = budget
    for piece in pieces:
        assert piece.remaining > 0, piece
        if room == 0 or (piece.solo and cuts):
            break
        length = _span_length(piece, room=room, block_size=block_size, first=not cuts)
        if length > 0:
            final = length == piece.remaining
            cuts.append(
                Cut(request_id=piece.request_id, start=piece.start, length=length, final=final)
            )
            room -= length
        if piece.solo:
            break
    assert cuts or not pieces, "work waits and nothing was planned"
    assert room >= 0, room
    return tuple(cuts)


def _span_length(piece: Piece, *, room: int, block_size: int, first: bool) -> int:
    if piece.remaining <= room:
        return piece.remaining
    aligned = align_down(piece.start + room, block_size) - piece.start
    if aligned > 0:
        return aligned
    return room if first else 0
