"""Digests of prompts, kept where their cache blocks would be: they make the first token.

Owns: one number for every block, snapshot and working slot of the last stage, moved by the same
effects as cache content would be. The number of a block is the digest of the whole prefix up to the
last token written into it, so a wrong table, position or copy changes the answer.

    digest of t_0 .. t_(n-1) = sum of (t_i + 1) * K^(n-1-i), modulo 2^64
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from wavepp.cache.types import BringBack, Effect, Offload, RestoreSnapshot, ZeroSlot
from wavepp.control.work import GroupFacts, SpanWork

UInt64Array = npt.NDArray[np.uint64]

BITS = 64
K = 0x9E3779B97F4A7C15  # odd, so that it has an inverse
K_INVERSE = pow(K, -1, 1 << BITS)


class PromptDigests:
    """The digests that one stage keeps.

    Args:
        slots: working slots of recurrent groups.
    """

    def __init__(self, groups: Sequence[GroupFacts], *, block_size: int, slots: int) -> None:
        self._block_size = block_size
        self._units = {g.name: np.zeros(g.units, dtype=np.uint64) for g in groups}
        self._host = {g.name: np.zeros(g.host_units, dtype=np.uint64) for g in groups}
        self._paged = [g.name for g in groups if g.kind != "recurrent"]
        self._slots = {
            g.name: np.zeros(slots, dtype=np.uint64) for g in groups if g.kind == "recurrent"
        }
        self._powers = _powers(K, 1)
        self._inverse = _powers(K_INVERSE, 1)

    def materialize(self, effect: Effect) -> None:
        """Moves digests as the effect moves cache content."""
        match effect:
            case Offload(group=group, device=device, host=host):
                self._host[group][host] = self._units[group][device]
            case BringBack(group=group, host=host, device=device):
                self._units[group][device] = self._host[group][host]
            case RestoreSnapshot(group=group, snapshot=unit, slot=slot, from_host=from_host):
                held = self._host if from_host else self._units
                self._slots[group][slot] = held[group][unit]
            case ZeroSlot(group=group, slot=slot):
                self._slots[group][slot] = 0
            case _:
                raise TypeError(effect)

    def extend(self, span: SpanWork) -> int:
        """Takes the span's tokens in; the digest of the prompt up to the span's end.

        Raises:
            RuntimeError: the span's groups disagree about what stands before it.
        """
        offsets = self._offsets(span)
        digests = self._digests(self._before(span), span.token_ids, offsets)
        by_offset = dict(zip(offsets.tolist(), digests, strict=True))
        first = span.start // self._block_size
        ends = digests[: len(offsets) - len(span.snapshots)]
        for name in self._paged:
            table = span.block_tables[name]
            self._units[name][table[first : first + len(ends)]] = ends
        for order in span.snapshots:
            for group, unit in order.units.items():
                self._units[group][unit] = by_offset[order.position - span.start]
        last = by_offset[span.length]
        for held in self._slots.values():
            assert span.slot is not None, "a recurrent group needs a working slot"
            held[span.slot] = last
        return int(last)

    def _offsets(self, span: SpanWork) -> npt.NDArray[np.int64]:
        """Where digests are wanted: at the end of what the span writes into each block, then at the
        snapshots."""
        end = span.start + span.length
        size = self._block_size
        ends = np.arange((span.start // size + 1) * size, end + size, size)
        ends = np.minimum(ends, end) - span.start
        places = [order.position - span.start for order in span.snapshots]
        return np.concatenate([ends, np.array(places, dtype=np.int64)])

    def _before(self, span: SpanWork) -> int:
        """The digest of what stands before the span, as all groups have it."""
        if span.start == 0:
            return 0
        block = (span.start - 1) // self._block_size
        found = {
            name: int(self._units[name][span.block_tables[name][block]]) for name in self._paged
        }
        found |= {name: int(held[span.slot]) for name, held in self._slots.items()}
        if len(set(found.values())) != 1:
            raise RuntimeError(
                f"{span.request_id}: the cache before token {span.start} differs by group: {found}"
            )
        return next(iter(found.values()))

    def _digests(
        self, before: int, tokens: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64]
    ) -> UInt64Array:
        """K^j (before + sum over i < j of (t_i + 1) K^-(i+1)) at every offset j."""
        if len(tokens) >= len(self._powers):
            self._powers = _powers(K, len(tokens))
            self._inverse = _powers(K_INVERSE, len(tokens))
        terms = (tokens.astype(np.uint64) + np.uint64(1)) * self._inverse[1 : len(tokens) + 1]
        sums: UInt64Array = np.cumsum(terms, dtype=np.uint64)[offsets - 1]
        digests: UInt64Array = self._powers[offsets] * (sums + np.uint64(before))
        return digests


def token_of(digest: int, vocab_size: int) -> int:
    """The token that an emulated device says after a prompt of this digest."""
    return xxhash.xxh64_intdigest(digest.to_bytes(BITS // 8, "little")) % vocab_size


def digest_of(tokens: Sequence[int]) -> int:
    """The digest of a whole prompt, in plain sums; for whoever wants to check an answer."""
    digest = 0
    for token in tokens:
        digest = (digest * K + token + 1) % (1 << BITS)
    return digest


def _powers(base: int, count: int) -> UInt64Array:
    """base^0 .. base^count, modulo 2^64."""
    factors = np.full(count + 1, base, dtype=np.uint64)
    factors[0] = 1
    powers: UInt64Array = np.cumprod(factors, dtype=np.uint64)
    return powers
