"""The execution ring: at most R numbered waves in flight.

Owns: wave numbers and which waves are in flight. May not: plan, know what a wave holds beyond its
schedule. Source: paper, section on the execution ring.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

from wavepp.errors import RemoteProtocolError
from wavepp.units import WaveNumber

T = TypeVar("T")


class Ring(Generic[T]):
    """R slots for waves of type T. Numbers are consecutive from 1; waves end in the order they were
    launched.
    """

    def __init__(self, depth: int) -> None:
        assert depth >= 1, depth
        self.depth = depth
        self.launched = WaveNumber(0)
        self.completed = WaveNumber(0)
        self._in_flight: OrderedDict[WaveNumber, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._in_flight)

    def __iter__(self) -> Iterator[T]:
        return iter(self._in_flight.values())

    @property
    def has_room(self) -> bool:
        """Another wave may be launched."""
        return len(self._in_flight) < self.depth

    @property
    def next_number(self) -> WaveNumber:
        """The number the next wave gets."""
        return WaveNumber(self.launched + 1)

    def launch(self, number: WaveNumber, wave: T) -> None:
        """Puts a wave into the ring under the next number."""
        assert self.has_room, f"ring of {self.depth} is full"
        assert number == self.next_number, (number, self.next_number)
        self._in_flight[number] = wave
        self.launched = number

    def complete(self, number: WaveNumber) -> T:
        """Takes the oldest wave out.

        Raises:
            RemoteProtocolError: `number` is not the oldest wave in flight: the data plane lost or
                reordered one.
        """
        expected = WaveNumber(self.completed + 1)
        if number != expected or number not in self._in_flight:
            raise RemoteProtocolError(f"wave {number} came back, expected wave {expected}")
        self.completed = number
        return self._in_flight.pop(number)

    def check(self) -> None:
        """Asserts that numbers and occupancy agree."""
        assert len(self._in_flight) <= self.depth, (len(self._in_flight), self.depth)
        expected = list(range(self.completed + 1, self.launched + 1))
        assert list(self._in_flight) == expected, (list(self._in_flight), expected)
