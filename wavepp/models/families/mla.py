"""Families with latent attention and a mixture of experts; sparse ones have an indexer.

|              | indexer               | rope of its keys | shared choices |
| deepseek_v3  | no                    |                  |                |
| deepseek_v32 | every layer           | half-split       | no             |
| glm_moe_dsa  | layers that are full  | interleaved      | the others     |

Multi-token-prediction layers lie behind the last layer in the checkpoint and are not read.
"""

from __future__ import annotations

from dataclasses import replace

from wavepp.models.families.common import (
    PLAIN_NAMES,
    activation,
    attention_groups,
    build_model,
    dense_mlp,
    grouped_router,
    mla_layer,
    positions,
)
from wavepp.models.json_config import JsonConfig
from wavepp.models.mixer_specs import IndexerSpec, MlaSpec
from wavepp.models.mlp_specs import MlpSpec, MoeSpec
from wavepp.models.rope_config import read_rope, score_factor
from wavepp.models.spec import DtypeName, ModelSpec


def deepseek_v3(config: JsonConfig, dtype: DtypeName, eos: tuple[int, ...]) -> ModelSpec:
    """DeepSeek-V3, R1, V3.1, and Kimi K2."""
    interleaved = config.flag("rope_interleave", True)
    mixer = latent_attention(config, interleaved=interleaved)
    layers = [mla_layer(mixer, mlp, dtype) for mlp in expert_mlps(config)]
    limit = positions(config, mixer.rope)
    return build_model(config, dtype, eos, layers, attention_groups([None]), max_model_len=limit)


def deepseek_v32(config: JsonConfig, dtype: DtypeName, eos: tuple[int, ...]) -> ModelSpec:
    """DeepSeek-V3.2."""
    indexers = [indexer(config, interleaved=False)] * config.integer("num_hidden_layers")
    return _sparse(config, dtype, eos, indexers)


def glm_moe_dsa(config: JsonConfig, dtype: DtypeName, eos: tuple[int, ...]) -> ModelSpec:
    """GLM-5, 5.1 and 5.2."""
    own = indexer(config, interleaved=True)
    indexers = [replace(own, shared=shared) for shared in _shared_layers(config)]
    return _sparse(config, dtype, eos, indexers)


def indexer(config: JsonConfig, *, interleaved: bool) -> IndexerSpec:
    """A selector of sparse attention."""
    spec = IndexerSpec(
        num_heads=config.integer("index_n_heads"),
        head_dim=config.integer("index_head_dim"),
        top_k=config.integer("index_topk"),
        interleaved=interleaved,
    )
    if spec.head_dim < config.integer("qk_rope_head_dim"):
        raise config.fail("index_head_dim", "is less than qk_rope_head_dim")
    return spec


def _shared_layers(config: JsonConfig) -> list[bool]:
    """Whether each layer takes its choice over from one before it."""
    count = config.integer("num_hidden_layers")
    types = config.raw("indexer_types")
    key = "indexer_types"
    if types is None and config.raw("index_topk_pattern") is not None:
        key = "index_topk_pattern"
        letters = {"F": "full", "S": "shared"}
        types = [letters.get(kind, kind) for kind in config.raw(key)]
    if types is None:
        every = config.integer("index_topk_freq", 1)
        offset = config.count("index_skip_topk_offset", 2)
        types = [
            "shared" if max(index - offset + 1, 0) % every else "full" for index in range(count)
        ]
    if not isinstance(types, list) or len(types) != count or set(types) - {"full", "shared"}:
        raise config.fail(key, f"is not full or shared for each of {count} layers")
    if types[0] == "shared":
        raise config.fail(key, "begins with a shared layer")
    return [kind == "shared" for kind in types]


def _sparse(
    config: JsonConfig, dtype: DtypeName, eos: tuple[int, ...], indexers: list[IndexerSpec]
) -> ModelSpec:
    mixer = latent_attention(config, interleaved=config.flag("rope_interleave", True))
    if mixer.q_rank is None:
        raise config.fail("q_lora_rank", "is not supported for sparse attention")
    layers = [
        mla_layer(replace(mixer, indexer=own), mlp, dtype)
        for own, mlp in zip(indexers, expert_mlps(config), strict=True)
    ]
    limit = positions(config, mixer.rope)
    return build_model(config, dtype, eos, layers, attention_groups([None]), max_model_len=limit)


def latent_attention(config: JsonConfig, *, interleaved: bool) -> MlaSpec:
    """Latent attention with rope."""
    nope, rope_dim = config.count("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    q_rank = None if config.raw("q_lora_rank") is None else config.integer("q_lora_rank")
    bias = config.flag("attention_bias", False)
    if bias and q_rank is None:
        raise config.fail("attention_bias", "is not supported without q_lora_rank")
    return MlaSpec(
        hidden_size=config.integer("hidden_size"),
        num_heads=config.integer("num_attention_heads"),
        q_rank=q_rank,
        kv_rank=config.integer("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rope_dim,
        v_dim=config.integer("v_head_dim"),
        scale=(nope + rope_dim) ** -0.5 * score_factor(config),
        rope=read_rope(config, rope_dim),
        interleaved=interleaved,
        bias=bias,
    )


def expert_mlps(config: JsonConfig) -> list[MlpSpec]:
    """Dense MLPs in the first layers, experts in all others; or as `mlp_layer_types` says."""
    count = config.integer("num_hidden_layers")
    if config.integer("moe_layer_freq", 1) != 1:
        raise config.fail("moe_layer_freq", "is not supported; known: 1")
    if config.text("topk_method", "noaux_tc") != "noaux_tc":
        raise config.fail("topk_method", "is not supported; known: noaux_tc")
    if config.text("scoring_func", "sigmoid") != "sigmoid":
        raise config.fail("scoring_func", "is not supported; known: sigmoid")
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
        shared_size=expert_size * config.count("n_shared_experts", 1),
        activation=activation(config),
    )
    first = config.count("first_k_dense_replace", 3)
    types = config.raw("mlp_layer_types")
    if types is None:
        types = ["dense" if index < first else "sparse" for index in range(count)]
    known = {"dense", "sparse"}
    if not isinstance(types, list) or len(types) != count or set(types) - known:
        raise config.fail("mlp_layer_types", f"is not dense or sparse for each of {count} layers")
    return [dense_mlp(config) if kind == "dense" else sparse for kind in types]
