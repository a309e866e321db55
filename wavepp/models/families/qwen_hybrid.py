"""Qwen3-Next and Qwen3.5: Gated DeltaNet between layers of gated attention; norms around 0.

|            | projections of the recurrent layers | MLP                                    |
| qwen3_next | merged by key head                  | experts, a gated shared one, or dense  |
| qwen3_5    | one for each kind                   | dense                                  |
"""

from __future__ import annotations

from dataclasses import replace

from wavepp.models.families.common import (
    PLAIN_NAMES,
    activation,
    attention_groups,
    build_model,
    delta_layer,
    dense_mlp,
    gqa_layer,
    head_counts,
    positions,
    state_groups,
)
from wavepp.models.json_config import JsonConfig
from wavepp.models.mixer_specs import DeltaSpec, GqaSpec
from wavepp.models.mlp_specs import MlpSpec, MoeSpec, RouterSpec
from wavepp.models.rope_config import read_rope
from wavepp.models.spec import DtypeName, ModelSpec

_KINDS = ("linear_attention", "full_attention")


def qwen3_next(config: JsonConfig, dtype: DtypeName, eos: tuple[int, ...]) -> ModelSpec:
    """Qwen3-Next."""
    router = RouterSpec(
        scoring="softmax",
        num_experts=config.integer("num_experts"),
        top_k=config.integer("num_experts_per_tok"),
        renormalise=config.flag("norm_topk_prob", True),
    )
    sparse = MoeSpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("moe_intermediate_size"),
        router=router,
        names=replace(PLAIN_NAMES, shared="shared_expert"),
        shared_size=config.integer("shared_expert_intermediate_size"),
        shared_gate=True,
        activation=activation(config),
    )
    step, dense = config.integer("decoder_sparse_step", 1), config.int_list("mlp_only_layers")
    mlps: list[MlpSpec] = [
        sparse if index not in dense and (index + 1) % step == 0 else dense_mlp(config)
        for index in range(config.integer("num_hidden_layers"))
    ]
    return _build(config, dtype, eos, mlps, merged=True)


def qwen3_5_text(config: JsonConfig, dtype: DtypeName, eos: tuple[int, ...]) -> ModelSpec:
    """Qwen3.5's dense language models."""
    mlps: list[MlpSpec] = [dense_mlp(config)] * config.integer("num_hidden_layers")
    return _build(config, dtype, eos, mlps, merged=False)


def qwen3_5(config: JsonConfig, dtype: DtypeName, eos: tuple[int, ...]) -> ModelSpec:
    """Qwen3.5 as released, with a vision tower that is not read."""
    return qwen3_5_text(config.child("text_config"), dtype, eos)


def _build(
    config: JsonConfig,
    dtype: DtypeName,
    eos: tuple[int, ...],
    mlps: list[MlpSpec],
    *,
    merged: bool,
) -> ModelSpec:
    attention, delta = _attention(config), _delta(config, merged=merged)
    layers = []
    for kind, mlp in zip(_layer_types(config), mlps, strict=True):
        if kind == "linear_attention":
            layer = delta_layer(delta, mlp, dtype)
        else:
            layer = gqa_layer(attention, mlp, dtype)
        layers.append(replace(layer, norm_offset=1.0))
    groups = (*attention_groups([None]), *state_groups())
    limit = positions(config, attention.rope)
    return build_model(config, dtype, eos, layers, groups, max_model_len=limit, norm_offset=1.0)


def _layer_types(config: JsonConfig) -> list[str]:
    count = config.integer("num_hidden_layers")
    types = config.raw("layer_types")
    if types is None:
        every = config.integer("full_attention_interval", 4)
        types = [_KINDS[(index + 1) % every == 0] for index in range(count)]
    if not isinstance(types, list) or len(types) != count or set(types) - set(_KINDS):
        raise config.fail("layer_types", f"is not one of {_KINDS} for each of {count} layers")
    return types


def _attention(config: JsonConfig) -> GqaSpec:
    heads, kv_heads = head_counts(config)
    head_dim = config.integer("head_dim", 256)
    bias = config.flag("attention_bias", False)
    return GqaSpec(
        hidden_size=config.integer("hidden_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=read_rope(config, head_dim, default_fraction=0.25),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        norm_offset=1.0,
        out_gate=True,
    )


def _delta(config: JsonConfig, *, merged: bool) -> DeltaSpec:
    key_heads = config.integer("linear_num_key_heads")
    heads = config.integer("linear_num_value_heads")
    if heads % key_heads:
        raise config.fail("linear_num_key_heads", f"does not divide the {heads} value heads")
    return DeltaSpec(
        kind="gdn",
        hidden_size=config.integer("hidden_size"),
        key_heads=key_heads,
        heads=heads,
        key_dim=config.integer("linear_key_head_dim"),
        value_dim=config.integer("linear_value_head_dim"),
        conv_size=config.integer("linear_conv_kernel_dim", 4),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        merged=merged,
    )
