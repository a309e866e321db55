"""Fills one wave with spans of admitted requests, first come first served.

Owns: which tokens go into a wave of a given budget. May not: choose the budget, number the wave,
know stages. Source: paper, section on maximum pipeline utilization. Legend: B tokens in a block; b
the wave's budget; b_min the smallest budget.

Where rules conflict, the earlier one wins:
    progress    the first piece always gets a span
    alignment   a span that is not its piece's end ends at a multiple of B
    tails       a cut leaves at least b_min/2 of its piece
    fragments   a half-full wave takes no part of a larger piece shorter than max(b_min, b/2)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

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


class Room(Protocol):
    """What one wave can still take. In tokens, in time, or both."""

    def tokens_for(self, piece: Piece) -> int:
        """Tokens of the piece that fit now, from its start; 0: the wave is full for it."""
        ...

    def take(self, cut: Cut) -> None:
        """The span is in the wave."""
        ...

    @property
    def is_half_full(self) -> bool:
        """At least half of what the wave can take is taken."""
        ...


class TokenRoom:
    """Room for `budget` tokens."""

    def __init__(self, budget: int) -> None:
        assert budget > 0, budget
        self.budget = budget
        self._used = 0

    def tokens_for(self, piece: Piece) -> int:
        """Alike for all pieces."""
        del piece
        return self.budget - self._used

    def take(self, cut: Cut) -> None:
        """The span is in the wave."""
        assert self._used + cut.length <= self.budget, (self._used, cut, self.budget)
        self._used += cut.length

    @property
    def is_half_full(self) -> bool:
        """At least b/2 tokens are taken."""
        return 2 * self._used >= self.budget


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingRules:
    """How pieces may be cut.

    Attributes:
        block_size: B.
        tail_tokens_min: b_min / 2, rounded up: a cut that leaves less is moved.
        fragment_tokens_min: max(b_min, b/2): a half-full wave takes no shorter part of a piece. 0:
            fragments of any size fill the wave.
    """

    block_size: int
    tail_tokens_min: int
    fragment_tokens_min: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One wave's spans, and the request that only the fragment rule kept out of it: the first whose
    fragment was left out would have taken the room, so the rule cost those behind it nothing.
    """

    cuts: tuple[Cut, ...]
    withheld: tuple[RequestId, ...] = ()


def pack_wave(
    pieces: Sequence[Piece],
    room: Room,
    rules: PackingRules,
    *,
    overdue: Collection[RequestId] = (),
) -> Packed:
    """Spans for one wave, in FCFS order of their pieces; never empty when there are pieces.

    Args:
        overdue: requests that no rule may hold back any longer.
    """
    cuts: list[Cut] = []
    withheld: tuple[RequestId, ...] = ()
    for piece in pieces:
        assert piece.remaining > 0, piece
        if piece.solo and cuts:
            break
        length = _cut_length(piece, room.tokens_for(piece), rules, first=not cuts)
        if _is_fragment(piece, length, room, rules) and piece.request_id not in overdue:
            withheld = withheld or (piece.request_id,)
        elif length > 0:
            cuts.append(_cut(piece, length))
            room.take(cuts[-1])
        if piece.solo:
            break
    assert cuts or not pieces, "work waits and nothing was planned"
    return Packed(cuts=tuple(cuts), withheld=withheld)


def _cut(piece: Piece, length: int) -> Cut:
    return Cut(
        request_id=piece.request_id,
        start=piece.start,
        length=length,
        final=length == piece.remaining,
    )


def _is_fragment(piece: Piece, length: int, room: Room, rules: PackingRules) -> bool:
    """The span would be a short part of a piece in a wave that is half full without it."""
    return 0 < length < min(piece.remaining, rules.fragment_tokens_min) and room.is_half_full


def _cut_length(piece: Piece, room: int, rules: PackingRules, *, first: bool) -> int:
    """Tokens to take: all, else up to a boundary that leaves no short tail, else to the last
    boundary, else (nothing would run) as many as there is room for.
    """
    if piece.remaining <= room:
        return piece.remaining
    last = align_down(piece.start + room, rules.block_size)
    if last > piece.start:
        spared = max(piece.start + piece.remaining - rules.tail_tokens_min, 0)
        moved = min(last, align_down(spared, rules.block_size))
        return (moved if moved > piece.start else last) - piece.start
    return max(room, 1) if first else 0
