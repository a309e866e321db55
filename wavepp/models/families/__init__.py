"""The model families that are supported: config.json's model_type -> how to read it.

A family is a table of names and switches with little code; the arithmetic is in layers/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from wavepp.models.families import dense, gemma, kimi, mla, moe, qwen_hybrid
from wavepp.models.json_config import JsonConfig
from wavepp.models.spec import DtypeName, ModelSpec

FamilyBuilder = Callable[[JsonConfig, DtypeName, tuple[int, ...]], ModelSpec]

FAMILIES: Mapping[str, FamilyBuilder] = {
    "llama": dense.llama,
    "mistral": dense.mistral,
    "qwen2": dense.qwen2,
    "qwen3": dense.qwen3,
    "qwen3_moe": moe.qwen3_moe,
    "glm4_moe": moe.glm4_moe,
    "qwen3_next": qwen_hybrid.qwen3_next,
    "qwen3_5": qwen_hybrid.qwen3_5,
    "qwen3_5_text": qwen_hybrid.qwen3_5_text,
    "gemma3_text": gemma.gemma3_text,
    "deepseek_v3": mla.deepseek_v3,
    "deepseek_v32": mla.deepseek_v32,
    "glm_moe_dsa": mla.glm_moe_dsa,
    "kimi_k3": kimi.kimi_k3,
    "kimi_linear": kimi.kimi_linear,
    "minimax_m2": moe.minimax_m2,
}
