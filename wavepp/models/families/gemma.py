"""Gemma 3 text: sliding and full layers with their own ropes, four norms a layer around 0."""

from __future__ import annotations

from dataclasses import replace

from wavepp.models.families.common import (
    attention_groups,
    build_model,
    dense_mlp,
    gqa_layer,
    head_counts,
)
from wavepp.models.json_config import JsonConfig
from wavepp.models.mixer_specs import GqaSpec, RopeSpec
from wavepp.models.mlp_specs import ActivationSpec
from wavepp.models.rope_config import read_rope
from wavepp.models.spec import DtypeName, ModelSpec

_KINDS = ("sliding_attention", "full_attention")
_THETAS = {"sliding_attention": 1e4, "full_attention": 1e6}


def gemma3_text(config: JsonConfig, dtype: DtypeName, eos: tuple[int, ...]) -> ModelSpec:
    """Gemma 3 (text only)."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.raw(key) is not None:
            raise config.fail(key, "is not supported; known: null")
    if config.flag("use_bidirectional_attention", False):
        raise config.fail("use_bidirectional_attention", "is not supported; known: false")
    if config.text("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise config.fail("hidden_activation", "is not supported; known: gelu_pytorch_tanh")
    mlp = replace(dense_mlp(config.replaced(hidden_act="silu")), activation=_GELU)
    types = _layer_types(config)
    mixers = {kind: _attention(config, kind) for kind in set(types)}
    layers = [
        replace(gqa_layer(mixers[kind], mlp, dtype), norm_offset=1.0, sandwich=True)
        for kind in types
    ]
    return build_model(
        config,
        dtype,
        eos,
        layers,
        attention_groups([mixers[kind].window for kind in types]),
        max_model_len=config.integer("max_position_embeddings"),
        norm_offset=1.0,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        embedding_scale=config.integer("hidden_size") ** 0.5,
    )


_GELU = ActivationSpec(kind="gelu_tanh")


def _attention(config: JsonConfig, kind: str) -> GqaSpec:
    heads, kv_heads = head_counts(config)
    head_dim = config.integer("head_dim", 256)
    bias = config.flag("attention_bias", False)
    return GqaSpec(
        hidden_size=config.integer("hidden_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=_rope(config, kind, head_dim),
        window=config.integer("sliding_window", 4096) if kind == "sliding_attention" else None,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        norm_offset=1.0,
        scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
    )


def _rope(config: JsonConfig, kind: str, head_dim: int) -> RopeSpec:
    """Both spellings: one object a kind, or rope_theta, rope_scaling and rope_local_base_freq."""
    by_kind = config.mapping("rope_parameters")
    if kind in by_kind:
        return read_rope(config.replaced(rope_parameters=by_kind[kind]), head_dim, _THETAS[kind])
    if kind == "full_attention":
        return read_rope(config.replaced(rope_parameters=None), head_dim, _THETAS[kind])
    theta = config.number("rope_local_base_freq", _THETAS[kind])
    local = {"rope_type": "default", "rope_theta": theta}
    return read_rope(config.replaced(rope_parameters=local), head_dim)


def _layer_types(config: JsonConfig) -> list[str]:
    count = config.integer("num_hidden_layers")
    types = config.raw("layer_types")
    if types is None:
        every = config.integer("sliding_window_pattern", 6)
        types = [_KINDS[(index + 1) % every == 0] for index in range(count)]
    if not isinstance(types, list) or len(types) != count or set(types) - set(_KINDS):
        raise config.fail("layer_types", f"is not one of {_KINDS} for each of {count} layers")
    return types
