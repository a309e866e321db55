"""Cost models: a device and a model as a few named coefficients, in YAML files.

Owns: the files' form and where they are found. A file names seconds and bytes for one layer of each
kind; sums over a stage are made in `stage_model.py`. Files of the package are asked for by name,
others by path.

    seconds of one layer for one wave = wave_s + token_s * tokens + context_s * context

`tokens` is the sum of span lengths, `context` the sum over those tokens of the positions each
attends to, itself included.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from wavepp.errors import ConfigError
from wavepp.units import ceil_div
from wavepp.validation import first_problem, nearest

FOLDER = "cost_models"
SUFFIX = ".yaml"


def _as_number(value: object) -> object:
    """YAML reads 288e9, without a sign, as text: the number it stands for."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, BeforeValidator(_as_number), Field(ge=1)]
Bytes = Annotated[int, BeforeValidator(_as_number), Field(ge=0)]


class _Frozen(BaseModel):
    # Not strict about types: YAML reads 1e-6 as text, and 288e+9 as a float.
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class LayerKind(_Frozen):
    """One kind of layer.

    Attributes:
        cache: attention keeps bytes for every token; recurrent keeps a state of fixed size.
        cache_bytes: for one token (attention) or one snapshot (recurrent).
        cache_shards: into how many parts tensor parallelism can split that: KV heads, or 1.
        weight_bytes: on the device.
        wave_s, token_s, context_s: seconds a wave, a token, a token of context.
    """

    cache: Literal["attention", "recurrent"]
    cache_bytes: Count
    cache_shards: Count = 1
    weight_bytes: Bytes
    wave_s: Seconds
    token_s: Seconds
    context_s: Seconds = 0.0


class LayerRun(_Frozen):
    """A sequence of layers, by kind, that stands `times` in a row."""

    times: Count
    kinds: Annotated[tuple[str, ...], Field(min_length=1)]


class Ends(_Frozen):
    """What only the first stage (embedding) and only the last one (head) do and hold.

    `head_s` is for a wave that samples any token.
    """

    embedding_bytes: Bytes = 0
    embedding_token_s: Seconds = 0.0
    head_bytes: Bytes = 0
    head_s: Seconds = 0.0


class DeviceCosts(_Frozen):
    """The device.

    Attributes:
        memory_bytes, memory_share: how much there is, and how much weights and cache may take.
        device_bytes_per_s: copies within the device. host_bytes_per_s: to and from the host.
        link_bytes_per_s, link_s: from a stage to the next, and what a message takes besides.
    """

    memory_bytes: Count
    memory_share: Annotated[float, Field(gt=0, le=1)] = 0.9
    device_bytes_per_s: Positive
    host_bytes_per_s: Positive
    link_bytes_per_s: Positive
    link_s: Seconds = 0.0


class TensorParallel(_Frozen):
    """What splitting a layer over devices adds to its share of the work.

    With t devices a layer takes wave_s/t + collective_wave_s for a wave, token_s/t +
    collective_token_s for a token, and context_s/t * context_factor for a token of context.
    """

    collective_wave_s: Seconds
    collective_token_s: Seconds
    context_factor: Positive = 1.0


class CostModel(_Frozen):
    """A device and a model on it.

    Attributes:
        about: what was measured and what was derived, in sentences.
        sources: where the figures come from.
        carry_bytes: what goes from stage to stage for one token.
        layers: all layers, first to last, as runs of kinds.
        preferred_cuts: boundaries where a cut between stages is cheap; all when left out.
    """

    name: str
    about: str
    sources: tuple[str, ...] = ()
    vocab_size: Count
    max_model_len: Count
    carry_bytes: Bytes
    kinds: dict[str, LayerKind]
    layers: Annotated[tuple[LayerRun, ...], Field(min_length=1)]
    preferred_cuts: tuple[int, ...] | None = None
    ends: Ends = Ends()
    device: DeviceCosts
    tensor_parallel: TensorParallel | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        used = {kind for run in self.layers for kind in run.kinds}
        for name in sorted(used - set(self.kinds)):
            raise ValueError(f"layers name {name!r}, which is not among kinds")
        if not any(self.kinds[name].token_s or self.kinds[name].context_s for name in used):
            raise ValueError("no layer takes time for a token")
        return self

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """One entry a layer."""
        names = (kind for run in self.layers for _ in range(run.times) for kind in run.kinds)
        return tuple(self.kinds[name] for name in names)


def shipped_names() -> list[str]:
    """Names of the cost models in the package."""
    found = (resources.files(__package__) / FOLDER).iterdir()
    return sorted(item.name.removesuffix(SUFFIX) for item in found if item.name.endswith(SUFFIX))


def load_cost_model(name: str) -> CostModel:
    """The cost model of this name, or in this file (anything with a dot or a slash is a file).

    Raises:
        ConfigError: there is none, or it can't be used; field and value are named.
    """
    if "/" in name or "." in name:
        return parse_cost_model(name, _read_file(Path(name)))
    if name not in shipped_names():
        known = ", ".join(shipped_names())
        raise ConfigError(
            f"cost_model {name!r} is none of {known}{nearest(name, shipped_names())}; "
            "a file is named with its suffix"
        )
    text = (resources.files(__package__) / FOLDER / f"{name}{SUFFIX}").read_text(encoding="utf-8")
    return parse_cost_model(name, text)


def parse_cost_model(name: str, text: str) -> CostModel:
    """A cost model from YAML.

    Raises:
        ConfigError: it is not YAML, or not a cost model.
    """
    try:
        document: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"cost_model {name}: not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"cost_model {name}: expected lines of `name: value`")
    try:
        return CostModel.model_validate(document)
    except ValidationError as error:
        problem = first_problem(error, CostModel.model_fields)[0]
        raise ConfigError(f"cost_model {name}: {problem}") from None


def shard(nbytes: int, devices: int, shards: int) -> int:
    """What one of several devices holds of something that can be split into so many parts."""
    return ceil_div(nbytes, min(devices, shards))


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cost_model {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cost_model {path}: not UTF-8 text") from None
