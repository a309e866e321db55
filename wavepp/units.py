"""Names for the numbers WavePP passes around, and the few sums everyone needs.

Legend (used in formulas everywhere): P stages, M most tokens in a wave, B tokens in a block, R
waves in the ring.
"""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", str)
StageIndex = NewType("StageIndex", int)
BlockId = NewType("BlockId", int)
WaveNumber = NewType("WaveNumber", int)
LogNumber = NewType("LogNumber", int)


def ceil_div(value: int, divisor: int) -> int:
    """Smallest integer >= value / divisor, for value >= 0 and divisor > 0."""
    assert value >= 0, value
    assert divisor > 0, divisor
    return -(-value // divisor)


def align_down(value: int, step: int) -> int:
    """Largest multiple of step that is <= value, for value >= 0 and step > 0."""
    assert value >= 0, value
    assert step > 0, step
    return value - value % step


def align_up(value: int, step: int) -> int:
    """Smallest multiple of step that is >= value, for value >= 0 and step > 0."""
    return ceil_div(value, step) * step
