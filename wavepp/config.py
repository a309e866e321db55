"""The engine's configuration: one frozen model, from keyword arguments, YAML or flags (flags win).

Field names are the flag names with underscores, in vLLM's spelling where vLLM has the thing. YAML
is read once, here. A field that needs the checkpoint to be checked (layer counts, lengths) is
checked where the checkpoint is read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from wavepp.errors import ConfigError
from wavepp.units import align_down
from wavepp.validation import first_problem, nearest

Device = Literal["cpu", "cuda", "emulated"]
THREADS_MAX = 1024  # some way above, torch's thread pool falls over with no error to catch
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class EngineConfig(BaseModel):
    """Everything an engine is built from. Immutable; unknown names are errors.

    Raises:
        ConfigError: an unknown name (the nearest known one is named), a value of the wrong type or
            out of range, or values that exclude each other.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())

    # Model
    model: str = Field(
        description="folder of a Hugging Face checkpoint (config.json, *.safetensors); with device "
        "emulated only a name, by default the cost model's"
    )
    tokenizer: str | None = Field(
        default=None, description="folder of the tokenizer; default: the model's"
    )
    skip_tokenizer_init: bool = Field(default=False, description="take and return token ids only")
    served_model_name: str | None = Field(
        default=None, description="name in requests and answers; default: --model"
    )
    dtype: Dtype = Field(
        default="auto", description="of weights and activations; auto: the checkpoint's"
    )
    load_format: Literal["auto", "dummy"] = Field(
        default="auto", description="dummy: random weights, config only"
    )
    max_model_len: int | None = Field(
        default=None, gt=0, description="longest prompt; default: the model's own"
    )
    seed: int = Field(
        default=0, description="of dummy weights, and of sampling where a request names none"
    )

    # Pipeline
    device: Device = Field(
        default="cpu",
        description="where stages compute; emulated: nowhere, each wave takes the time that "
        "--cost-model says",
    )
    cost_model: str | None = Field(
        default=None,
        description="emulated devices: name of a cost model, or a YAML file (docs/emulation.md)",
    )
    time_scale: float = Field(
        default=1.0,
        gt=0,
        allow_inf_nan=False,
        description="emulated devices: seconds here for a second of theirs",
    )
    tensor_parallel_size: int = Field(
        default=1,
        ge=1,
        description="emulated devices: devices that share each stage's layers; else 1",
    )
    pipeline_parallel_size: int = Field(default=1, ge=1, description="P: stages")
    layer_partition: tuple[int, ...] | None = Field(
        default=None, description="layers per stage; default: balanced"
    )
    transport: Literal["ray", "local"] = Field(
        default="ray", description="local: all stages in this process"
    )
    threads_per_stage: int | None = Field(
        default=None,
        ge=1,
        le=THREADS_MAX,
        description="CPU threads; default: cores / P, at least 1",
    )
    num_cpus_per_stage: float | None = Field(
        default=None,
        gt=0,
        description="CPUs a stage asks of Ray; default: threads_per_stage, or what there is",
    )
    ring_depth: int | None = Field(
        default=None, ge=1, description="R: waves in the ring; default 2P"
    )
    pipeline_fill: int = Field(default=2, ge=1, description="F: pipeline fills kept ready")

    # Waves
    max_num_batched_tokens: int = Field(
        default=2048,
        ge=1,
        description="M: most tokens in one wave, a multiple of B (planner greedy takes any); the "
        "default is rounded down to one",
    )
    min_wave_tokens: int | None = Field(
        default=None,
        ge=1,
        description="b_min: smallest wave budget, a multiple of B; default M/2, rounded down",
    )
    max_num_seqs: int = Field(default=16, ge=1, description="lanes: requests admitted at once")
    planner: Literal["greedy", "static", "mpu", "balanced"] = Field(
        default="mpu",
        description="picks wave sizes; mpu: as large as leaves enough waves for every stage; "
        "balanced: equal times, as measured, as long as costs least; static: M tokens, by the same "
        "rules; greedy: first come, first served, as full as M",
    )
    wave_times: str | None = Field(
        default=None,
        description="planner balanced: file of what waves take on each stage, to start from "
        "(docs/benchmarks.md); default: all is measured",
    )
    progress_deadline_ms: float = Field(
        default=50.0,
        ge=0,
        allow_inf_nan=False,
        description="longest time that work is held back for the sake of fuller waves, in "
        "milliseconds",
    )

    # Cache
    block_size: int = Field(default=64, ge=1, description="B: tokens in one cache block")
    num_gpu_blocks_override: int | None = Field(
        default=None, ge=1, description="cache blocks per stage, on CPU too"
    )
    kv_cache_memory_bytes: int | None = Field(
        default=None, ge=1, description="cache bytes per stage"
    )
    enable_prefix_caching: bool = Field(default=True, description="reuse cached prefixes")
    kv_offloading_size: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="GiB of host memory, all stages together, that evicted blocks move to; "
        "default: none",
    )
    snapshot_interval: int | None = Field(
        default=None,
        ge=1,
        description="tokens between snapshots of recurrent layers, a multiple of B; default: "
        "snapshots at prompt ends and where prompts part only",
    )
    max_snapshots_per_path: int = Field(
        default=16, ge=1, description="snapshots kept along one prefix before the middle is thinned"
    )

    # Admission
    admission: Literal["wave", "serial"] = Field(
        default="wave",
        description="wave: requests are admitted in batches, beside execution; serial: a baseline, "
        "one by one inside the planning loop, with blocking sends between stages",
    )
    reservation: Literal["escrow", "lease", "none"] = Field(
        default="escrow",
        description="what an admitted request holds until its first wave; escrow: its prefix is "
        "pinned and its suffix has room; lease: pins alone; none: nothing. With less than escrow "
        "it may find no room and is rolled back and tried again",
    )
    lease_headroom_waves: int | None = Field(
        default=None,
        ge=0,
        description="waves' worth of blocks (M tokens each) that admission leaves free, at most a "
        "quarter of the pool; default 2P",
    )
    agreement: Literal["set", "stepwise"] = Field(
        default="set",
        description="how stages come to one endpoint; set: in one step; stepwise: the paper's own "
        "way, to the same endpoint",
    )
    defer_shared_prefix: bool = Field(
        default=True,
        description="let a request wait for another one that is computing the prefix it lacks",
    )
    defer_max_ms: float = Field(
        default=60_000.0,
        ge=0,
        allow_inf_nan=False,
        description="longest wait of one request for that, in milliseconds; nobody waits while the "
        "ring lacks work",
    )

    lease_alarm_s: float = Field(
        default=300.0,
        gt=0,
        description="log a warning when an admitted prefix waits longer than this to be used",
    )

    # Limits and failure
    max_num_queued_reqs: int | None = Field(
        default=None, ge=1, description="refuse more waiting requests than this"
    )
    max_num_queued_tokens: int | None = Field(
        default=None, ge=1, description="refuse more waiting tokens than this"
    )
    watchdog_s: float = Field(
        default=300.0, gt=0, description="longest time without progress while waves are in the ring"
    )
    max_request_retries: int = Field(
        default=3,
        ge=0,
        description="times a request is tried again when a stage died while it was computed",
    )
    wait_for_resources_s: float = Field(
        default=60.0, ge=0, description="how long to wait for Ray to have room"
    )
    trace: str | None = Field(
        default=None, description="write facts, decisions and waves as JSON lines to this file"
    )

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise ConfigError(first_problem(error, type(self).model_fields)[0]) from None

    @model_validator(mode="before")
    @classmethod
    def _name_emulated_model(cls, data: Any) -> Any:
        """An emulated model needs no checkpoint: its name is the cost model's."""
        if isinstance(data, dict) and data.get("device") == "emulated" and "model" not in data:
            return {**data, "model": str(data.get("cost_model"))}
        return data

    @field_validator("model", "tokenizer", "trace", "cost_model", "wave_times", mode="before")
    @classmethod
    def _take_paths(cls, value: object) -> object:
        """Takes a pathlib.Path where a folder or file is named."""
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @field_validator("layer_partition", mode="before")
    @classmethod
    def _parse_partition(cls, value: object) -> object:
        """Takes "8,8,7,7" as well as a list, and 8 (YAML's reading of "8") for one stage."""
        if isinstance(value, list):
            return tuple(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return (value,)
        if not isinstance(value, str):
            return value
        parts = value.split(",")
        if not all(part.strip().isdecimal() for part in parts):
            raise ValueError("write it as comma-separated numbers of layers, such as 8,8,7,7")
        return tuple(int(part) for part in parts)

    @model_validator(mode="before")
    @classmethod
    def _fit_default_wave(cls, given: object) -> object:
        """The default of M fits the block size that was given."""
        if not isinstance(given, dict) or "max_num_batched_tokens" in given:
            return given
        default, block = cls.model_fields["max_num_batched_tokens"].default, given.get("block_size")
        if not isinstance(block, int) or block < 1 or default % block == 0:
            return given
        return {**given, "max_num_batched_tokens": max(align_down(default, block), block)}

    @model_validator(mode="after")
    def _check_emulation(self) -> Self:
        if self.device == "emulated":
            if self.cost_model is None:
                raise ValueError("device emulated needs a cost_model")
            return self
        for name, default in (
            ("cost_model", None),
            ("time_scale", 1.0),
            ("tensor_parallel_size", 1),
        ):
            if getattr(self, name) != default:
                raise ValueError(
                    f"{name} {getattr(self, name)} is for device emulated, not {self.device}"
                )
        return self

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.layer_partition is not None:
            if len(self.layer_partition) != self.pipeline_parallel_size:
                raise ValueError(
                    f"layer_partition names {len(self.layer_partition)} stages, "
                    f"pipeline_parallel_size is {self.pipeline_parallel_size}"
                )
            if min(self.layer_partition) < 1:
                raise ValueError(
                    f"layer_partition {self.layer_partition}: every stage needs at least one layer"
                )
        interval = self.snapshot_interval
        if interval is not None and interval % self.block_size:
            raise ValueError(
                f"snapshot_interval {interval} is no multiple of block_size {self.block_size}"
            )
        if self.min_wave_tokens is not None and self.min_wave_tokens > self.max_num_batched_tokens:
            raise ValueError(
                f"min_wave_tokens {self.min_wave_tokens} exceeds "
                f"max_num_batched_tokens {self.max_num_batched_tokens}"
            )
        if self.planner != "greedy":
            self._check_wave_sizes()
        if self.wave_times is not None and self.planner != "balanced":
            raise ValueError(f"wave_times is for planner balanced, not {self.planner}")
        if self.lease_headroom_waves is not None and self.reservation != "escrow":
            raise ValueError(
                f"lease_headroom_waves {self.lease_headroom_waves}: reservation "
                f"{self.reservation} reserves no room, so it keeps no headroom"
            )
        return self

    def _check_wave_sizes(self) -> None:
        """Budgets are whole blocks; only the greedy planner knows no budgets."""
        block = self.block_size
        for name in ("max_num_batched_tokens", "min_wave_tokens"):
            value = getattr(self, name)
            if value is None or value % block == 0:
                continue
            lower = align_down(value, block)
            fitting = f"{lower} or {lower + block}" if lower else f"{block}"
            raise ValueError(
                f"{name} {value} is no multiple of block_size {block}: take {fitting} "
                "(planner greedy takes any)"
            )

    @property
    def ring_waves(self) -> int:
        """R: most waves in flight."""
        return self.ring_depth if self.ring_depth is not None else 2 * self.pipeline_parallel_size

    @property
    def wave_tokens_min(self) -> int:
        """b_min: the smallest wave budget; as a default a multiple of B, if M holds two blocks."""
        if self.min_wave_tokens is not None:
            return self.min_wave_tokens
        half = align_down(self.max_num_batched_tokens // 2, self.block_size)
        return half if half > 0 else self.max_num_batched_tokens

    @property
    def headroom_tokens(self) -> int:
        """2PM: tokens of cache that admission leaves free."""
        waves = self.lease_headroom_waves
        waves = 2 * self.pipeline_parallel_size if waves is None else waves
        return waves * self.max_num_batched_tokens

    def model_len(self, own: int, refusal: str) -> int:
        """Longest prompt of a model that has `own` positions.

        Raises:
            ConfigError: max_model_len asks for more; `refusal` says what there is.
        """
        if self.max_model_len is None:
            return own
        if self.max_model_len > own:
            raise ConfigError(f"max_model_len {self.max_model_len}: {refusal}")
        return self.max_model_len

    @property
    def model_name(self) -> str:
        """The name users see."""
        return self.served_model_name if self.served_model_name is not None else self.model


def build_config(options: Mapping[str, Any], yaml_path: str | Path | None = None) -> EngineConfig:
    """An EngineConfig from options that were given (they win) over a YAML file.

    Args:
        options: field name -> value; only what was given, no defaults.
        yaml_path: a file of `flag-name: value` lines; dashes and underscores are the same.

    Raises:
        ConfigError: an unknown name (the nearest known one is named), or a bad value (field
            and value are named).
    """
    merged: dict[str, Any] = {}
    if yaml_path is not None:
        merged.update(_read_yaml(Path(yaml_path)))
    merged.update(options)
    known = list(EngineConfig.model_fields)
    for name in merged:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}{nearest(name, known)}")
    return EngineConfig(**merged)


class _UniqueKeys(yaml.SafeLoader):
    """Plain data; a key that comes twice is an error, not the last one's."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As SafeLoader."""
        seen: set[str] = set()
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if key.value in seen:
                line = key.start_mark.line + 1
                raise yaml.YAMLError(f"line {line}: {key.value} was given before")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except OSError as error:
        raise ConfigError(f"config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path}: not YAML: {str(error).splitlines()[0]}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        raise ConfigError(f"config {path}: expected lines of `name: value`")
    named = {key.replace("-", "_"): value for key, value in loaded.items()}
    if len(named) < len(loaded):
        raise ConfigError(f"config {path}: one option is given twice, with dashes and underscores")
    return named
