"""When an emulated device is busy: a timeline that the sleeps of a thread cannot bend.

Pure: it is told the time and answers with times. A device starts a wave as soon as the wave is
there and the one before is done, whatever the emulating thread was doing then. That thread sleeps
for the device, wakes some time late, and only then takes the next wave; a host that drives a real
device runs ahead of it. So a wave that comes within that lateness of the device's end was there in
time:

    device      |-- wave 7 --|-- wave 8 --|
    thread      ... sleeps ...   ^ wakes late, and is told of wave 8 here

Lateness is forgiven up to a bound: a machine too busy to emulate shows as gaps, not as speed.
"""

from __future__ import annotations

import math

from wavepp.actors.ports import DeviceTimes

HOST_AHEAD_S = 0.002  # what a host does between two waves that a device does not wait for
LATE_S_MAX = 0.05  # most lateness of a thread that is not taken for lateness of the wave


class DeviceTimeline:
    """One device: when it is free, and how late its thread is."""

    def __init__(self) -> None:
        self._free_s = -math.inf
        self._late_s = 0.0

    def run(
        self,
        *,
        now: float,
        ready_s: float,
        sender_late_s: float,
        copy_s: float,
        compute_s: float,
        send_s: float,
    ) -> DeviceTimes:
        """Takes the next wave.

        Args:
            now: when the thread was told of it.
            ready_s: when its activations are there; -inf on the first stage.
            sender_late_s: how late the sender's thread was when it passed them on.
            copy_s, compute_s: what the device does. send_s: how long its sending holds it.
        """
        base_s = max(self._free_s, ready_s)
        late_s = min(max(self._late_s, sender_late_s), LATE_S_MAX)
        from_s = base_s if now - late_s - HOST_AHEAD_S <= base_s else now
        computing_s = from_s + copy_s
        done_s = computing_s + compute_s
        self._free_s = done_s + send_s
        return DeviceTimes(
            from_s=from_s, computing_s=computing_s, done_s=done_s, sent_s=self._free_s
        )

    def woke(self, now: float) -> float:
        """The thread is awake after the last wave; how late it is."""
        self._late_s = max(now - self._free_s, 0.0)
        return self._late_s
