"""Dense GQA families: llama, mistral, qwen2, qwen3. What differs between them, and nothing else.

|         | qkv bias        | output bias     | qk norm | MLP bias  | sliding window               |
| llama   | attention_bias  | attention_bias  | no      | mlp_bias  | no                           |
| mistral | no              | no              | no      | no        | every layer, sliding_window  |
| qwen2   | always          | no              | no      | no        | layer_types, or the layers   |
| qwen3   | attention_bias  | attention_bias  | yes     | no        | from max_window_layers on    |
"""

from __future__ import annotations

from wavepp.models.families.common import (
    attention_groups,
    build_model,
    dense_mlp,
    gqa_layer,
    head_counts,
    positions,
)
from wavepp.models.json_config import JsonConfig
from wavepp.models.mixer_specs import GqaSpec
from wavepp.models.rope_config import read_rope
from wavepp.models.spec import DtypeName, ModelSpec


def llama(config: JsonConfig, dtype: DtypeName, eos: tuple[int, ...]) -> ModelSpec:
    """Llama 1-3 and everything that calls itself that (SmolLM2, Yi, ...)."""
    bias = config.flag("attention_bias", False)
    windows = (None,) * config.integer("num_hidden_layers")
    return _build(config, dtype, eos, windows=windows, qkv_bias=bias, out_bias=bias)


def mistral(config: JsonConfig, dtype: DtypeName, eos: tuple[int, ...]) -> ModelSpec:
    """Mistral: one window for every layer, or none."""
    window = None
    if config.raw("sliding_window") is not None:
        window = config.integer("sliding_window")
    return _build(config, dtype, eos, windows=(window,) * config.integer("num_hidden_layers"))


def qwen2(config: JsonConfig, dtype: DtypeName, eos: tuple[int, ...]) -> ModelSpec:
    """Qwen2 and Qwen2.5."""
    return _build(config, dtype, eos, windows=_qwen_windows(config), qkv_bias=True)


def qwen3(config: JsonConfig, dtype: DtypeName, eos: tuple[int, ...]) -> ModelSpec:
    """Qwen3 (dense)."""
    bias = config.flag("attention_bias", False)
    windows = _qwen_windows(config)
    return _build(config, dtype, eos, windows=windows, qkv_bias=bias, out_bias=bias, qk_norm=True)


def _qwen_windows(config: JsonConfig) -> tuple[int | None, ...]:
    """Window of each layer: `layer_types` decides; without it, layers from max_window_layers on."""
    count = config.integer("num_hidden_layers")
    sliding = config.flag("use_sliding_window", False)
    types = config.raw("layer_types")
    if types is None:
        first = config.raw("max_window_layers")
        first = 28 if first is None else first
        if not isinstance(first, int) or first < 0:
            raise config.fail("max_window_layers", "is not a whole number")
        narrow = [sliding and index >= first for index in range(count)]
    else:
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != count or set(types) - set(known):
            raise config.fail("layer_types", f"is not one of {known} for each of {count} layers")
        narrow = [kind == "sliding_attention" for kind in types]
    if not sliding or config.raw("sliding_window") is None:
        return (None,) * count
    window = config.integer("sliding_window")
    return tuple(window if is_narrow else None for is_narrow in narrow)


def _build(
    config: JsonConfig,
    dtype: DtypeName,
    eos: tuple[int, ...],
    *,
    windows: tuple[int | None, ...],
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: bool = False,
) -> ModelSpec:
    hidden = config.integer("hidden_size")
    heads, kv_heads = head_counts(config)
    family = config.text("model_type")
    head_dim = config.integer("head_dim", 128 if family == "qwen3" else hidden // heads)
    rope = read_rope(config, head_dim)
    mlp = dense_mlp(config, bias=family == "llama" and config.flag("mlp_bias", False))
    layers = []
    for window in windows:
        mixer = GqaSpec(
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rope=rope,
            window=window,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            qk_norm="head" if qk_norm else None,
        )
        layers.append(gqa_layer(mixer, mlp, dtype))
    groups = attention_groups(windows)
    return build_model(config, dtype, eos, layers, groups, max_model_len=positions(config, rope))
