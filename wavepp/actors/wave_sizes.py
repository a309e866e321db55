"""How large the waves of a pipeline were.

Owns: the sizes of the latest ones, and counts of all since the start.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

from wavepp.requests import WAVE_SIZE_BOUNDS

SIZES_KEPT = 256


class WaveSizes:
    """Counts waves as they are launched.

    Attributes:
        latest: tokens of the latest waves, oldest first.
        counts: waves by the first of WAVE_SIZE_BOUNDS that is not below their size; the last count
            is of larger ones.
        tokens: of all waves. budget: what the latest one was allowed.
    """

    def __init__(self) -> None:
        self.latest: deque[int] = deque(maxlen=SIZES_KEPT)
        self.counts = [0] * (len(WAVE_SIZE_BOUNDS) + 1)
        self.tokens = 0
        self.budget = 0

    def add(self, tokens: int, budget: int) -> None:
        """One wave more."""
        self.latest.append(tokens)
        self.counts[bisect_left(WAVE_SIZE_BOUNDS, tokens)] += 1
        self.tokens += tokens
        self.budget = budget
