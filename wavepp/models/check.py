"""What a checkpoint would be as a pipeline, without loading a weight: `wavepp check-model`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from wavepp.errors import ConfigError
from wavepp.models.config import read_model_spec
from wavepp.models.loader import INDEX_NAME, CheckpointReader, stored_names
from wavepp.models.partition import stage_layers
from wavepp.models.spec import DTYPE_BYTES, CarryTensorSpec, ModelSpec
from wavepp.models.stage import tensor_shapes

NAMED_MAX = 3  # missing tensors that are named
PROBLEMS_MAX = 8  # sentences about weights


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """One cache group of one stage.

    Attributes:
        bytes_per_token: per state slot for recurrent groups.
        tensors: what it is made of: the name of each cached tensor and its share of those bytes.
    """

    name: str
    kind: str
    layers: int
    bytes_per_token: int
    window: int | None
    tensors: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """One stage: its layers [lo, hi), what it loads and keeps, what it sends on (last: none)."""

    stage: int
    layers: tuple[int, int]
    weight_bytes: int
    groups: tuple[GroupReport, ...]
    carry: tuple[CarryTensorSpec, ...]

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes its attention and sliding groups keep for one token."""
        return sum(g.bytes_per_token for g in self.groups if g.kind != "recurrent")

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of one snapshot of its recurrent layers; 0 if it has none."""
        return sum(g.bytes_per_token for g in self.groups if g.kind == "recurrent")

    @property
    def carry_bytes_per_token(self) -> int:
        """Bytes it sends on for one token."""
        return sum(tensor.bytes_per_token for tensor in self.carry)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """A whole model. `unsupported` has a sentence for every thing that stands in the way, with its
    config key; when it is not empty, the rest may be too little to go on."""

    model: str
    family: str = ""
    dtype: str = ""
    num_layers: int = 0
    hidden_size: int = 0
    vocab_size: int = 0
    max_model_len: int = 0
    eos_token_ids: tuple[int, ...] = ()
    weight_bytes: int = 0
    preferred_cuts: tuple[int, ...] = ()
    stages: tuple[StageReport, ...] = ()
    unsupported: tuple[str, ...] = ()

    @property
    def is_supported(self) -> bool:
        """Whether an engine could be built from it."""
        return not self.unsupported


def check_model(
    folder: str | Path,
    stages: int = 1,
    partition: tuple[int, ...] | None = None,
    *,
    dtype: str = "auto",
) -> ModelReport:
    """Reads the config files and the headers of the weight files of a checkpoint; reports on them.

    Args:
        stages: P.
        partition: layers per stage; None: balanced.

    Raises:
        ConfigError: the partition does not fit the model.
    """
    try:
        spec = read_model_spec(folder, dtype)
    except ConfigError as error:
        return ModelReport(model=str(folder), unsupported=(str(error),))
    split = stage_layers(spec, stages, partition)
    size = DTYPE_BYTES[spec.dtype]
    reports = tuple(_stage(spec, index, lo, hi) for index, (lo, hi) in enumerate(split))
    return ModelReport(
        model=str(folder),
        family=spec.family,
        dtype=spec.dtype,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        max_model_len=spec.max_model_len,
        eos_token_ids=spec.eos_token_ids,
        weight_bytes=spec.parameters_in(0, spec.num_layers) * size,
        preferred_cuts=spec.preferred_cuts,
        stages=reports,
        unsupported=_weight_problems(spec, Path(folder)),
    )


def _stage(spec: ModelSpec, index: int, lo: int, hi: int) -> StageReport:
    groups = tuple(
        GroupReport(
            name=group.name,
            kind=group.kind,
            layers=sum(layer.group == group.name for layer in spec.layers[lo:hi]),
            bytes_per_token=spec.cache_bytes(group.name, lo, hi),
            window=group.window,
            tensors=_cached(spec, group.name, lo, hi),
        )
        for group in spec.groups_in(lo, hi)
    )
    return StageReport(
        stage=index,
        layers=(lo, hi),
        weight_bytes=spec.parameters_in(lo, hi) * DTYPE_BYTES[spec.dtype],
        groups=groups,
        carry=spec.carry_at(hi) if hi < spec.num_layers else (),
    )


def _cached(spec: ModelSpec, group: str, lo: int, hi: int) -> tuple[tuple[str, int], ...]:
    """Name and bytes of every kind of tensor that layers [lo, hi) keep in a group."""
    sizes: dict[str, int] = {}
    for layer in spec.layers[lo:hi]:
        for tensor in layer.cache if layer.group == group else ():
            sizes[tensor.name] = sizes.get(tensor.name, 0) + tensor.nbytes
    return tuple(sizes.items())


def _weight_problems(spec: ModelSpec, folder: Path) -> tuple[str, ...]:
    """Missing and unreadable weights, in few sentences. Of each file only the header is read."""
    problems: dict[str, None] = {}  # a damaged file is one problem, not one for each tensor
    try:
        shapes = tensor_shapes(spec, stored_names(folder))
        with CheckpointReader(folder, torch.float32, torch.device("cpu")) as weights:
            missing = [name for name in shapes if not weights.has(name)]
            if missing:
                first = ", ".join(missing[:NAMED_MAX]) + (", ..." if missing[NAMED_MAX:] else "")
                problems[f"{INDEX_NAME}: {len(missing)} tensors are missing: {first}"] = None
            for name in filter(weights.has, shapes):
                if problem := _problem_of(weights, name, shapes[name]):
                    problems[problem] = None
    except ConfigError as error:
        return (str(error),)
    more = len(problems) - PROBLEMS_MAX
    return (*list(problems)[:PROBLEMS_MAX], *((f"and {more} more like these",) if more > 0 else ()))


def _problem_of(weights: CheckpointReader, name: str, shape: tuple[int, ...] | None) -> str | None:
    try:
        weights.check(name, shape)
    except ConfigError as error:
        return str(error)
    return None
