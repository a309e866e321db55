"""Every switch of the dense families and every rope type, each against transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from model_oracle import BarePipeline, load_oracle, oracle_logits, random_prompt

from wavepp.models.config import read_model_spec
from wavepp.models.layers.rope import inverse_frequencies
from wavepp.models.tiny import make_tiny

TOLERANCE = 2e-5
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "theta": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": YARN,
    "yarn_attention_factor": {**YARN, "attention_factor": 0.7},
    "yarn_mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn_betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_one_kv_head": ("llama", {"num_key_value_heads": 1}),
    "llama_all_kv_heads": ("llama", {"num_key_value_heads": 4}),
    "llama_wide_heads": ("llama", {"head_dim": 48}),
    "qwen3_bias": ("qwen3", {"attention_bias": True}),
    "qwen3_window_from_layer_5": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 5},
    ),
    "qwen2_window_by_layer_types": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
        },
    ),
    "qwen2_window_off": ("qwen2", {"use_sliding_window": False, "sliding_window": 20}),
    "mistral_window_of_one": ("mistral", {"sliding_window": 1}),
    "mistral_wide_window": ("mistral", {"sliding_window": 300}),
}


def check_against_oracle(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    oracle = load_oracle(folder)
    pipeline = BarePipeline(folder, (3, 5), seed=seed)
    sequences = [pipeline.sequence(random_prompt(rng, n)) for n in (5, 97, 400)]
    pipeline.prefill(sequences, 128, rng)
    for sequence in sequences:
        expected = oracle_logits(oracle, sequence.token_ids)
        torch.testing.assert_close(sequence.all_logits(), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_equals_transformers(tmp_path, name):
    family, overrides = VARIANTS[name]
    check_against_oracle(make_tiny(family, tmp_path, overrides=overrides), len(name))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", ROPES)
def test_rope_equals_transformers(tmp_path, name, family):
    """llama is written in the legacy spelling, qwen3 in the one of transformers 5."""
    rope = {"rope_theta": 10000.0, **ROPES[name]}
    folder = make_tiny(family, tmp_path, overrides={"rope_parameters": rope})
    spelled = json.loads((folder / "config.json").read_text())
    assert ("rope_theta" in spelled) == (family == "llama")
    check_against_oracle(folder, len(name))


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_equal_transformers(tmp_path, name):
    rope = {"rope_theta": 10000.0, **ROPES[name]}
    folder = make_tiny("llama", tmp_path, overrides={"rope_parameters": rope})
    rotary = load_oracle(folder).model.rotary_emb
    mine = read_model_spec(folder).layers[0].mixer.rope
    torch.testing.assert_close(inverse_frequencies(mine), rotary.inv_freq, atol=0, rtol=1e-6)
    assert mine.attention_factor == pytest.approx(rotary.attention_scaling)


def test_rope_scaling_with_the_oldest_key_is_read(tmp_path):
    """`type` instead of `rope_type`."""
    folder = make_tiny("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["rope_scaling"] = {"type": "linear", "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    rope = read_model_spec(folder).layers[0].mixer.rope
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 2.0, 10000.0)
    check_against_oracle(folder, 1)
