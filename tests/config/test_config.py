"""EngineConfig from keyword arguments and YAML: what is taken, and how a mistake is named."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from wavepp.config import EngineConfig, build_config
from wavepp.errors import ConfigError


def test_config_has_the_defaults_of_the_descriptions() -> None:
    config = EngineConfig(model="m", pipeline_parallel_size=3)
    assert (config.ring_waves, config.wave_tokens_min) == (6, 1024)
    assert config.model_name == "m"


@pytest.mark.parametrize(
    ("batched", "block", "expected"),
    [(2048, 64, 1024), (960, 64, 448), (64, 64, 64)],
)
def test_smallest_wave_is_half_a_wave_in_whole_blocks(
    batched: int, block: int, expected: int
) -> None:
    config = EngineConfig(model="m", max_num_batched_tokens=batched, block_size=block)
    assert config.wave_tokens_min == expected


@pytest.mark.parametrize(("block", "wave"), [(16, 2048), (48, 2016), (4096, 4096)])
def test_the_default_wave_fits_the_block_size(block: int, wave: int) -> None:
    assert EngineConfig(model="m", block_size=block).max_num_batched_tokens == wave


def test_the_greedy_planner_takes_waves_of_any_size() -> None:
    config = EngineConfig(model="m", planner="greedy", max_num_batched_tokens=50, min_wave_tokens=7)
    assert (config.max_num_batched_tokens, config.wave_tokens_min) == (50, 7)
    small = EngineConfig(model="m", planner="greedy", max_num_batched_tokens=16)
    assert small.wave_tokens_min == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "model is required"),
        ({"modle": "m"}, "unknown field 'modle'; did you mean 'model'?"),
        ({"pipeline_paralel_size": 2}, "did you mean 'pipeline_parallel_size'?"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size: Input should be greater"),
        ({"pipeline_parallel_size": True}, r"valid integer \(got True\)"),
        ({"pipeline_parallel_size": "2"}, r"valid integer \(got '2'\)"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching: "),
        ({"dtype": "int8"}, r"dtype: .*'float32'.*\(got 'int8'\)"),
        ({"transport": "mpi"}, r"transport: .*\(got 'mpi'\)"),
        ({"layer_partition": "8,x"}, "layer_partition: write it as comma-separated"),
        ({"layer_partition": "3,5"}, "names 2 stages, pipeline_parallel_size is 1"),
        ({"layer_partition": [0]}, "every stage needs at least one layer"),
        ({"min_wave_tokens": 4096}, "min_wave_tokens 4096 exceeds max_num_batched_tokens 2048"),
        (
            {"max_num_batched_tokens": 1000},
            "max_num_batched_tokens 1000 is no multiple of block_size 64: take 960 or 1024",
        ),
        ({"max_num_batched_tokens": 16}, "16 is no multiple of block_size 64: take 64 "),
        ({"min_wave_tokens": 100, "planner": "static"}, "min_wave_tokens 100 is no multiple"),
        ({"admission": "parallel"}, r"admission: .*'serial'.*\(got 'parallel'\)"),
        (
            {"reservation": "lease", "lease_headroom_waves": 2},
            "lease_headroom_waves 2: reservation lease reserves no room",
        ),
        ({"planner": "best"}, r"planner: .*'mpu'.*\(got 'best'\)"),
        ({"progress_deadline_ms": -1.0}, "progress_deadline_ms: "),
        ({"watchdog_s": -1.0}, "watchdog_s: "),
        ({"threads_per_stage": 100_000}, "threads_per_stage: "),
    ],
)
def test_config_names_what_is_wrong(options: dict[str, Any], message: str) -> None:
    required = {"model": "m"} if options and "modle" not in options else {}
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**required, **options)


@pytest.mark.parametrize("given", ["3,5", " 3, 5", [3, 5], (3, 5)])
def test_layer_partition_takes_text_and_lists(given: Any) -> None:
    config = EngineConfig(model="m", pipeline_parallel_size=2, layer_partition=given)
    assert config.layer_partition == (3, 5)


def test_config_takes_paths_and_survives_pickling() -> None:
    config = EngineConfig(model=Path("folder/m"), trace=Path("t.jsonl"))
    assert (config.model, config.trace) == ("folder/m", "t.jsonl")
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301


def test_yaml_fills_what_was_not_given(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: from-yaml\npipeline-parallel-size: 2\nlayer_partition: 5,3\nseed: 7\nwatchdog-s: 5"
    )
    config = build_config({"seed": 1}, file)
    assert config == EngineConfig(
        model="from-yaml",
        pipeline_parallel_size=2,
        layer_partition=(5, 3),
        seed=1,
        watchdog_s=5.0,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modell: x", "unknown option 'modell'; did you mean 'model'?"),
        ("max-num-seq: 3", "did you mean 'max_num_seqs'?"),
        ("- 1\n- 2", "expected lines of `name: value`"),
        ("just words", "expected lines of `name: value`"),
        ("1: 2", "expected lines of `name: value`"),
        ("a: [", "not YAML"),
        ("model: m\nblock-size: 4\nblock_size: 8", "given twice"),
        ("model: m\nmodel: n", "line 2: model was given before"),
        ("model: m\n? [a]\n: b", "not YAML"),
        ("model: m\nblock-size: four", r"block_size: .*\(got 'four'\)"),
        ("model: 3", r"model: .*\(got 3\)"),
    ],
)
def test_yaml_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        build_config({}, file)


def test_empty_yaml_is_no_options(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("")
    assert build_config({"model": "m"}, file) == EngineConfig(model="m")


def test_yaml_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml: No such file"):
        build_config({}, tmp_path / "missing.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00bad")
    with pytest.raises(ConfigError, match="not YAML"):
        build_config({}, tmp_path / "bytes.yaml")


def test_every_field_says_what_it_is() -> None:
    assert all(info.description for info in EngineConfig.model_fields.values())
