"""What several families read from config.json in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wavepp.models.json_config import JsonConfig
from wavepp.models.mixer_specs import DeltaSpec, GqaSpec, MlaSpec, RopeSpec
from wavepp.models.mlp_specs import ActivationSpec, DenseMlpSpec, MlpSpec, MoeNames, RouterSpec
from wavepp.models.spec import (
    STATE_GROUP,
    CacheGroupSpec,
    CacheTensorSpec,
    DtypeName,
    LayerSpec,
    ModelSpec,
)

FULL_GROUP = "attention"
PLAIN_NAMES = MoeNames()
MIXTRAL_NAMES = MoeNames(prefix="block_sparse_moe", gate="w1", up="w3", down="w2")


def activation(config: JsonConfig, key: str = "hidden_act") -> ActivationSpec:
    """The activation of the MLPs."""
    name = config.text(key, "silu")
    if name == "situ":
        return ActivationSpec(
            kind="situ",
            beta=config.number("activation_situ_beta"),
            linear_beta=config.number("activation_situ_linear_beta"),
        )
    if name != "silu":
        raise config.fail(key, "is not supported; known: silu, situ")
    return ActivationSpec()


def head_counts(config: JsonConfig) -> tuple[int, int]:
    """Query and key heads."""
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.fail("num_key_value_heads", f"does not divide num_attention_heads {heads}")
    return heads, kv_heads


def dense_mlp(config: JsonConfig, *, bias: bool = False) -> DenseMlpSpec:
    """The gated MLP of `intermediate_size`."""
    return DenseMlpSpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        bias=bias,
        activation=activation(config),
    )


def grouped_router(config: JsonConfig, experts: int, **options: Any) -> RouterSpec:
    """A router with sigmoid scores, bias and expert groups.

    Args:
        options: RouterSpec fields that the family reads under its own keys (top_k, scale, ...).
    """
    options.setdefault("groups", config.integer("n_group", 1))
    options.setdefault("groups_kept", config.integer("topk_group", 1))
    router = RouterSpec(
        scoring="sigmoid", num_experts=experts, bias=True, renorm_eps=1e-20, **options
    )
    if experts % router.groups:
        raise config.fail("n_group", f"does not divide the {experts} experts")
    if router.groups > 1 and experts // router.groups < 2:
        raise config.fail("n_group", "leaves groups of less than two experts")
    if router.groups_kept > router.groups:
        raise config.fail("topk_group", f"is more than n_group {router.groups}")
    return router


def gqa_layer(mixer: GqaSpec, mlp: MlpSpec, dtype: DtypeName) -> LayerSpec:
    """A layer with grouped-query attention."""
    shape = (mixer.num_kv_heads, mixer.head_dim)
    cache = tuple(CacheTensorSpec(name=name, shape=shape, dtype=dtype) for name in ("key", "value"))
    return LayerSpec(mixer=mixer, mlp=mlp, group=group_name(mixer.window), cache=cache)


def mla_layer(mixer: MlaSpec, mlp: MlpSpec, dtype: DtypeName) -> LayerSpec:
    """A layer with latent attention; its selector's keys, if any, are cached beside the latents."""
    cache = [CacheTensorSpec(name="latent", shape=(mixer.latent_dim,), dtype=dtype)]
    if mixer.indexer is not None and not mixer.indexer.shared:
        shape = (mixer.indexer.head_dim,)
        cache.append(CacheTensorSpec(name="index_key", shape=shape, dtype=dtype))
    return LayerSpec(mixer=mixer, mlp=mlp, group=FULL_GROUP, cache=tuple(cache))


def delta_layer(mixer: DeltaSpec, mlp: MlpSpec, dtype: DtypeName) -> LayerSpec:
    """A recurrent layer: one state a slot, and the inputs the convolution still needs."""
    state = (mixer.heads, mixer.key_dim, mixer.value_dim)
    conv = (mixer.conv_size - 1, mixer.conv_channels)
    cache = (
        CacheTensorSpec(name="state", shape=state, dtype="float32"),
        CacheTensorSpec(name="conv", shape=conv, dtype=dtype),
    )
    return LayerSpec(mixer=mixer, mlp=mlp, group=STATE_GROUP, cache=cache)


def state_groups() -> tuple[CacheGroupSpec, ...]:
    """The cache group of recurrent layers."""
    return (CacheGroupSpec(name=STATE_GROUP, kind="recurrent"),)


def group_name(window: int | None) -> str:
    """Name of the cache group of attention layers with this window."""
    return FULL_GROUP if window is None else f"sliding_{window}"


def attention_groups(windows: Sequence[int | None]) -> tuple[CacheGroupSpec, ...]:
    """The cache groups of layers with these windows, in order of appearance."""
    return tuple(
        CacheGroupSpec(
            name=group_name(window),
            kind="attention" if window is None else "sliding",
            window=window,
        )
        for window in dict.fromkeys(windows)
    )


def positions(config: JsonConfig, rope: RopeSpec | None) -> int:
    """Positions the model is good for; YaRN's factor extends the original ones."""
    stated = config.integer("max_position_embeddings")
    if rope is None or rope.kind != "yarn":
        return stated
    return max(stated, int(rope.original_max_positions * rope.factor))


def build_model(
    config: JsonConfig,
    dtype: DtypeName,
    eos: tuple[int, ...],
    layers: Sequence[LayerSpec],
    groups: Sequence[CacheGroupSpec],
    **options: Any,
) -> ModelSpec:
    """The model spec of `layers`; what every family spells alike is read here.

    Args:
        options: further ModelSpec fields, on top of those.
    """
    common: dict[str, Any] = {
        "family": config.text("model_type"),
        "hidden_size": config.integer("hidden_size"),
        "vocab_size": config.integer("vocab_size"),
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "tie_word_embeddings": config.flag("tie_word_embeddings", False),
    }
    fields = {**common, **options}
    return ModelSpec(
        dtype=dtype, layers=tuple(layers), groups=tuple(groups), eos_token_ids=eos, **fields
    )
