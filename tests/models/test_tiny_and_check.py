"""Tiny checkpoints are whole and repeatable; check_model tells what a pipeline of one would be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer

from wavepp.actors.factories import torch_executor
from wavepp.config import EngineConfig
from wavepp.errors import ConfigError
from wavepp.models.check import PROBLEMS_MAX, check_model
from wavepp.models.loader import INDEX_NAME
from wavepp.models.tiny import TINY_FAMILIES, make_tiny


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_tiny_checkpoint_is_in_shards_and_loads(tiny_folder, tiny_oracle, family):
    folder = tiny_folder(family)
    index = json.loads((folder / INDEX_NAME).read_text())
    assert len(set(index["weight_map"].values())) >= 4
    assert AutoConfig.from_pretrained(folder).model_type == TINY_FAMILIES[family]["model_type"]
    norms = [p.detach() for n, p in tiny_oracle(family).named_parameters() if "norm" in n]
    assert all(float((norm - 1).abs().max()) > 0.1 for norm in norms)


def test_tiny_checkpoint_is_the_same_every_time(tiny_folder, tmp_path):
    again = make_tiny("qwen3", tmp_path)
    before = torch.get_rng_state()
    make_tiny("qwen3", tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    for file in sorted(p.name for p in tiny_folder("qwen3").iterdir()):
        assert (again / file).read_bytes() == (tiny_folder("qwen3") / file).read_bytes(), file


def test_tokenizer_round_trips_any_text(tiny_folder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder("llama"))
    for text in ("The capital of France", "naïve 北京 🙂\n\t\x01", "", " leading"):
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids) == text
        assert all(token < 512 for token in ids)
    assert len(tokenizer("The capital of France").input_ids) < 12


def test_chat_template_marks_turns(tiny_folder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder("mistral"))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer("<|im_end|>").input_ids == [4]


def test_unknown_family_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="family 'gpt2'"):
        make_tiny("gpt2", tmp_path)


def test_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(ConfigError, match="out "):
        make_tiny("llama", tmp_path / "x")


def test_report_has_stages_with_exact_bytes(tiny_folder):
    report = check_model(tiny_folder("llama"), 3, (1, 4, 3))
    assert report.is_supported
    assert (report.family, report.num_layers) == ("llama", 8)
    assert [stage.layers for stage in report.stages] == [(0, 1), (1, 5), (5, 8)]
    assert [stage.cache_bytes_per_token for stage in report.stages] == [256, 1024, 768]
    assert [stage.carry_bytes_per_token for stage in report.stages] == [256, 256, 0]
    assert sum(stage.weight_bytes for stage in report.stages) == report.weight_bytes
    stored = json.loads((tiny_folder("llama") / INDEX_NAME).read_text())["metadata"]["total_size"]
    assert report.weight_bytes == stored
    assert report.preferred_cuts == (1, 2, 3, 4, 5, 6, 7)


def test_report_of_a_sliding_model_names_its_window(tiny_folder):
    (stage,) = check_model(tiny_folder("mistral_sliding")).stages
    assert [(g.name, g.kind, g.window, g.layers) for g in stage.groups] == [
        ("sliding_48", "sliding", 48, 8)
    ]


def test_report_names_the_unsupported_key(tiny_folder, tmp_path):
    config = json.loads((tiny_folder("llama") / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "dynamic", "factor": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = check_model(tmp_path)
    assert not report.is_supported
    assert "rope_scaling.rope_type 'dynamic'" in report.unsupported[0]


def test_report_names_missing_weights(tiny_folder, tmp_path):
    (tmp_path / "config.json").write_bytes((tiny_folder("llama") / "config.json").read_bytes())
    assert "neither" in check_model(tmp_path).unsupported[0]
    index = json.loads((tiny_folder("llama") / INDEX_NAME).read_text())
    del index["weight_map"]["lm_head.weight"]
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    problem, *others = check_model(tmp_path).unsupported
    assert "1 tensors are missing: lm_head.weight" in problem
    assert all("no such file" in other or "more like these" in other for other in others)


def test_partition_that_does_not_fit_is_refused(tiny_folder):
    with pytest.raises(ConfigError, match="layer_partition"):
        check_model(tiny_folder("llama"), 2, (4, 5))


def cut_in_half(folder: Path, file: str) -> None:
    (folder / file).write_bytes((folder / file).read_bytes()[:-100])


def remove(folder: Path, file: str) -> None:
    (folder / file).unlink()


def without_a_tensor(folder: Path, file: str) -> None:
    save_file(dict(list(load_file(folder / file).items())[1:]), folder / file)


def with_another_shape(folder: Path, file: str) -> None:
    save_file({name: t[:1].clone() for name, t in load_file(folder / file).items()}, folder / file)


def with_another_dtype(folder: Path, file: str) -> None:
    save_file({name: t.char() for name, t in load_file(folder / file).items()}, folder / file)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut_in_half, "damaged or incomplete"),
        (remove, "no such file"),
        (without_a_tensor, "can't read"),
        (with_another_shape, "has shape"),
        (with_another_dtype, "has dtype I8"),
    ],
)
def test_report_says_what_loading_would_say(tiny_folder, tmp_path, damage, said):
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_folder("llama"), folder)
    file = json.loads((folder / INDEX_NAME).read_text())["weight_map"]["lm_head.weight"]
    damage(folder, file)
    problems = check_model(folder, 2).unsupported
    assert said in problems[0], problems
    assert len(problems) <= PROBLEMS_MAX + 1
    config = EngineConfig(model=folder, pipeline_parallel_size=2, num_gpu_blocks_override=1)
    with pytest.raises(ConfigError) as failure:
        [torch_executor(config, stage) for stage in range(2)]
    assert str(failure.value) in problems
