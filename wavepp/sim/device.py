"""A model of one stage's memory: what every unit holds, so that reading another's state is seen.

Owns: the contents of device units, host units and working slots, as digests of the prefix that
they stand for. May not: know who asked for what it is told to do. A stage computes a span by
reading all that its windows see before it, which must be the request's own prefix, and then
writing its blocks, snapshots and working slot.

    content of a block          digest(namespace, tokens up to the last one written into it)
    content of a snapshot, slot digest(namespace, tokens up to its position)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from wavepp.cache.types import (
    BringBack,
    Effect,
    GroupSpec,
    Offload,
    RestoreSnapshot,
    ZeroSlot,
)
from wavepp.control.work import SpanWork
from wavepp.sim.options import VOCABULARY, Job, Tokens
from wavepp.sim.violation import Violation

NOTHING = 0
"""What a unit holds before anything was written, and a working slot at position 0."""


class Text:
    """The tokens of one request, and digests of its prefixes."""

    def __init__(self, salt: str, tokens: Tokens, block_size: int) -> None:
        self._size = block_size
        self._tokens = np.asarray(tokens, dtype="<i4")
        self._chain = [xxhash.xxh3_64_intdigest(b"salt:" + salt.encode())]

    @classmethod
    def of_job(cls, job: Job, block_size: int) -> Text:
        """The prompt of a job, and what it makes: one token after another, told by all before."""
        text = cls(job.salt, job.tokens, block_size)
        for _ in range(job.max_tokens - 1):
            made = text.digest(len(text._tokens)) % VOCABULARY
            text._tokens = np.append(text._tokens, np.int32(made))
        return text

    def tokens(self, start: int, length: int) -> npt.NDArray[np.int32]:
        """Tokens [start, start + length)."""
        return self._tokens[start : start + length]

    def produced(self, prompt_tokens: int, count: int) -> tuple[int, ...]:
        """The tokens that come after the prompt."""
        return tuple(self.digest(prompt_tokens + at) % VOCABULARY for at in range(count))

    def digest(self, count: int) -> int:
        """Of the first `count` tokens."""
        assert 0 <= count <= len(self._tokens), (count, len(self._tokens))
        if count == 0:
            return NOTHING
        size, chain = self._size, self._chain
        while len(chain) <= count // size:
            at = len(chain) - 1
            chain.append(_fold(chain[at], self._tokens[at * size : (at + 1) * size]))
        block, rest = divmod(count, size)
        return chain[block] if not rest else _fold(chain[block], self._tokens[block * size : count])

    def blocks(self, count: int) -> list[int]:
        """What the blocks that hold the first `count` tokens hold."""
        full, rest = divmod(count, self._size)
        if count:
            self.digest(count)
        held = self._chain[1 : full + 1]
        return [*held, self.digest(count)] if rest else held


def _fold(before: int, tokens: npt.NDArray[np.int32]) -> int:
    text = before.to_bytes(8, "little") + tokens.tobytes()
    return xxhash.xxh3_64_intdigest(text)


class Device:
    """Contents of one stage's pools, on the device and on the host."""

    def __init__(self, groups: tuple[GroupSpec, ...], *, block_size: int, slots: int) -> None:
        self._size = block_size
        self._groups = groups
        self.units = {group.name: [NOTHING] * group.units for group in groups}
        self.host = {group.name: [NOTHING] * group.host_units for group in groups}
        self.slots = {group.name: [NOTHING] * slots for group in groups if not group.paged}

    def perform(self, effects: tuple[Effect, ...]) -> None:
        """Copies, in order."""
        for effect in effects:
            match effect:
                case Offload(group=group, device=device, host=host):
                    for source, target in zip(device.tolist(), host.tolist(), strict=True):
                        self.host[group][target] = self.units[group][source]
                case BringBack(group=group, host=host, device=device):
                    for source, target in zip(host.tolist(), device.tolist(), strict=True):
                        self.units[group][target] = self.host[group][source]
                case RestoreSnapshot(group=group, snapshot=unit, slot=slot, from_host=from_host):
                    held = self.host if from_host else self.units
                    self.slots[group][slot] = held[group][unit]
                case ZeroSlot(group=group, slot=slot):
                    self.slots[group][slot] = NOTHING
                case _:
                    raise TypeError(effect)

    def compute(self, work: SpanWork, text: Text) -> int:
        """Computes one span; returns the digest of all tokens up to its end.

        Raises:
            Violation: what it reads is not the request's own prefix.
        """
        self._read(work, text)
        self._write(work, text)
        return text.digest(work.start + work.length)

    def _read(self, work: SpanWork, text: Text) -> None:
        for group in self._groups:
            if not group.paged:
                assert work.slot is not None, work
                held, expected = [self.slots[group.name][work.slot]], [text.digest(work.start)]
            else:
                low = 0 if group.window is None else max(work.start - group.window, 0) // self._size
                expected = text.blocks(work.start)[low:]
                units = work.block_tables[group.name][low : low + len(expected)].tolist()
                content = self.units[group.name]
                held = [content[unit] if unit >= 0 else NOTHING for unit in units]
            if held != expected:
                wrong = [at for at, pair in enumerate(zip(held, expected, strict=True))
                         if pair[0] != pair[1]]  # fmt: skip
                raise Violation(
                    "state",
                    f"{work.request_id} [{work.start}, +{work.length}) reads {group.name}: "
                    f"{len(wrong)} of {len(held)} units hold another prefix, first {wrong[0]}",
                )

    def _write(self, work: SpanWork, text: Text) -> None:
        end = work.start + work.length
        first = work.start // self._size
        after = text.blocks(end)
        for group in self._groups:
            content = self.units[group.name]
            if group.paged:
                units = work.block_tables[group.name][first : len(after)].tolist()
                for unit, digest in zip(units, after[first:], strict=True):
                    content[unit] = digest
                continue
            for order in work.snapshots:
                assert work.start < order.position <= end, (order, work.start, end)
                content[order.units[group.name]] = text.digest(order.position)
            assert work.slot is not None, work
            self.slots[group.name][work.slot] = text.digest(end)
