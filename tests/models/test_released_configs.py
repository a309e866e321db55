"""The models of the paper at full size: configs as released, without weights; sizes to the byte."""

from __future__ import annotations

import json

from wavepp.models.check import check_model

GLM_5_2 = {
    "model_type": "glm_moe_dsa",
    "dtype": "bfloat16",
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 78,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 8e6},
    "hidden_act": "silu",
}
MINIMAX_M2_7 = {
    "model_type": "minimax_m2",
    "torch_dtype": "bfloat16",
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "rotary_dim": 64,
    "rope_theta": 5000000,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "max_position_embeddings": 204800,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
KIMI_LINEAR_48B = {
    "model_type": "kimi_linear",
    "dtype": "bfloat16",
    "vocab_size": 163840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "routed_scaling_factor": 2.446,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "model_max_length": 1048576,
    "rms_norm_eps": 1e-5,
    "linear_attn_config": {
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [n for n in range(1, 28) if n not in (4, 8, 12, 16, 20, 24, 27)],
    },
    "hidden_act": "silu",
}


def report_of(folder, config, stages=1, partition=None):
    (folder / "config.json").write_text(json.dumps(config))
    return check_model(folder, stages, partition)


def test_glm_5_2_has_its_cache_and_its_cuts(tmp_path):
    report = report_of(tmp_path, GLM_5_2, 4, (18, 20, 20, 20))
    tensors = [dict(stage.groups[0].tensors) for stage in report.stages]
    assert sum(t["latent"] for t in tensors) == 89_856
    assert sum(t["index_key"] for t in tensors) == 5_376
    assert report.preferred_cuts == (1, 2, *range(6, 75, 4))
    assert [t.name for stage in report.stages for t in stage.carry] == ["hidden"] * 3
    assert report.max_model_len == 1048576
    assert 740e9 < report.weight_bytes / 2 < 755e9


def test_glm_5_2_cut_on_a_shared_layer_carries_the_choice(tmp_path):
    report = report_of(tmp_path, GLM_5_2, 2, (40, 38))
    carry = report.stages[0].carry
    assert [(t.name, t.shape, t.dtype) for t in carry] == [
        ("hidden", (6144,), "bfloat16"),
        ("top_k", (2048,), "int32"),
    ]
    assert report.stages[0].carry_bytes_per_token == 12288 + 8192


def test_automatic_partition_prefers_full_layers(tmp_path):
    for stages in (2, 3, 4):
        report = report_of(tmp_path, GLM_5_2, stages)
        assert all(len(stage.carry) == 1 for stage in report.stages[:-1])


def test_minimax_m2_7_has_its_cache(tmp_path):
    report = report_of(tmp_path, MINIMAX_M2_7)
    assert report.stages[0].cache_bytes_per_token == 253_952
    assert 225e9 < report.weight_bytes / 2 < 233e9


def test_kimi_linear_has_its_cache_and_its_snapshot(tmp_path):
    report = report_of(tmp_path, KIMI_LINEAR_48B)
    (stage,) = report.stages
    assert stage.cache_bytes_per_token == 8_064
    sizes = dict(stage.groups[1].tensors)
    assert sizes == {"state": 20 * 32 * 128 * 128 * 4, "conv": 20 * 3 * 3 * 4096 * 2}
    assert stage.snapshot_bytes == sum(sizes.values())
    assert 47e9 < report.weight_bytes / 2 < 50e9


FULL_LAYERS = [*range(4, 93, 4), 93]
KIMI_K3 = {
    "model_type": "kimi_k3",
    "text_config": {
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "vocab_size": 163840,
        "hidden_size": 7168,
        "intermediate_size": 33792,
        "moe_intermediate_size": 3072,
        "num_hidden_layers": 93,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "attn_res_block_size": 12,
        "hidden_act": "situ",
        "activation_situ_beta": 4,
        "activation_situ_linear_beta": 25,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_shared_experts": 2,
        "routed_expert_hidden_size": 3584,
        "latent_moe_use_norm": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-5,
        "linear_attn_config": {
            "num_heads": 96,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
            "full_attn_layers": FULL_LAYERS,
            "kda_layers": [n for n in range(1, 94) if n not in FULL_LAYERS],
        },
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
        },
    },
}


def test_kimi_k3_has_its_cache_its_snapshot_and_its_carry(tmp_path):
    report = report_of(tmp_path, KIMI_K3, 8, (12,) * 7 + (9,))
    assert sum(stage.cache_bytes_per_token for stage in report.stages) == 27_648
    groups = [g for stage in report.stages for g in stage.groups if g.kind == "recurrent"]
    states = sum(dict(group.tensors)["state"] for group in groups)
    assert states == 69 * 96 * 128 * 128 * 4 == 434_110_464
    convs = sum(stage.snapshot_bytes for stage in report.stages) - states
    assert convs == 69 * 3 * 3 * 96 * 128 * 2
    assert report.preferred_cuts == tuple(range(12, 93, 12))
    carries = [stage.carry_bytes_per_token for stage in report.stages]
    assert carries == [14336 * (1 + n) for n in range(1, 8)] + [0]
    assert (report.family, report.num_layers, report.max_model_len) == ("kimi_k3", 93, 1048576)
    assert 2.7e12 < report.weight_bytes / 2 < 2.9e12


def test_what_is_not_read_is_said_once(tmp_path, caplog):
    caplog.set_level("INFO", logger="wavepp.models.config")
    report_of(tmp_path, {**GLM_5_2, "vision_config": {"depth": 3}})
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in lines] == ["num_nextn_predict_layers 1", "vision_config"]
