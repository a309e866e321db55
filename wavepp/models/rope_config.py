"""Rotary embedding keys of config.json -> RopeSpec, in both spellings.

Released files have `rope_theta` and `rope_scaling` (with `type` or `rope_type`); transformers 5
writes one `rope_parameters` object. Where both are there, `rope_parameters` wins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from wavepp.errors import ConfigError
from wavepp.models.json_config import JsonConfig
from wavepp.models.mixer_specs import RopeKind, RopeSpec

_KINDS = ("default", "linear", "llama3", "yarn")
_DEFAULT_THETA = 10000.0


def read_rope(
    config: JsonConfig,
    head_dim: int,
    default_theta: float = _DEFAULT_THETA,
    default_fraction: float = 1.0,
) -> RopeSpec:
    """The rope of a model whose layers all share one.

    How much of a head turns is said by `partial_rotary_factor`, or by `rotary_dim` in dims.

    Raises:
        ConfigError: a rope type that is not supported (dynamic and longrope change with the length
            of the prompt, so a cached prefix would be wrong), or a key that is missing.
    """
    values, where = _parameters(config)
    rope = JsonConfig(values, where)
    kind = rope.text("rope_type", str(values.get("type", "default")))
    if kind not in _KINDS:
        raise ConfigError(
            f"{where}.rope_type {kind!r} is not supported; known: {', '.join(_KINDS)}"
        )
    fraction = _fraction(config, rope, head_dim, default_fraction)
    common: dict[str, Any] = {
        "kind": cast("RopeKind", kind),
        "theta": rope.number("rope_theta", config.number("rope_theta", default_theta)),
        "rotary_dim": int(head_dim * fraction),
    }
    if kind == "default":
        return RopeSpec(**common)
    if kind == "linear":
        return RopeSpec(**common, factor=rope.number("factor"))
    original = rope.integer(
        "original_max_position_embeddings", config.integer("max_position_embeddings")
    )
    if kind == "llama3":
        return RopeSpec(
            **common,
            factor=rope.number("factor"),
            original_max_positions=original,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    return _yarn(rope, common, original, config.integer("max_position_embeddings"))


def score_factor(config: JsonConfig) -> float:
    """What a latent attention's scores are multiplied by beside qk_dim ** -0.5 (DeepSeek's YaRN).

    Cosines and sines carry mscale / mscale_all_dim; queries and keys each carry mscale_all_dim.
    """
    values, where = _parameters(config)
    rope = JsonConfig(values, where)
    kind = rope.text("rope_type", str(values.get("type", "default")))
    all_dim = rope.optional_number("mscale_all_dim") if rope.raw("mscale_all_dim") else None
    if kind == "default" or all_dim is None:
        return 1.0
    return yarn_mscale(rope.number("factor"), all_dim) ** 2


def _fraction(config: JsonConfig, rope: JsonConfig, head_dim: int, default: float) -> float:
    """The share of a head's dims that turns."""
    if rope.raw("partial_rotary_factor") is not None:
        return rope.number("partial_rotary_factor")
    if config.raw("partial_rotary_factor") is not None:
        return config.number("partial_rotary_factor")
    dims = config.integer("rotary_dim", max(1, round(default * head_dim)))
    if dims > head_dim:
        raise config.fail("rotary_dim", f"is more than the head size {head_dim}")
    return dims / head_dim


def _parameters(config: JsonConfig) -> tuple[Mapping[str, Any], str]:
    for key in ("rope_parameters", "rope_scaling"):
        values = config.mapping(key)
        if values:
            if any(isinstance(value, dict) for value in values.values()):
                raise ConfigError(f"{config.name}: {key} per layer type is not supported")
            return values, f"{config.name}: {key}"
    return {}, f"{config.name}: rope_parameters"


def _yarn(rope: JsonConfig, common: dict[str, Any], original: int, max_positions: int) -> RopeSpec:
    factor = rope.number("factor", max_positions / original)
    attention_factor = rope.optional_number("attention_factor")
    if attention_factor is None:
        mscale, all_dim = rope.optional_number("mscale"), rope.optional_number("mscale_all_dim")
        if mscale is not None and all_dim is not None:
            attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
        else:
            attention_factor = yarn_mscale(factor)
    return RopeSpec(
        **common,
        factor=factor,
        original_max_positions=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=attention_factor,
    )


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention temperature: 0.1 * mscale * ln(factor) + 1, and 1 when nothing is scaled."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
