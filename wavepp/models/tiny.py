"""Tiny random checkpoints in the released layout, with a small working tokenizer.

For demos, tests and first runs without a hub: some hundred thousand parameters, several shards, and
norms and biases that are not at their neutral values, so that every tensor matters. transformers
builds the model (so its own forward is an oracle for it); the files are written here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from wavepp.errors import ConfigError
from wavepp.models.loader import INDEX_NAME
from wavepp.models.tiny_kimi_k3 import build_kimi_k3
from wavepp.models.tiny_tokenizer import BOS_ID, EOS_ID, PAD_ID, TURN_END_ID, write_tokenizer

SHARD_BYTES = 200_000
VOCAB_SIZE = 512

_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_MLA = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
# As many index heads as released: with few, many scores are 0 and ties are broken by chance.
_INDEXER = {"index_topk": 32, "index_head_dim": 16, "index_n_heads": 32}
_DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
    },
}
TINY_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"model_type": "llama", "rope_parameters": _LLAMA3_ROPE},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral_sliding": {"model_type": "mistral", "sliding_window": 48},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_EXPERTS,
        "num_experts": 8,
        "norm_topk_prob": True,
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        **_EXPERTS,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.5,
        },
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **_EXPERTS,
        **_MLA,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 128,
        },
    },
    "deepseek_v32": {
        "model_type": "deepseek_v32",
        **_EXPERTS,
        **_MLA,
        **_INDEXER,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "glm_moe_dsa": {
        "model_type": "glm_moe_dsa",
        **_EXPERTS,
        **_MLA,
        **_INDEXER,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 8e6},
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        **_EXPERTS,
        **_DELTA,
        "num_experts": 8,
        "shared_expert_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "qwen3_5_text": {"model_type": "qwen3_5_text", **_DELTA},
    "gemma3_text": {
        "model_type": "gemma3_text",
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
        "query_pre_attn_scalar": 20,
    },
    "kimi_linear": {
        "model_type": "kimi_linear",
        **_MLA,
        "q_lora_rank": None,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": True,
        "routed_scaling_factor": 2.446,
        "model_max_length": 4096,
        "linear_attn_config": {
            "head_dim": 16,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
            "kda_layers": [1, 2, 3, 5, 6, 7],
            "full_attn_layers": [4, 8],
        },
    },
    "minimax_m2": {
        "model_type": "minimax_m2",
        "intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rotary_dim": 8,
        "rope_theta": 5e6,
    },
}
_LEGACY_ROPE = (
    "deepseek_v3",
    "llama",
    "mistral",
    "qwen2",
    "minimax_m2",
)  # whose released files still spell it the old way


def make_tiny(
    family: str,
    out_dir: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 1234,
    overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a tiny checkpoint of `family` into `out_dir` and returns that folder.

    Args:
        family: one of TINY_FAMILIES.
        dtype: of the stored weights.
        seed: of the weights; equal seeds give equal files.
        overrides: config values on top of the family's (a value of another kind of model is the
            caller's to get right).

    Raises:
        ConfigError: no such family, or the folder can't be written.
    """
    known = (*TINY_FAMILIES, "kimi_k3")
    if family not in known:
        raise ConfigError(f"family {family!r} is not known; known: {', '.join(known)}")
    out = Path(out_dir)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out {str(out)!r}: {error.strerror}") from None
    if family == "kimi_k3":
        return _make_kimi_k3(out, dtype, seed, overrides)
    values = {**_COMMON, **TINY_FAMILIES[family], **(overrides or {})}
    config, tensors = _build(values, seed)
    _write_config(out, config.to_dict(), dtype, legacy=family in _LEGACY_ROPE)
    _write_shards(out, {name: tensor.to(dtype) for name, tensor in tensors.items()})
    write_tokenizer(out, values["vocab_size"])
    return out


def _make_kimi_k3(
    out: Path, dtype: torch.dtype, seed: int, overrides: Mapping[str, Any] | None
) -> Path:
    """Kimi K3; gates and packed experts keep their own dtypes."""
    config, tensors = build_kimi_k3(seed, overrides)
    config["text_config"]["dtype"] = str(dtype).removeprefix("torch.")
    kept = re.compile(r"(A_log|dt_bias|e_score_correction_bias|_packed|_scale)$")
    stored = {n: t if kept.search(n) else t.to(dtype) for n, t in tensors.items()}
    _write_json(out / "config.json", config)
    _write_shards(out, stored)
    write_tokenizer(out, config["text_config"]["vocab_size"])
    return out


def _build(values: Mapping[str, Any], seed: int) -> tuple[Any, dict[str, Tensor]]:
    """A transformers config and the weights of a model of it, tied ones left out."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    options = dict(values)
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        build: Any = AutoModelForCausalLM
        model: torch.nn.Module = build.from_config(config, dtype=torch.float32)
    _randomise(model, seed)
    config.architectures = [type(model).__name__]
    stored = revert_weight_conversion(cast("Any", model), model.state_dict())
    tensors = {_released(name): tensor.detach() for name, tensor in stored.items()}
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return config, tensors


def _released(name: str) -> str:
    """The released name: transformers stores Kimi Linear's dense MLPs where experts are."""
    return re.sub(r"\.block_sparse_moe\.((?:gate|up|down)_proj\.)", r".mlp.\1", name)


def _randomise(model: torch.nn.Module, seed: int) -> None:
    """Moves norms and biases away from ones and zeros, which would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        buffers = [b for b in model.named_buffers() if b[0].endswith("e_score_correction_bias")]
        for name, parameter in [*model.named_parameters(), *buffers]:
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                # States that last: where they vanish at once, norms behind them amplify rounding.
                parameter.copy_(0.5 * noise - 2.0)
            elif name.endswith("e_score_correction_bias"):
                parameter.copy_(0.2 * noise)
            elif "norm" in name and name.endswith("weight"):
                parameter.add_(0.2 * noise)
            elif name.endswith("bias") and not name.endswith("dt_bias"):
                parameter.copy_(0.1 * noise)


def _write_config(out: Path, config: dict[str, Any], dtype: torch.dtype, *, legacy: bool) -> None:
    config = {key: value for key, value in config.items() if not key.startswith("_")}
    name = str(dtype).removeprefix("torch.")
    config["torch_dtype" if legacy else "dtype"] = name
    if legacy:
        config.pop("dtype", None)
        rope = dict(config.pop("rope_parameters"))
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
    _write_json(out / "config.json", config)
    tokens = {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, TURN_END_ID], "pad_token_id": PAD_ID}
    _write_json(out / "generation_config.json", tokens)


def _write_shards(out: Path, tensors: Mapping[str, Tensor]) -> None:
    """Shards of about SHARD_BYTES and their index, in the released naming."""
    shards: list[dict[str, Tensor]] = [{}]
    size = total = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, str(out / file), metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    _write_json(out / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
