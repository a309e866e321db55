"""An emulated device's timeline, without a clock."""

from __future__ import annotations

import math

import pytest

from wavepp.actors.ports import DeviceTimes
from wavepp.emulated.timeline import HOST_AHEAD_S, LATE_S_MAX, DeviceTimeline


def run(
    line: DeviceTimeline,
    now: float,
    compute_s: float = 1.0,
    *,
    ready_s: float = -math.inf,
    sender_late_s: float = 0.0,
    copy_s: float = 0.0,
    send_s: float = 0.0,
) -> DeviceTimes:
    return line.run(
        now=now,
        ready_s=ready_s,
        sender_late_s=sender_late_s,
        copy_s=copy_s,
        compute_s=compute_s,
        send_s=send_s,
    )


def test_oversleeping_does_not_add_up() -> None:
    line, now = DeviceTimeline(), 10.0
    for number in range(100):
        times = run(line, now)
        assert times.from_s == pytest.approx(10.0 + number)
        line.woke(times.done_s + 0.004)
        now = times.done_s + 0.005  # and a millisecond of host work


def test_a_wave_that_comes_late_starts_late() -> None:
    line = DeviceTimeline()
    assert run(line, 10.0).done_s == 11.0
    line.woke(11.0)
    late = 11.0 + 2 * HOST_AHEAD_S
    assert run(line, late).from_s == late


def test_a_wave_starts_when_its_activations_are_there() -> None:
    line = DeviceTimeline()
    assert run(line, 10.0, ready_s=10.25).from_s == 10.25
    line.woke(11.25)
    assert run(line, 11.25, ready_s=11.0).from_s == 11.25


def test_a_late_sender_is_forgiven() -> None:
    line = DeviceTimeline()
    assert run(line, 10.02, ready_s=10.0, sender_late_s=0.02).from_s == 10.0


def test_a_thread_far_behind_is_no_fast_device() -> None:
    line = DeviceTimeline()
    done_s = run(line, 10.0).done_s
    line.woke(done_s + 1.0)
    now = done_s + 1.0
    assert now - LATE_S_MAX - HOST_AHEAD_S > done_s
    assert run(line, now).from_s == now


def test_copies_come_before_and_sending_after() -> None:
    line = DeviceTimeline()
    times = run(line, 10.0, copy_s=0.5, send_s=0.25)
    assert times == DeviceTimes(from_s=10.0, computing_s=10.5, done_s=11.5, sent_s=11.75)
    line.woke(times.sent_s)
    assert run(line, 11.75).from_s == 11.75
