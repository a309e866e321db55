"""The ring: numbers, room, order."""

from __future__ import annotations

import pytest

from wavepp.errors import RemoteProtocolError
from wavepp.planner.ring import Ring
from wavepp.units import WaveNumber


@pytest.fixture
def ring() -> Ring[str]:
    return Ring(2)


def test_ring_numbers_waves_from_one(ring: Ring[str]) -> None:
    ring.launch(ring.next_number, "first")
    ring.launch(ring.next_number, "second")
    assert (ring.launched, ring.completed, list(ring)) == (2, 0, ["first", "second"])
    assert not ring.has_room
    ring.check()


def test_ring_gives_waves_back_in_order(ring: Ring[str]) -> None:
    ring.launch(ring.next_number, "first")
    ring.launch(ring.next_number, "second")
    assert ring.complete(WaveNumber(1)) == "first"
    assert ring.has_room
    assert ring.complete(WaveNumber(2)) == "second"
    assert len(ring) == 0
    ring.check()


def test_ring_refuses_a_wave_when_full(ring: Ring[str]) -> None:
    ring.launch(ring.next_number, "first")
    ring.launch(ring.next_number, "second")
    with pytest.raises(AssertionError, match="full"):
        ring.launch(ring.next_number, "third")


def test_ring_refuses_a_gap_and_keeps_its_state(ring: Ring[str]) -> None:
    ring.launch(ring.next_number, "first")
    ring.launch(ring.next_number, "second")
    with pytest.raises(RemoteProtocolError, match="wave 2 came back, expected wave 1"):
        ring.complete(WaveNumber(2))
    assert ring.complete(WaveNumber(1)) == "first"
    with pytest.raises(RemoteProtocolError, match="wave 1 came back, expected wave 2"):
        ring.complete(WaveNumber(1))


def test_ring_refuses_a_wave_that_is_not_out(ring: Ring[str]) -> None:
    with pytest.raises(RemoteProtocolError, match="wave 1 came back"):
        ring.complete(WaveNumber(1))
