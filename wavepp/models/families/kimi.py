"""Kimi Linear and Kimi K3: Kimi Delta Attention between layers of unrotated latent attention.

K3 adds attention residuals, experts in a latent size, SiTU, output gates and a bounded decay. Each
has its own key, so both are read alike; K3's keys lie below text_config.

`linear_attn_config` names the layers of either kind, counted from 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from wavepp.models.families.common import (
    MIXTRAL_NAMES,
    activation,
    attention_groups,
    build_model,
    delta_layer,
    dense_mlp,
    grouped_router,
    mla_layer,
    state_groups,
)
from wavepp.models.json_config import JsonConfig
from wavepp.models.mixer_specs import DeltaSpec, MlaSpec
from wavepp.models.mlp_specs import MlpSpec, MoeSpec
from wavepp.models.spec import DtypeName, ModelSpec

LayerKind = Literal["full", "recurrent"]


def kimi_linear(config: JsonConfig, dtype: DtypeName, eos: tuple[int, ...]) -> ModelSpec:
    """Kimi-Linear-48B-A3B and its like."""
    return _build(config, dtype, eos, "kimi_linear")


def kimi_k3(config: JsonConfig, dtype: DtypeName, eos: tuple[int, ...]) -> ModelSpec:
    """Kimi K3's language model."""
    return _build(config.child("text_config"), dtype, eos, "kimi_k3")


def _build(config: JsonConfig, dtype: DtypeName, eos: tuple[int, ...], family: str) -> ModelSpec:
    kinds, mlps = layer_kinds(config), expert_mlps(config)
    delta, attention = kda(config), unrotated_attention(config)
    every = config.count("attn_res_block_size", 0)
    layers = []
    for index, (kind, mlp) in enumerate(zip(kinds, mlps, strict=True)):
        if kind == "recurrent":
            layer = delta_layer(delta, mlp, dtype)
        else:
            layer = mla_layer(attention, mlp, dtype)
        layers.append(replace(layer, opens_block=bool(every) and index % every == 0))
    limit = config.integer("model_max_length", config.integer("max_position_embeddings", 1 << 20))
    return build_model(
        config,
        dtype,
        eos,
        layers,
        (*attention_groups([None]), *state_groups()),
        max_model_len=limit,
        norm_eps=config.number("rms_norm_eps", 1e-5),
        family=family,
        attention_residuals=bool(every),
    )


def layer_kinds(config: JsonConfig) -> list[LayerKind]:
    """What every layer is."""
    count = config.integer("num_hidden_layers")
    linear = config.child("linear_attn_config")
    full = linear.int_list("full_attn_layers")
    recurrent = linear.int_list("kda_layers") or tuple(sorted({*range(1, count + 1)} - {*full}))
    if sorted((*full, *recurrent)) != list(range(1, count + 1)):
        raise linear.fail("full_attn_layers", f"and kda_layers do not make up layers 1..{count}")
    return ["full" if index + 1 in full else "recurrent" for index in range(count)]


def kda(config: JsonConfig) -> DeltaSpec:
    """The recurrent mixer."""
    linear = config.child("linear_attn_config")
    heads, dim = linear.integer("num_heads"), linear.integer("head_dim")
    bound = linear.raw("gate_lower_bound")
    if bound is not None and not (isinstance(bound, int | float) and bound < 0):
        raise linear.fail("gate_lower_bound", "is not a negative number")
    return DeltaSpec(
        kind="kda",
        hidden_size=config.integer("hidden_size"),
        key_heads=heads,
        heads=heads,
        key_dim=dim,
        value_dim=dim,
        conv_size=linear.integer("short_conv_kernel_size", 4),
        norm_eps=config.number("rms_norm_eps", 1e-5),
        gate_rank=None if linear.flag("use_full_rank_gate", False) else dim,
        decay_rank=dim,
        lower_bound=bound,
    )


def unrotated_attention(config: JsonConfig) -> MlaSpec:
    """Latent attention without rope."""
    if not config.flag("mla_use_nope", True):
        raise config.fail("mla_use_nope", "is not supported; known: true")
    if config.flag("attention_bias", False):
        raise config.fail("attention_bias", "is not supported; known: false")
    nope, rope_dim = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    q_rank = None if config.raw("q_lora_rank") is None else config.integer("q_lora_rank")
    return MlaSpec(
        hidden_size=config.integer("hidden_size"),
        num_heads=config.integer("num_attention_heads"),
        q_rank=q_rank,
        kv_rank=config.integer("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rope_dim,
        v_dim=config.integer("v_head_dim"),
        scale=(nope + rope_dim) ** -0.5,
        out_gate=config.flag("mla_use_output_gate", False),
    )


def expert_mlps(config: JsonConfig) -> list[MlpSpec]:
    """Dense MLPs in the first layers, experts in all others."""
    if config.integer("moe_layer_freq", 1) != 1:
        raise config.fail("moe_layer_freq", "is not supported; known: 1")
    if config.text("topk_method", "noaux_tc") != "noaux_tc":
        raise config.fail("topk_method", "is not supported; known: noaux_tc")
    if config.text("moe_router_activation_func", "sigmoid") != "sigmoid":
        raise config.fail("moe_router_activation_func", "is not supported; known: sigmoid")
    router = grouped_router(
        config,
        config.integer("num_experts"),
        top_k=config.integer("num_experts_per_token"),
        groups=config.integer("num_expert_group", 1),
        renormalise=config.flag("moe_renormalize", True),
        scale=config.number("routed_scaling_factor", 1.0),
    )
    expert_size = config.integer("moe_intermediate_size")
    latent = None
    if config.raw("routed_expert_hidden_size") is not None:
        latent = config.integer("routed_expert_hidden_size")
    sparse = MoeSpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=expert_size,
        router=router,
        names=MIXTRAL_NAMES,
        shared_size=expert_size * config.count("num_shared_experts", 1),
        latent_size=latent,
        latent_norm=config.flag("latent_moe_use_norm", False),
        activation=activation(config),
    )
    # transformers writes the dense layers where the experts of the others are.
    dense = replace(dense_mlp(config), prefixes=("mlp", MIXTRAL_NAMES.prefix))
    first = config.count("first_k_dense_replace", 1)
    count = config.integer("num_hidden_layers")
    return [dense if index < first else sparse for index in range(count)]
