"""Every order of messages that matters, in worlds small enough to try them all.

Two stages of three blocks and three snapshots, three requests that want each other's room: each of
the first seven messages is fast or slow, in all combinations.
"""

from __future__ import annotations

import random

import pytest
from sim_dsl import Scenario, distinct, hybrid

from wavepp.sim.options import StageOptions

CHOICES = 7
FAST, SLOW = 0.1, 9.0  # times the mean


class Chosen(random.Random):
    """Delays as the bits of a number say; later ones are fast."""

    def __init__(self, bits: int) -> None:
        super().__init__(0)
        self._bits = [bits >> at & 1 for at in range(CHOICES)]

    def uniform(self, a: float, b: float) -> float:
        slow = self._bits.pop() if self._bits else 0
        return SLOW if slow else FAST


def tiny(stages: tuple[StageOptions, ...], bits: int) -> Scenario:
    scenario = Scenario(
        *stages, block_size=1, wave_tokens_max=2, max_num_seqs=2, ring_depth=2, audit_every=5
    )
    scenario.world._delays = Chosen(bits)
    scenario.ask("a", distinct(3, 0))
    scenario.ask("b", distinct(3, 0), cancel_s=0.004)
    scenario.ask("c", distinct(2, 0), at=0.001)
    return scenario


@pytest.mark.parametrize("snapshots", [(3, 3), (3, 1)])
def test_every_order_of_the_first_messages(snapshots: tuple[int, int]) -> None:
    stages = tuple(hybrid(3, count, snapshot_interval=1) for count in snapshots)
    ends = set()
    for bits in range(2**CHOICES):
        scenario = tiny(stages, bits).run()
        ends.add((scenario.reason("b"), scenario.cached("c")))
        assert (scenario.reason("a"), scenario.reason("c")) == ("length", "length")
    assert len(ends) > 1  # the order did matter
