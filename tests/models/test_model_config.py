"""config.json -> ModelSpec: what is read, and what is refused by the name of its key."""

from __future__ import annotations

import json

import pytest

from wavepp.errors import ConfigError
from wavepp.models.config import read_model_spec
from wavepp.models.partition import stage_layers
from wavepp.models.spec import CarryTensorSpec

QWEN3_0_6B = {
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def write(folder, **changes):
    values = {key: value for key, value in {**QWEN3_0_6B, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_released_config_is_read(tmp_path):
    spec = read_model_spec(write(tmp_path))
    assert (spec.family, spec.dtype, spec.num_layers) == ("qwen3", "bfloat16", 28)
    assert (spec.hidden_size, spec.vocab_size, spec.max_model_len) == (1024, 151936, 40960)
    assert spec.parameters_in(0, 28) == 596_049_920
    assert spec.cache_bytes("attention", 0, 28) == 28 * 2 * 8 * 128 * 2
    assert spec.eos_token_ids == (151645,)
    assert spec.carry_at(7) == (CarryTensorSpec(name="hidden", shape=(1024,), dtype="bfloat16"),)
    assert spec.carry_at(7)[0].bytes_per_token == 2048


def test_stages_sum_to_the_whole(tmp_path):
    spec = read_model_spec(write(tmp_path, tie_word_embeddings=False))
    split = stage_layers(spec, 3)
    assert [lo for lo, _ in split] == [0, *(hi for _, hi in split[:-1])]
    assert sum(spec.parameters_in(lo, hi) for lo, hi in split) == spec.parameters_in(0, 28)
    assert sum(spec.cache_bytes("attention", lo, hi) for lo, hi in split) == 28 * 4096


def test_tied_embedding_is_loaded_on_both_ends(tmp_path):
    spec = read_model_spec(write(tmp_path))
    table = 1024 * 151936
    parts = spec.parameters_in(0, 14) + spec.parameters_in(14, 28)
    assert parts == spec.parameters_in(0, 28) + table


def test_asked_dtype_wins(tmp_path):
    assert read_model_spec(write(tmp_path), "float32").dtype == "float32"
    assert read_model_spec(write(tmp_path, torch_dtype=..., dtype="float16")).dtype == "float16"


def test_end_tokens_of_both_files_are_joined(tmp_path):
    write(tmp_path, eos_token_id=[7, 3])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 11]}')
    assert read_model_spec(tmp_path).eos_token_ids == (3, 7, 11)


def test_yarn_extends_the_positions(tmp_path):
    """Released files say so with max_position_embeddings left at the original."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    write(tmp_path, max_position_embeddings=32768, rope_scaling=yarn)
    assert read_model_spec(tmp_path).max_model_len == 131072


def test_windows_make_their_own_group(tmp_path):
    write(tmp_path, use_sliding_window=True, sliding_window=512, max_window_layers=20)
    spec = read_model_spec(tmp_path)
    assert [(g.name, g.kind, g.window) for g in spec.groups] == [
        ("attention", "attention", None),
        ("sliding_512", "sliding", 512),
    ]
    assert [g.name for g in spec.groups_in(0, 20)] == ["attention"]
    assert [g.name for g in spec.groups_in(20, 28)] == ["sliding_512"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"model_type": ...}, "model_type None"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"hidden_size": ...}, "hidden_size None"),
        ({"hidden_size": "1024"}, "hidden_size '1024'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0"),
        ({"num_key_value_heads": 5}, "num_key_value_heads 5"),
        ({"vocab_size": 1.5}, "vocab_size 1.5"),
        ({"rms_norm_eps": -1}, "rms_norm_eps -1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings 'yes'"),
        ({"torch_dtype": "int8"}, "dtype 'int8'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
        ({"rope_scaling": {"type": "mrope"}}, "rope_type 'mrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor None"),
        ({"rope_scaling": 3}, "rope_scaling 3"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 28}, "layer_types"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size None"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "dense"}},
            "format 'dense'",
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "format": "pack-quantized",
                    "config_groups": {"group_0": {"weights": {"num_bits": 8}}},
                }
            },
            "num_bits 8",
        ),
        ({"eos_token_id": "x"}, "eos_token_id 'x'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_unsupported_is_refused_by_its_key(tmp_path, changes, named):
    write(tmp_path, **changes)
    with pytest.raises(ConfigError) as refused:
        read_model_spec(tmp_path)
    assert named in str(refused.value)
    assert "config.json" in str(refused.value)


def test_missing_folder_and_file_are_named(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        read_model_spec(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_model_spec(tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]", "\x00"])
def test_damaged_config_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_model_spec(tmp_path)


def test_asked_dtype_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="dtype 'float8'"):
        read_model_spec(write(tmp_path), "float8")


def test_partition_that_does_not_fit_is_refused(tmp_path):
    spec = read_model_spec(write(tmp_path))
    with pytest.raises(ConfigError, match="layer_partition 20,9"):
        stage_layers(spec, 2, (20, 9))
    with pytest.raises(ConfigError, match="only 28 layers"):
        stage_layers(spec, 29)
    assert stage_layers(spec, 2, (20, 8)) == ((0, 20), (20, 28))
