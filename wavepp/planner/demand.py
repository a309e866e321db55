"""How much admitted work there is, in tokens and in pieces.

Owns: the facts a planner decides from. May not: decide, or keep them: the driver tells them anew
before every wave. Source: paper, section on maximum pipeline utilization. Legend: W tokens of
admitted work; b a wave budget in tokens.

    one admitted request, by position in its prompt:
    |---- older waves ----|---- newest chunk in the ring ----|---- remaining suffix ----|
                          chunk.start                        piece.start                 end

W counts the last two. Work in flight is counted so that the budget does not shrink merely because
chunks left the planner.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from wavepp.planner.packing import Piece
from wavepp.units import RequestId


class SpanLike(Protocol):
    """Tokens [start, start + length) of one request in one wave."""

    @property
    def request_id(self) -> RequestId:
        """Whose tokens."""
        ...

    @property
    def start(self) -> int:
        """First position."""
        ...

    @property
    def length(self) -> int:
        """How many tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The newest span of an admitted request that is still in the ring."""

    request_id: RequestId
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """All a planner is told before it plans one wave.

    Attributes:
        pieces: what admitted requests have not planned yet, FCFS; none is empty.
        chunks: of each admitted request its newest span in the ring, if it has one.
        ring_waves: waves in flight now.
        turn: grows by one with every ring completion and every arrival.
        in_admission: requests that hints, leases or votes are under way for: they may join a wave
            soon. (Not those that only wait for a lane.)
        behind: requests that wait behind those: nothing is under way for them.
    """

    pieces: tuple[Piece, ...]
    chunks: tuple[Chunk, ...] = ()
    ring_waves: int = 0
    turn: int = 0
    in_admission: int = 0
    behind: int = 0

    @property
    def tokens(self) -> int:
        """W."""
        return sum(self.lengths())

    def lengths(self) -> list[int]:
        """Tokens of every piece, those in flight last."""
        lengths = [piece.remaining for piece in self.pieces]
        lengths.extend(chunk.length for chunk in self.chunks)
        return lengths


def newest_chunks(waves: Iterable[Iterable[SpanLike]]) -> tuple[Chunk, ...]:
    """The newest span of each request in `waves` (oldest wave first), in order of that span's wave.

    Leave out spans of requests that are no longer admitted, and of attempts that were undone.
    """
    newest: dict[RequestId, Chunk] = {}
    for spans in waves:
        for span in spans:
            newest.pop(span.request_id, None)
            newest[span.request_id] = Chunk(
                request_id=span.request_id, start=span.start, length=span.length
            )
    return tuple(newest.values())
