"""The layers of every stage of a model: as asked, or balanced by counted operations."""

from __future__ import annotations

from itertools import accumulate

from wavepp.errors import ConfigError
from wavepp.models.spec import ModelSpec
from wavepp.planner.partition import balance_layers


def stage_layers(
    spec: ModelSpec, stages: int, asked: tuple[int, ...] | None = None
) -> tuple[tuple[int, int], ...]:
    """[lo, hi) of every stage.

    Args:
        asked: layers per stage; None: the split with the smallest slowest stage, embedding and head
            counted in, at preferred cuts where that costs little.

    Raises:
        ConfigError: more stages than layers, or `asked` does not fit.
    """
    if stages > spec.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size {stages}: the model has only {spec.num_layers} layers"
        )
    counts = asked
    if counts is None:
        counts = balance_layers(
            [layer.cost() for layer in spec.layers],
            stages,
            first_extra=spec.embedding_cost,
            last_extra=spec.head_cost,
            preferred_cuts=spec.preferred_cuts,
        )
    if len(counts) != stages or sum(counts) != spec.num_layers or min(counts) < 1:
        raise ConfigError(
            f"layer_partition {','.join(map(str, counts))}: it has to name {stages} stages "
            f"that sum to the model's {spec.num_layers} layers"
        )
    ends = list(accumulate(counts))
    return tuple(zip([0, *ends[:-1]], ends, strict=True))
