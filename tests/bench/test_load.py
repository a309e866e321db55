"""Own and foreign CPU time are told apart."""

from __future__ import annotations

import time

import pytest

from wavepp.bench.load import CpuReading, foreign_cores, read_cpu


def test_foreign_cores_are_what_the_machine_did_beside_us() -> None:
    before, after = CpuReading(100.0, 10.0), CpuReading(108.0, 14.0)
    assert foreign_cores(before, after, 2.0) == pytest.approx(2.0)
    assert foreign_cores(before, CpuReading(101.0, 14.0), 2.0) == 0.0


def test_own_work_is_counted_as_own() -> None:
    before = read_cpu()
    spent = time.process_time() + 0.3
    while time.process_time() < spent:
        pass
    after = read_cpu()
    assert after.own_s - before.own_s >= 0.25
    assert after.machine_s - before.machine_s >= 0.25
