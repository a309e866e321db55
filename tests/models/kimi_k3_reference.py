"""Kimi K3 in plain torch, from the published formulas: whole prompts, no cache, token by token.

Sources: Kimi Delta Attention (arXiv 2510.26692), Attention Residuals (arXiv 2603.15031), the
released config. Float32, and nothing of wavepp.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def decode_mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """One number at a time."""
    rows = []
    for row, scales in zip(packed.tolist(), scale.tolist(), strict=True):
        codes = [code for byte in row for code in (byte & 15, byte >> 4)]
        rows.append(
            [
                (-1.0 if code & 8 else 1.0) * NUMBERS[code & 7] * 2.0 ** (scales[i // 32] - 127)
                for i, code in enumerate(codes)
            ]
        )
    return torch.tensor(rows)


class KimiK3:
    """The model of a checkpoint folder; call it with token ids for logits [T, vocab]."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())["text_config"]
        self.w: dict[str, Tensor] = {}
        for file in folder.glob("*.safetensors"):
            with safe_open(str(file), framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118
                    self.w[name.removeprefix("language_model.")] = handle.get_tensor(name)
        for name in [name for name in self.w if name.endswith("weight_packed")]:
            stem = name.removesuffix("_packed")
            self.w[stem] = decode_mxfp4(self.w.pop(name), self.w.pop(f"{stem}_scale"))
        self.w = {name: tensor.float() for name, tensor in self.w.items()}

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"{name}.weight"].T

    def norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        eps = self.config["rms_norm_eps"] if eps is None else eps
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * self.w[f"{name}.weight"]

    def situ(self, gate: Tensor, up: Tensor) -> Tensor:
        beta = self.config["activation_situ_beta"]
        linear_beta = self.config["activation_situ_linear_beta"]
        bounded = linear_beta * torch.tanh(up / linear_beta)
        return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * bounded

    def mlp(self, x: Tensor, name: str, parts: tuple[str, str, str]) -> Tensor:
        gate, up, down = (f"{name}.{part}" for part in parts)
        return self.linear(self.situ(self.linear(x, gate), self.linear(x, up)), down)

    def experts(self, x: Tensor, name: str) -> Tensor:
        scores = torch.sigmoid(self.linear(x, f"{name}.gate"))
        steered = scores + self.w[f"{name}.gate.e_score_correction_bias"]
        latent = self.linear(x, f"{name}.routed_expert_down_proj")
        mixed = torch.zeros_like(latent)
        for t in range(len(x)):
            best = steered[t].topk(self.config["num_experts_per_token"]).indices.tolist()
            total = sum(scores[t, e] for e in best)
            for e in best:
                share = scores[t, e] / total * self.config["routed_scaling_factor"]
                mixed[t] += share * self.mlp(latent[t], f"{name}.experts.{e}", ("w1", "w3", "w2"))
        mixed = self.norm(mixed, f"{name}.routed_expert_norm")
        shared = self.mlp(x, f"{name}.shared_experts", ("gate_proj", "up_proj", "down_proj"))
        return self.linear(mixed, f"{name}.routed_expert_up_proj") + shared

    def mix(self, residuals: list[Tensor], name: str) -> Tensor:
        weight = self.w[f"{name}_norm.weight"] * self.w[f"{name}_proj.weight"][0]
        scores = []
        for v in residuals:
            unit = v / (v.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
            scores.append(unit @ weight)
        shares = torch.stack(scores, -1).softmax(-1)
        return sum(shares[:, i, None] * v for i, v in enumerate(residuals))

    def kda(self, x: Tensor, name: str) -> Tensor:
        linear = self.config["linear_attn_config"]
        heads, dim, width = (linear[k] for k in ("num_heads", "head_dim", "short_conv_kernel_size"))
        parts = {}
        for part in "qkv":
            line = F.pad(self.linear(x, f"{name}.{part}_proj"), (0, 0, width - 1, 0)).T[None]
            kernel = self.w[f"{name}.{part}_conv1d.weight"]
            line = F.silu(F.conv1d(line, kernel, groups=heads * dim))[0].T
            parts[part] = line.reshape(-1, heads, dim)
        q, k = (
            v / (v.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for v in (parts["q"], parts["k"])
        )
        z = self.linear(self.linear(x, f"{name}.f_a_proj"), f"{name}.f_b_proj")
        z = (z + self.w[f"{name}.dt_bias"]).view(-1, heads, dim)
        rate = self.w[f"{name}.A_log"][:heads].exp()[:, None]
        alpha = (linear["gate_lower_bound"] * torch.sigmoid(rate * z)).exp()
        beta = torch.sigmoid(self.linear(x, f"{name}.b_proj"))
        state, results = torch.zeros(heads, dim, dim), []
        for t in range(len(x)):
            state = alpha[t, :, :, None] * state
            error = parts["v"][t] - torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t], beta[t, :, None] * error)
            results.append(torch.einsum("hkv,hk->hv", state, q[t] * dim**-0.5))
        gate = torch.sigmoid(self.linear(x, f"{name}.g_proj")).view(-1, heads, dim)
        gated = self.norm(torch.stack(results), f"{name}.o_norm") * gate
        return self.linear(gated.flatten(1), f"{name}.o_proj")

    def attention(self, x: Tensor, name: str) -> Tensor:
        c = self.config
        heads, nope, rope = (
            c[k] for k in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim")
        )
        rank, value = c["kv_lora_rank"], c["v_head_dim"]
        q = self.norm(self.linear(x, f"{name}.q_a_proj"), f"{name}.q_a_layernorm", 1e-6)
        q = self.linear(q, f"{name}.q_b_proj").view(-1, heads, nope + rope)
        down = self.linear(x, f"{name}.kv_a_proj_with_mqa")
        latent = self.norm(down[:, :rank], f"{name}.kv_a_layernorm", 1e-6)
        kv = self.linear(latent, f"{name}.kv_b_proj").view(-1, heads, nope + value)
        k = torch.cat([kv[..., :nope], down[:, None, rank:].expand(-1, heads, -1)], -1)
        scores = torch.einsum("thd,shd->hts", q, k) * (nope + rope) ** -0.5
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        mixed = torch.einsum("hts,shd->thd", weights, kv[..., nope:]).flatten(1)
        return self.linear(
            mixed * torch.sigmoid(self.linear(x, f"{name}.g_proj")), f"{name}.o_proj"
        )

    @torch.inference_mode()
    def __call__(self, token_ids: list[int]) -> Tensor:
        c = self.config
        x = self.w["model.embed_tokens.weight"][torch.tensor(token_ids)]
        blocks: list[Tensor] = []
        for i in range(c["num_hidden_layers"]):
            name = f"model.layers.{i}"
            h = self.mix([*blocks, x], f"{name}.self_attention_res") if blocks else x
            h = self.norm(h, f"{name}.input_layernorm")
            is_full = i + 1 in c["linear_attn_config"]["full_attn_layers"]
            a = (self.attention if is_full else self.kda)(h, f"{name}.self_attn")
            if i % c["attn_res_block_size"] == 0:
                blocks.append(x)
                x = a
            else:
                x = x + a
            m = self.mix([*blocks, x], f"{name}.mlp_res")
            m = self.norm(m, f"{name}.post_attention_layernorm")
            if i < c["first_k_dense_replace"]:
                x = x + self.mlp(m, f"{name}.mlp", ("gate_proj", "up_proj", "down_proj"))
            else:
                x = x + self.experts(m, f"{name}.block_sparse_moe")
        x = self.mix([*blocks, x], "model.output_attn_res")
        return self.linear(self.norm(x, "model.norm"), "lm_head")
