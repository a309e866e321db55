"""What all stages together can hold: the smallest of everything, exchanged once at start.

Owns the sums that the driver does with the stages' capacities, so that no stage's own number ever
decides anything. Capacities differ by stage, since layers and bytes do. Paper, section on admission
(headroom proportional to 2PM, the oversized exception).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wavepp.cache.parts import HEADROOM_POOL_SHARE
from wavepp.cache.types import GroupSpec
from wavepp.errors import ConfigError
from wavepp.units import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The smallest stage's numbers, in tokens. None: no stage has a paged window, so no limit.

    Attributes:
        tokens: the longest request (prompt and room after it) that an empty pipeline can hold.
        headroom_tokens: what admission leaves free: min(2PM, a quarter of the pool).
        oversized_over: a longer request can't be held beside the headroom: it needs the exception.
    """

    tokens: int | None
    headroom_tokens: int
    oversized_over: int | None


def smallest_capacity(
    stages: Sequence[Sequence[GroupSpec]], *, block_size: int, headroom_tokens: int
) -> Capacity:
    """The capacity every stage has.

    Args:
        stages: the cache groups of each stage.
        headroom_tokens: 2PM (`lease_headroom_waves` times M).

    Raises:
        ConfigError: a stage has a paged window without a single block.
    """
    assert stages, "a pipeline has at least one stage"
    assert headroom_tokens >= 0, headroom_tokens
    pools = [
        (group.units, stage, group.name)
        for stage, groups in enumerate(stages)
        for group in groups
        if group.paged
    ]
    if not pools:
        return Capacity(tokens=None, headroom_tokens=0, oversized_over=None)
    units, stage, name = min(pools)
    if units < 1:
        raise ConfigError(f"stage {stage} has no room in its cache group {name!r}")
    headroom = min(ceil_div(headroom_tokens, block_size), units // HEADROOM_POOL_SHARE)
    return Capacity(
        tokens=units * block_size,
        headroom_tokens=headroom * block_size,
        oversized_over=(units - headroom) * block_size,
    )
