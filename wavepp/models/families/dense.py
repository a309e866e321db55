"""Dense GQA families: llama, mistral, qwen2, qwen3. What differs between them, and nothing else.

|         | qkv bias        | output bias     | qk norm | MLP bias  | sliding window               |
| llama   | attention_bias  | attention_bias  | no      | mlp_bias  | no                           |
| mistral | no              | no              | no      | no        | every layer, sliding_window  |
| qwen2   | always          | no              | no      | no        | layer_types, or the layers   |
| qwen3   | attention_bias  | attention_bias  | yes     | no        | from max_window_layers on    |
"""

from __future__ import annotations

from wavepp.models.json_config import JsonConfig
from wavepp.models.rope_config import read_rope
from wavepp.models.spec import (
    CacheGroupSpec,
    CacheTensorSpec,
    DenseMlpSpec,
    DtypeName,
    GqaSpec,
    LayerSpec,
    ModelSpec,
    RopeSpec,
)

FULL_GROUP = "attention"


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
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise config.fail("hidden_act", "is not supported; known: silu")
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.fail("num_key_value_heads", f"does not divide num_attention_heads {heads}")
    family = config.text("model_type")
    head_dim = config.integer("head_dim", 128 if family == "qwen3" else hidden // heads)
    rope = read_rope(config, head_dim)
    mlp = DenseMlpSpec(
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        bias=family == "llama" and config.flag("mlp_bias", False),
    )
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
            qk_norm=qk_norm,
        )
        layers.append(_layer(mixer, mlp, dtype))
    return ModelSpec(
        family=family,
        dtype=dtype,
        hidden_size=hidden,
        vocab_size=config.integer("vocab_size"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        max_model_len=_positions(config, rope),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        layers=tuple(layers),
        groups=_groups(windows),
        eos_token_ids=eos,
    )


def _positions(config: JsonConfig, rope: RopeSpec) -> int:
    """Positions the model is good for; YaRN's factor extends the original ones."""
    stated = config.integer("max_position_embeddings")
    if rope.kind != "yarn":
        return stated
    return max(stated, int(rope.original_max_positions * rope.factor))


def _group_name(window: int | None) -> str:
    return FULL_GROUP if window is None else f"sliding_{window}"


def _layer(mixer: GqaSpec, mlp: DenseMlpSpec, dtype: DtypeName) -> LayerSpec:
    shape = (mixer.num_kv_heads, mixer.head_dim)
    cache = tuple(CacheTensorSpec(name=name, shape=shape, dtype=dtype) for name in ("key", "value"))
    return LayerSpec(mixer=mixer, mlp=mlp, group=_group_name(mixer.window), cache=cache)


def _groups(windows: tuple[int | None, ...]) -> tuple[CacheGroupSpec, ...]:
    groups = []
    for window in dict.fromkeys(windows):
        kind = "attention" if window is None else "sliding"
        groups.append(CacheGroupSpec(name=_group_name(window), kind=kind, window=window))  # type: ignore[arg-type]
    return tuple(groups)
