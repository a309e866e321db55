"""Kimi K3: split also inside a residual block, mixed, resumed; equal to the reference."""

from __future__ import annotations

import json
import random

import pytest
import torch
from kimi_k3_reference import KimiK3
from model_oracle import CPU, BarePipeline, random_prompt

from wavepp.errors import ConfigError
from wavepp.kernels.select import select_ops
from wavepp.models.check import check_model
from wavepp.models.config import read_model_spec
from wavepp.models.loader import INDEX_NAME, CheckpointReader, stored_names
from wavepp.models.stage import StageModel, tensor_shapes

TOLERANCE = 1e-4
BLOCK = 64
SPLITS = [(9,), (3, 6), (2, 7), (1, 3, 5), (4, 1, 3, 1)]


@pytest.fixture(scope="module")
def folder(tiny_folder):
    return tiny_folder("kimi_k3")


@pytest.fixture(scope="module")
def reference(folder):
    model, made = KimiK3(folder), {}

    def logits(prompt: list[int]) -> torch.Tensor:
        if tuple(prompt) not in made:
            made[tuple(prompt)] = model(prompt)
        return made[tuple(prompt)]

    return logits


@pytest.mark.parametrize("budget", [64, 128, 1024])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_pipeline_equals_the_reference(folder, reference, split, budget):
    rng = random.Random(f"{split}{budget}")
    pipeline = BarePipeline(folder, split, block_size=BLOCK, blocks=24, seed=budget)
    prompts = random.Random(0)
    sequences = [pipeline.sequence(random_prompt(prompts, n)) for n in (1, 64, 97, 210)]
    pipeline.prefill(sequences, budget, rng)
    for sequence in sequences:
        expected = reference(sequence.token_ids)
        torch.testing.assert_close(sequence.all_logits(), expected, atol=TOLERANCE, rtol=0)


def test_prefix_resumes_at_every_block_boundary(folder, reference):
    rng = random.Random(3)
    pipeline = BarePipeline(folder, (2, 4, 3), block_size=BLOCK, blocks=64)
    first = pipeline.sequence(random_prompt(rng, 200))
    pipeline.prefill([first], 128, rng)
    for at in range(0, 193, BLOCK):
        prompt = first.token_ids[:at] + random_prompt(rng, 230 - at)
        second = pipeline.sequence(prompt, like=first, at=at)
        pipeline.prefill([second], 100, rng)
        expected = reference(prompt)[at:]
        torch.testing.assert_close(second.all_logits(), expected, atol=TOLERANCE, rtol=0)


def test_carry_grows_with_the_blocks(folder):
    spec = read_model_spec(folder)
    assert spec.preferred_cuts == (3, 6)
    for boundary, blocks in ((1, 1), (3, 1), (4, 2), (6, 2), (7, 3), (8, 3)):
        hidden, held = spec.carry_at(boundary)
        assert (hidden.name, hidden.shape) == ("hidden", (64,))
        assert (held.name, held.shape) == ("blocks", (blocks, 64))


def test_stage_reads_its_tensors_and_nothing_else(folder):
    spec = read_model_spec(folder)
    with CheckpointReader(folder, torch.float32, CPU) as weights:
        StageModel(spec, 3, 6, weights, select_ops(CPU))
        opened = weights.files_opened
    files = set(json.loads((folder / INDEX_NAME).read_text())["weight_map"].values())
    assert set(opened) < files
    layers = {name.split(".")[2] for name in weights.tensors_read}
    assert layers == {"3", "4", "5"}


def test_report_is_supported_and_counts_its_weights(folder):
    report = check_model(folder, 3, (2, 4, 3))
    assert report.is_supported, report.unsupported
    spec = read_model_spec(folder)
    with CheckpointReader(folder, torch.float32, CPU) as weights:
        model = StageModel(spec, 0, 9, weights, select_ops(CPU))
    # The norm and the projection of a mix are held as one.
    assert report.weight_bytes == model.weight_bytes + 4 * 64 * (2 * 9 + 1)
    assert len(set(tensor_shapes(spec, stored_names(folder)))) > 200
    assert [stage.snapshot_bytes for stage in report.stages] == [
        layers * (4 * 16 * 16 * 4 + 3 * 192 * 4) for layers in (2, 3, 1)
    ]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"activation_situ_beta": None}, "activation_situ_beta None"),
        ({"topk_method": "greedy"}, "topk_method 'greedy'"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func 'softmax'"),
        ({"linear_attn_config": {}}, "linear_attn_config: num_heads None"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq'"),
    ],
)
def test_unsupported_is_refused_by_its_key(folder, tmp_path, changes, named):
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as refused:
        read_model_spec(tmp_path)
    assert named in str(refused.value)
