"""Every family beyond the dense ones: split, mixed into waves, resumed; equal to transformers."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from model_oracle import BarePipeline, load_oracle, oracle_logits, random_prompt
from safetensors.torch import load_file, save_file

from wavepp.errors import ConfigError
from wavepp.kernels import torch_dsa
from wavepp.models.check import check_model
from wavepp.models.config import read_model_spec
from wavepp.models.loader import INDEX_NAME, stored_names
from wavepp.models.stage import tensor_shapes
from wavepp.models.tiny import TINY_FAMILIES, make_tiny

MOE = ("qwen3_moe", "glm4_moe", "minimax_m2")
MLA = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
RECURRENT = ("kimi_linear", "qwen3_next", "qwen3_5_text")
OTHERS = ("gemma3_text",)
FAMILIES = MOE + MLA + RECURRENT + OTHERS
SPLITS = [(8,), (3, 5), (1, 5, 2), (2, 1, 4, 1)]
TOLERANCES = dict.fromkeys(RECURRENT, 1e-4)
NEAR_TIE = 3e-6
BLOCK = 64


def tolerance(family: str) -> float:
    return TOLERANCES.get(family, 2e-5)


def check(sequence, expected: torch.Tensor, family: str) -> None:
    torch.testing.assert_close(sequence.all_logits(), expected, atol=tolerance(family), rtol=0)


@pytest.mark.parametrize("budget", [64, 128, 1024])
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_pipeline_equals_transformers(tiny_folder, expected_logits, family, split, budget):
    rng = random.Random(f"{family}{split}{budget}")
    pipeline = BarePipeline(tiny_folder(family), split, block_size=BLOCK, blocks=24, seed=budget)
    prompts = random.Random(family)
    sequences = [pipeline.sequence(random_prompt(prompts, n)) for n in (1, 17, 64, 131, 333)]
    pipeline.prefill(sequences, budget, rng)
    for sequence in sequences:
        check(sequence, expected_logits(family, sequence.token_ids), family)


@pytest.fixture
def margins(monkeypatch) -> list[float]:
    """How far, in each sparse row, the least score that was chosen lies above the next one. What is
    nearly a tie is decided by rounding, in another way on another machine."""
    seen: list[float] = []

    def largest(scores: torch.Tensor, count: int) -> torch.Tensor:
        if scores.shape[1] > count:
            least, following = scores.topk(count + 1, dim=-1).values[:, -2:].unbind(1)
            seen.extend((least - following)[following.isfinite()].tolist())
        return scores.topk(count, dim=-1).indices

    monkeypatch.setattr(torch_dsa, "largest", largest)
    return seen


def prefill_without_ties(pipeline, draw, margins: list[float], rng, budget: int):
    """A sequence that `draw` makes, computed; another one while some choice is nearly a tie."""
    for _ in range(20):
        margins.clear()
        sequence = draw()
        pipeline.prefill([sequence], budget, rng)
        if min(margins, default=1.0) > NEAR_TIE:
            return sequence
    raise AssertionError("every prompt has a choice that is nearly a tie")


@pytest.mark.parametrize("family", FAMILIES)
def test_prefix_resumes_at_every_block_boundary(tiny_folder, expected_logits, family, margins):
    rng = random.Random(3)
    pipeline = BarePipeline(tiny_folder(family), (3, 5), block_size=BLOCK, blocks=700)

    def draw_first():
        return pipeline.sequence(random_prompt(rng, 300))

    first = prefill_without_ties(pipeline, draw_first, margins, rng, 128)
    for at in range(0, 257, BLOCK):

        def draw(at: int = at):
            prompt = first.token_ids[:at] + random_prompt(rng, 330 - at)
            return pipeline.sequence(prompt, like=first, at=at)

        second = prefill_without_ties(pipeline, draw, margins, rng, 100)
        check(second, expected_logits(family, second.token_ids)[at:], family)


@pytest.mark.parametrize("family", FAMILIES)
def test_report_counts_what_is_stored(tiny_folder, family):
    """Names, bytes and parameters of the spec are those of the files."""
    folder = tiny_folder(family)
    index = json.loads((folder / INDEX_NAME).read_text())
    report = check_model(folder, 2, (3, 5))
    assert report.is_supported, report.unsupported
    assert report.weight_bytes == index["metadata"]["total_size"]
    assert sorted(tensor_shapes(read_model_spec(folder), stored_names(folder))) == sorted(
        index["weight_map"]
    )


VARIANTS = {
    "softmax_weights_as_they_are": ("qwen3_moe", {"norm_topk_prob": False}),
    "dense_layers_between": ("qwen3_moe", {"mlp_only_layers": [2], "decoder_sparse_step": 2}),
    "groups": ("glm4_moe", {"n_group": 4, "topk_group": 2}),
    "no_dense_no_norm": ("glm4_moe", {"first_k_dense_replace": 0, "use_qk_norm": False}),
    "sigmoid_weights_as_they_are": ("glm4_moe", {"norm_topk_prob": False, "n_shared_experts": 2}),
    "mla_full_query": ("deepseek_v3", {"q_lora_rank": None}),
    "mla_bias_without_interleaving": (
        "deepseek_v3",
        {"attention_bias": True, "rope_interleave": False},
    ),
    "mla_bias": ("deepseek_v3", {"attention_bias": True}),
    "mla_values_wider_than_keys": ("deepseek_v3", {"v_head_dim": 40}),
    "mla_plain_rope": ("deepseek_v3", {"rope_parameters": {"rope_type": "default"}}),
    "mla_mscales_differ": (
        "deepseek_v3",
        {"rope_parameters": {**TINY_FAMILIES["deepseek_v3"]["rope_parameters"], "mscale": 0.7}},
    ),
    "dsa_pattern": ("glm_moe_dsa", {"indexer_types": ["full", "shared"] * 4}),
    "dsa_more_keys": ("glm_moe_dsa", {"index_topk": 150, "v_head_dim": 24}),
    "gdn_dense_layers": ("qwen3_next", {"mlp_only_layers": [1], "linear_value_head_dim": 24}),
    "gdn_bias": ("qwen3_5_text", {"attention_bias": True, "linear_num_key_heads": 4}),
    "gemma_bias": ("gemma3_text", {"attention_bias": True, "tie_word_embeddings": True}),
    "gemma_scaled_rope": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            }
        },
    ),
    "many_experts": ("minimax_m2", {"num_local_experts": 40, "num_experts_per_tok": 6}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_equals_transformers(tmp_path, name):
    family, overrides = VARIANTS[name]
    folder = make_tiny(family, tmp_path, overrides=overrides)
    rng = random.Random(name)
    oracle = load_oracle(folder)
    pipeline = BarePipeline(folder, (3, 5), block_size=BLOCK, blocks=16)
    sequences = [pipeline.sequence(random_prompt(rng, n)) for n in (5, 97, 200)]
    pipeline.prefill(sequences, 128, rng)
    for sequence in sequences:
        check(sequence, oracle_logits(oracle, sequence.token_ids), family)


REFUSED = {
    "final_logit_softcapping 30.0": ("gemma3_text", {"final_logit_softcapping": 30.0}),
    "hidden_activation 'silu'": ("gemma3_text", {"hidden_activation": "silu"}),
    "linear_num_key_heads 3": ("qwen3_next", {"linear_num_key_heads": 3}),
    "layer_types": ("qwen3_5_text", {"layer_types": ["sliding_attention"] * 8}),
    "indexer_types .* begins with a shared": ("glm_moe_dsa", {"indexer_types": ["shared"] * 8}),
    "indexer_types .* is not full": ("glm_moe_dsa", {"indexer_types": ["full"] * 7}),
    "index_head_dim 4": ("deepseek_v32", {"index_head_dim": 4}),
    "full_attn_layers .4.": (
        "kimi_linear",
        {"linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2]}},
    ),
    "mla_use_nope False": ("kimi_linear", {"mla_use_nope": False}),
    "moe_layer_freq 2": ("deepseek_v3", {"moe_layer_freq": 2}),
    "topk_method 'greedy'": ("deepseek_v3", {"topk_method": "greedy"}),
    "use_sliding_window True": ("qwen3_moe", {"use_sliding_window": True}),
    "n_group 3": ("glm4_moe", {"n_group": 3}),
    "topk_group 5": ("glm4_moe", {"topk_group": 5}),
    "scoring_func 'softmax'": ("minimax_m2", {"scoring_func": "softmax"}),
    "qk_norm_type 'per_head'": ("minimax_m2", {"qk_norm_type": "per_head"}),
    "rotary_dim 99": ("minimax_m2", {"rotary_dim": 99, "partial_rotary_factor": None}),
}


@pytest.mark.parametrize("named", REFUSED)
def test_unsupported_is_refused_by_its_key(tiny_folder, tmp_path, named):
    family, changes = REFUSED[named]
    config = json.loads((tiny_folder(family) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ConfigError, match=named):
        read_model_spec(tmp_path)


def test_dense_layer_is_found_where_transformers_writes_it(tiny_folder, tiny_oracle, tmp_path):
    folder = Path(shutil.copytree(tiny_folder("kimi_linear"), tmp_path / "again"))
    tiny_oracle("kimi_linear").save_pretrained(folder / "saved")
    for file in folder.glob("model*"):
        file.unlink()
    for file in (folder / "saved").glob("*.safetensors*"):
        file.rename(folder / file.name)
    assert "model.layers.0.block_sparse_moe.up_proj.weight" in stored_names(folder)
    assert check_model(folder).is_supported
    prompt = random_prompt(random.Random(0), 90)
    pipeline = BarePipeline(folder, (1, 7), block_size=BLOCK, blocks=8)
    sequence = pipeline.sequence(prompt)
    pipeline.prefill([sequence], 64, random.Random(0))
    check(sequence, oracle_logits(tiny_oracle("kimi_linear"), prompt), "kimi_linear")


def layers_of(folder: Path) -> int:
    return read_model_spec(folder).num_layers


@pytest.mark.parametrize("family", [*RECURRENT, "kimi_k3"])
def test_restored_snapshot_is_bit_equal(tiny_folder, family):
    """A second request from a snapshot equals going on from the working slot itself, bit by bit."""
    rng = random.Random(9)
    tokens = random_prompt(rng, 320)
    split = (2, layers_of(tiny_folder(family)) - 2)
    whole = BarePipeline(tiny_folder(family), split, block_size=BLOCK, blocks=64)
    first = whole.sequence(tokens)
    whole.run([(first, 192)])
    restored = whole.sequence(tokens, like=first, at=192)
    whole.run([(first, 128)])
    assert restored.read_from == first.snapshots[192] != first.slot
    whole.run([(restored, 128)])
    assert torch.equal(restored.all_logits(), first.logits[-1])
    for stage, pools in zip(whole.stages, whole.pools, strict=True):
        for layer, held in zip(whole.spec.layers[stage.lo : stage.hi], pools, strict=True):
            if layer.group == "recurrent":
                assert all(torch.equal(p[first.slot], p[restored.slot]) for p in held)


@pytest.mark.parametrize("family", [*RECURRENT, "kimi_k3"])
def test_snapshots_do_not_depend_on_the_waves(tiny_folder, family):
    tokens = random_prompt(random.Random(2), 256)
    kept = []
    for cuts in ((256,), (64, 128, 64), (192, 64)):
        split = (layers_of(tiny_folder(family)),)
        pipeline = BarePipeline(tiny_folder(family), split, block_size=BLOCK, blocks=32)
        sequence = pipeline.sequence(tokens)
        for length in cuts:
            pipeline.run([(sequence, length)])
        unit = sequence.snapshots[192]
        layers = zip(pipeline.spec.layers, pipeline.pools[0], strict=True)
        kept.append([p[unit] for layer, ps in layers if layer.group == "recurrent" for p in ps])
    for other in kept[1:]:
        for one, same in zip(kept[0], other, strict=True):
            torch.testing.assert_close(one, same, atol=1e-5, rtol=1e-4)


def test_language_model_of_a_larger_checkpoint_is_read(tiny_folder, tiny_oracle, tmp_path):
    """Qwen3.5 as released: nested config and names, and tensors of a vision tower."""
    family = "qwen3_5_text"
    folder = Path(shutil.copytree(tiny_folder(family), tmp_path / "nested"))
    text = json.loads((folder / "config.json").read_text())
    nested = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 1}}
    (folder / "config.json").write_text(json.dumps(nested))
    weight_map = {}
    for file in sorted(folder.glob("*.safetensors")):
        named = load_file(file)
        renamed = {
            name.replace("model.", "model.language_model.", 1): t for name, t in named.items()
        }
        renamed["model.visual.blocks.0.norm.weight"] = torch.ones(3)
        save_file(renamed, file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(renamed, file.name))
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    report = check_model(folder, 2)
    assert report.is_supported, report.unsupported
    prompt = random_prompt(random.Random(0), 90)
    pipeline = BarePipeline(folder, (2, 6), block_size=BLOCK, blocks=8)
    sequence = pipeline.sequence(prompt)
    pipeline.prefill([sequence], 64, random.Random(0))
    check(sequence, oracle_logits(tiny_oracle(family), prompt), family)


def test_legacy_ropes_of_gemma_are_read(tiny_folder, tmp_path):
    """As released: rope_theta and rope_scaling of full layers, rope_local_base_freq of others."""
    config = json.loads((tiny_folder("gemma3_text") / "config.json").read_text())
    del config["rope_parameters"]
    config["rope_theta"], config["rope_local_base_freq"] = 1e6, 1e4
    config["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sliding, full = (layer.mixer.rope for layer in read_model_spec(tmp_path).layers[:2])
    assert (sliding.kind, sliding.theta) == ("default", 1e4)
    assert (full.kind, full.theta, full.factor) == ("linear", 1e6, 8.0)
