"""One cache group's pool on one stage: which units are free.

Owns: the free list. May not: know who holds a unit; sequences do, and the sums are checked there.
Units are blocks (attention, sliding) or state slots (recurrent). Last freed is first taken: it is
warm in the cache. Once stages keep prefixes, freed blocks become evictable ones; this is the place.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wavepp.errors import LocalProtocolError
from wavepp.protocol.messages import Int32Array


class BlockPool:
    """Units [0, units), each free or taken."""

    def __init__(self, name: str, units: int) -> None:
        assert units >= 1, units
        self.name = name
        self.units = units
        self._stack: Int32Array = np.arange(units - 1, -1, -1, dtype=np.int32)
        self._free = units  # _stack[:_free] are free, the last of them is taken next
        self._taken: npt.NDArray[np.bool_] = np.zeros(units, dtype=np.bool_)

    @property
    def free(self) -> int:
        """Free units."""
        return self._free

    def take(self, count: int) -> Int32Array:
        """Takes `count` units: int32 [count].

        Raises:
            LocalProtocolError: there are not as many. Admission promised them, so this is a bug.
        """
        assert count >= 0, count
        if count > self._free:
            raise LocalProtocolError(
                f"group {self.name!r}: {count} units wanted for an admitted request, {self._free} "
                f"of {self.units} are free"
            )
        ids = self._stack[self._free - count : self._free][::-1].copy()
        self._free -= count
        assert not self._taken[ids].any(), ids
        self._taken[ids] = True
        return ids

    def give(self, ids: Int32Array) -> None:
        """Gives units back."""
        assert self._taken[ids].all(), ids
        self._taken[ids] = False
        end = self._free + len(ids)
        assert end <= self.units, (end, self.units)
        self._stack[self._free : end] = ids[::-1]
        self._free = end

    def check(self) -> None:
        """Asserts that free and taken units are all units, each once."""
        free = self._stack[: self._free]
        assert not self._taken[free].any(), free
        assert len(np.unique(free)) == self._free, free
        assert self._free + int(self._taken.sum()) == self.units, (self._free, self.units)
