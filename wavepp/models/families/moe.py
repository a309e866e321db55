"""Mixture-of-experts families with grouped-query attention. What differs, and nothing else.

|            | qk norm       | bias | rope dims  | router                | shared | dense     |
| qwen3_moe  | per head      | key  | all        | softmax               | no     | by step   |
| glm4_moe   | per head, key | key  | half       | sigmoid, bias, groups | yes    | the first |
| minimax_m2 | all heads     | no   | rotary_dim | sigmoid, bias         | no     | no        |
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from wavepp.models.families.common import (
    MIXTRAL_NAMES,
    PLAIN_NAMES,
    activation,
    attention_groups,
    build_model,
    dense_mlp,
    gqa_layer,
    grouped_router,
    head_counts,
    positions,
)
from wavepp.models.json_config import JsonConfig
from wavepp.models.mixer_specs import GqaSpec
from wavepp.models.mlp_specs import MlpSpec, MoeSpec, RouterSpec
from wavepp.models.rope_config import read_rope
from wavepp.models.spec import DtypeName, ModelSpec


def qwen3_moe(config: JsonConfig, dtype: DtypeName, eos: tuple[int, ...]) -> ModelSpec:
    """Qwen3 MoE (30B-A3B, 235B-A22B)."""
    if config.flag("use_sliding_window", False):
        raise config.fail("use_sliding_window", "is not supported for this family")
    router = RouterSpec(
        scoring="softmax",
        num_experts=config.integer("num_experts", config.integer("num_local_experts", 128)),
        top_k=config.integer("num_experts_per_tok"),
        renormalise=config.flag("norm_topk_prob", False),
    )
    sparse = MoeSpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("moe_intermediate_size"),
        router=router,
        names=PLAIN_NAMES,
        activation=activation(config),
    )
    step, dense = config.integer("decoder_sparse_step", 1), config.int_list("mlp_only_layers")
    mlps: list[MlpSpec] = [
        sparse if index not in dense and (index + 1) % step == 0 else dense_mlp(config)
        for index in range(config.integer("num_hidden_layers"))
    ]
    bias = config.flag("attention_bias", False)
    mixer = _attention(config, qk_norm="head", qkv_bias=bias, out_bias=bias)
    return _model(config, dtype, eos, mixer, mlps)


def glm4_moe(config: JsonConfig, dtype: DtypeName, eos: tuple[int, ...]) -> ModelSpec:
    """GLM-4.5, 4.6 and 4.7."""
    router = grouped_router(
        config,
        config.integer("n_routed_experts"),
        top_k=config.integer("num_experts_per_tok"),
        renormalise=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 1.0),
    )
    expert_size = config.integer("moe_intermediate_size")
    sparse = MoeSpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=expert_size,
        router=router,
        names=PLAIN_NAMES,
        shared_size=expert_size * config.integer("n_shared_experts", 1),
        activation=activation(config),
    )
    first = config.count("first_k_dense_replace", 1)
    mlps: list[MlpSpec] = [
        dense_mlp(config) if index < first else sparse
        for index in range(config.integer("num_hidden_layers"))
    ]
    mixer = _attention(
        config,
        rope_fraction=0.5,
        qk_norm="head" if config.flag("use_qk_norm", False) else None,
        qkv_bias=config.flag("attention_bias", False),
    )
    return _model(config, dtype, eos, mixer, mlps)


def minimax_m2(config: JsonConfig, dtype: DtypeName, eos: tuple[int, ...]) -> ModelSpec:
    """MiniMax M2, M2.1, M2.5 and M2.7."""
    if not config.flag("use_qk_norm", True):
        raise config.fail("use_qk_norm", "is not supported")
    if config.text("qk_norm_type", "per_layer") != "per_layer":
        raise config.fail("qk_norm_type", "is not supported; known: per_layer")
    if config.text("scoring_func", "sigmoid") != "sigmoid":
        raise config.fail("scoring_func", "is not supported; known: sigmoid")
    if config.count("shared_intermediate_size", 0):
        raise config.fail("shared_intermediate_size", "is not supported; known: 0")
    router = RouterSpec(
        scoring="sigmoid",
        num_experts=config.integer("num_local_experts"),
        top_k=config.integer("num_experts_per_tok"),
        bias=True,
    )
    sparse = MoeSpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        router=router,
        names=replace(MIXTRAL_NAMES, bias="e_score_correction_bias"),
        activation=activation(config),
    )
    mixer = _attention(config, theta=5e6, qk_norm="all")
    mlps: list[MlpSpec] = [sparse] * config.integer("num_hidden_layers")
    return _model(config, dtype, eos, mixer, mlps)


def _attention(
    config: JsonConfig, *, theta: float = 1e4, rope_fraction: float = 1.0, **options: Any
) -> GqaSpec:
    hidden = config.integer("hidden_size")
    heads, kv_heads = head_counts(config)
    head_dim = config.integer("head_dim", hidden // heads)
    return GqaSpec(
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=read_rope(config, head_dim, theta, rope_fraction),
        **options,
    )


def _model(
    config: JsonConfig,
    dtype: DtypeName,
    eos: tuple[int, ...],
    mixer: GqaSpec,
    mlps: list[MlpSpec],
) -> ModelSpec:
    layers = [gqa_layer(mixer, mlp, dtype) for mlp in mlps]
    limit = positions(config, mixer.rope)
    return build_model(config, dtype, eos, layers, attention_groups([None]), max_model_len=limit)
