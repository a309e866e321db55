"""A tiny Kimi K3 checkpoint in the released layout, which transformers has no class for.

Nested config, `language_model.` names, MXFP4 experts, zero-padded A_log; nine layers in blocks of
three, the last two of them attention, as in the released model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from wavepp.models.tiny_tokenizer import BOS_ID, EOS_ID, PAD_ID

PREFIX = "language_model.model."
PADDED_HEADS = 32
TEXT_CONFIG: Mapping[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "dtype": "float32",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "linear_attn_config": {
        "num_heads": 4,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "full_attn_layers": [4, 8, 9],
    },
    "attn_res_block_size": 3,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 32,
    "latent_moe_use_norm": True,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_renormalize": True,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
    },
}


def build_kimi_k3(
    seed: int, overrides: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the tensors by their stored names; `overrides` are of the text config."""
    text = {**TEXT_CONFIG, **(overrides or {})}
    config = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "text_config": text,
    }
    return config, _Weights(text, seed).all()


class _Weights:
    """Random tensors of every layer; nothing is at its neutral value."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._config = config
        self._generator = torch.Generator().manual_seed(seed)

    def all(self) -> dict[str, Tensor]:
        c = self._config
        hidden, vocab = c["hidden_size"], c["vocab_size"]
        tensors = {
            f"{PREFIX}embed_tokens.weight": self._randn(vocab, hidden, std=1.0),
            f"{PREFIX}norm.weight": self._norm(hidden),
            f"{PREFIX}output_attn_res_norm.weight": self._norm(hidden),
            f"{PREFIX}output_attn_res_proj.weight": self._randn(1, hidden),
            "language_model.lm_head.weight": self._randn(vocab, hidden),
        }
        for index in range(c["num_hidden_layers"]):
            layer = self._residuals()
            full = index + 1 in c["linear_attn_config"]["full_attn_layers"]
            mixer = self._attention() if full else self._kda()
            layer |= {f"self_attn.{name}": tensor for name, tensor in mixer.items()}
            if index < c["first_k_dense_replace"]:
                layer |= self._mlp("mlp", c["intermediate_size"])
            else:
                layer |= self._experts()
            tensors |= {f"{PREFIX}layers.{index}.{name}": t for name, t in layer.items()}
        return tensors

    def _randn(self, *shape: int, std: float = 0.08) -> Tensor:
        return torch.randn(shape, generator=self._generator) * std

    def _norm(self, size: int) -> Tensor:
        return 1 + self._randn(size, std=0.2)

    def _residuals(self) -> dict[str, Tensor]:
        hidden = self._config["hidden_size"]
        norms = ("input_layernorm", "post_attention_layernorm")
        tensors = {f"{name}.weight": self._norm(hidden) for name in norms}
        for name in ("self_attention_res", "mlp_res"):
            tensors[f"{name}_norm.weight"] = self._norm(hidden)
            tensors[f"{name}_proj.weight"] = self._randn(1, hidden)
        return tensors

    def _kda(self) -> dict[str, Tensor]:
        linear, hidden = self._config["linear_attn_config"], self._config["hidden_size"]
        heads, dim = linear["num_heads"], linear["head_dim"]
        size, width = heads * dim, linear["short_conv_kernel_size"]
        tensors = {}
        for part in "qkv":
            tensors[f"{part}_proj.weight"] = self._randn(size, hidden)
            tensors[f"{part}_conv1d.weight"] = self._randn(size, 1, width, std=0.5)
        rate = torch.zeros(PADDED_HEADS)
        rate[:heads] = torch.rand(heads, generator=self._generator)
        return tensors | {
            "f_a_proj.weight": self._randn(dim, hidden),
            "f_b_proj.weight": self._randn(size, dim),
            "g_proj.weight": self._randn(size, hidden),
            "b_proj.weight": self._randn(heads, hidden),
            "o_norm.weight": self._norm(dim),
            "o_proj.weight": self._randn(hidden, size),
            "dt_bias": self._randn(size, std=1.0),
            "A_log": rate,
        }

    def _attention(self) -> dict[str, Tensor]:
        c = self._config
        hidden, heads, value = c["hidden_size"], c["num_attention_heads"], c["v_head_dim"]
        nope, rope = c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        rank, q_rank = c["kv_lora_rank"], c["q_lora_rank"]
        return {
            "q_a_proj.weight": self._randn(q_rank, hidden),
            "q_a_layernorm.weight": self._norm(q_rank),
            "q_b_proj.weight": self._randn(heads * (nope + rope), q_rank),
            "kv_a_proj_with_mqa.weight": self._randn(rank + rope, hidden),
            "kv_a_layernorm.weight": self._norm(rank),
            "kv_b_proj.weight": self._randn(heads * (nope + value), rank),
            "g_proj.weight": self._randn(heads * value, hidden),
            "o_proj.weight": self._randn(hidden, heads * value),
        }

    def _mlp(self, prefix: str, size: int) -> dict[str, Tensor]:
        hidden = self._config["hidden_size"]
        shapes = {"gate": (size, hidden), "up": (size, hidden), "down": (hidden, size)}
        return {f"{prefix}.{n}_proj.weight": self._randn(*shape) for n, shape in shapes.items()}

    def _experts(self) -> dict[str, Tensor]:
        c, prefix = self._config, "block_sparse_moe"
        hidden, latent = c["hidden_size"], c["routed_expert_hidden_size"]
        inner = c["moe_intermediate_size"]
        tensors = {
            f"{prefix}.gate.weight": self._randn(c["num_experts"], hidden, std=0.5),
            f"{prefix}.gate.e_score_correction_bias": self._randn(c["num_experts"], std=0.2),
            f"{prefix}.routed_expert_down_proj.weight": self._randn(latent, hidden),
            f"{prefix}.routed_expert_up_proj.weight": self._randn(hidden, latent),
            f"{prefix}.routed_expert_norm.weight": self._norm(latent),
        }
        tensors |= self._mlp(f"{prefix}.shared_experts", inner * c["num_shared_experts"])
        shapes = {"w1": (inner, latent), "w3": (inner, latent), "w2": (latent, inner)}
        for expert in range(c["num_experts"]):
            for part, shape in shapes.items():
                packed, scale = pack_mxfp4(self._randn(*shape, std=0.3))
                name = f"{prefix}.experts.{expert}.{part}"
                tensors[f"{name}.weight_packed"] = packed
                tensors[f"{name}.weight_scale"] = scale
        return tensors


def pack_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest MXFP4 numbers of [o, i]: packed U8 [o, i / 2] and scales U8 [o, i / 32]."""
    rows, columns = weight.shape
    groups = weight.view(rows, columns // 32, 32)
    exponent = torch.floor(torch.log2(groups.abs().amax(-1).clamp_min(1e-30))) - 2
    scaled = (groups / torch.exp2(exponent)[..., None]).clamp(-6, 6)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([values, -values])
    codes = (scaled[..., None] - values).abs().argmin(-1).to(torch.uint8).view(rows, columns)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return packed.contiguous(), (exponent + 127).to(torch.uint8)
