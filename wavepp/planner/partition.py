"""Which layers go to which stage: contiguous ranges with the smallest largest cost.

Pure sums over costs that someone else counted or measured; knows no model. A pipeline runs at the
pace of its slowest stage, so the largest stage cost is minimised; among equals the most even wins.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

PREFERRED_SLACK = 1.10  # a preferred cut may cost this much pace; beyond it balance counts more


def balance_layers(
    costs: Sequence[float],
    stages: int,
    *,
    first_extra: float = 0.0,
    last_extra: float = 0.0,
    preferred_cuts: Collection[int] | None = None,
) -> tuple[int, ...]:
    """Layers per stage, in order.

    Args:
        costs: cost of each layer, in any unit.
        stages: how many stages; at most as many as layers.
        first_extra: cost of what only the first stage does (embedding).
        last_extra: cost of what only the last stage does (final norm, head).
        preferred_cuts: boundaries (0 < b < layers) where a cut is cheap; others are used only when
            these lose more than PREFERRED_SLACK in pace, or are too few.

    Raises:
        ValueError: more stages than layers.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{stages} stages for {len(costs)} layers")
    loads = [float(cost) for cost in costs]
    loads[0] += first_extra
    loads[-1] += last_extra
    every = range(1, len(loads))
    best = _split(loads, stages, every)
    assert best is not None
    if preferred_cuts is not None and set(preferred_cuts) != set(every):
        allowed = sorted(set(preferred_cuts) & set(every))
        preferred = _split(loads, stages, allowed)
        if preferred is not None and preferred[0] <= best[0] * PREFERRED_SLACK:
            best = preferred
    cuts = best[2]
    return tuple(hi - lo for lo, hi in zip((0, *cuts), (*cuts, len(loads)), strict=True))


def _split(
    loads: list[float], stages: int, cuts: Sequence[int]
) -> tuple[float, float, tuple[int, ...]] | None:
    """The best (largest stage cost, sum of squares, cuts) with cuts from `cuts`; None: too few.

    Dynamic programme over boundaries, one stage at a time: O(stages * boundaries^2).
    """
    prefix = [0.0]
    for load in loads:
        prefix.append(prefix[-1] + load)
    ends = [*cuts, len(loads)]
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for _ in range(stages):
        reached: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in ends:
            options = [
                _extend(state, begin, end, prefix) for begin, state in best.items() if begin < end
            ]
            if options:
                reached[end] = min(options)
        best = reached
    final = best.get(len(loads))
    return None if final is None else (final[0], final[1], final[2][:-1])


def _extend(
    state: tuple[float, float, tuple[int, ...]], begin: int, end: int, prefix: list[float]
) -> tuple[float, float, tuple[int, ...]]:
    cost = prefix[end] - prefix[begin]
    return (max(state[0], cost), state[1] + cost * cost, (*state[2], end))
