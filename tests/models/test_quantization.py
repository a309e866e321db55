"""Quantised checkpoints decode bit by bit as independent code does, also at partial blocks."""

from __future__ import annotations

import json
import random
import re
import shutil
from math import prod
from pathlib import Path

import pytest
import torch
from kimi_k3_reference import decode_mxfp4
from live_bytes import LiveBytes
from model_oracle import CPU, BarePipeline, oracle_logits, random_prompt
from safetensors.torch import load_file, save_file
from torch import Tensor

from wavepp.errors import ConfigError
from wavepp.kernels.select import select_ops
from wavepp.models.check import check_model
from wavepp.models.config import read_model_spec
from wavepp.models.loader import CheckpointReader, stored_names
from wavepp.models.quantization import Quantization, dequantize
from wavepp.models.stage import StageModel, tensor_shapes
from wavepp.models.tiny_kimi_k3 import pack_mxfp4


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pack_fp8(weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // block), -(-columns // block))
    packed = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scale[i, j] = weight[at].abs().max() / 448
            packed[at] = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn)
    return packed, scale


def decode_fp8(packed: Tensor, scale: Tensor, block: int) -> Tensor:
    result = packed.float()
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            result[i * block : (i + 1) * block, j * block : (j + 1) * block] *= scale[i, j]
    return result


def pack_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = weight.shape
    scale = (weight.view(rows, -1, group).abs().amax(-1) / 7).bfloat16()
    codes = (weight.view(rows, -1, group) / scale.float()[..., None]).round().clamp(-8, 7) + 8
    codes = codes.view(rows, columns).long()
    words = torch.zeros(rows, -(-columns // 8), dtype=torch.int64)
    for column in range(columns):
        words[:, column // 8] |= codes[:, column] << (4 * (column % 8))
    words = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return words.to(torch.int32), scale, torch.tensor([rows, columns])


def decode_int4(packed: Tensor, scale: Tensor, shape: Tensor) -> Tensor:
    """One number at a time."""
    columns = shape.tolist()[1]
    group = columns // scale.shape[1]
    return torch.tensor(
        [
            [
                (((row[c // 8] >> (4 * (c % 8))) & 15) - 8) * scales[c // group]
                for c in range(columns)
            ]
            for row, scales in zip(packed.tolist(), scale.tolist(), strict=True)
        ]
    )


@pytest.mark.parametrize(
    ("shape", "block"), [((64, 96), 32), ((72, 40), 32), ((5, 7), 128), ((576, 256), 128)]
)
def test_fp8_blocks_decode_bit_by_bit(shape, block):
    packed, scale = pack_fp8(randn(*shape), block)
    tensors = {"x.weight": packed, "x.weight_scale_inv": scale}
    decoded = dequantize("x.weight", tensors, Quantization(format="fp8", block=(block, block)))
    assert torch.equal(decoded, decode_fp8(packed, scale, block))
    assert float((decoded - randn(*shape)).abs().max()) < 0.25


def test_mxfp4_decodes_bit_by_bit():
    packed, scale = pack_mxfp4(randn(6, 96) * torch.logspace(-6, 6, 6)[:, None])
    assert len(set(scale.flatten().tolist())) > 5
    packed[0, :8] = torch.arange(8, dtype=torch.uint8) * 34 + 1
    decoded = dequantize(
        "x.weight",
        {"x.weight_packed": packed, "x.weight_scale": scale},
        Quantization(format="mxfp4"),
    )
    assert torch.equal(decoded, decode_mxfp4(packed, scale))


@pytest.mark.parametrize(("shape", "group"), [((6, 64), 32), ((3, 96), 32), ((5, 20), 10)])
def test_int4_decodes_bit_by_bit(shape, group):
    packed, scale, size = pack_int4(randn(*shape), group)
    tensors = {"x.weight_packed": packed, "x.weight_scale": scale, "x.weight_shape": size}
    decoded = dequantize("x.weight", tensors, Quantization(format="int4"))
    assert torch.equal(decoded, decode_int4(packed, scale, size))
    assert float((decoded - randn(*shape)).abs().max()) < 0.4


@pytest.mark.parametrize(
    ("quantization", "tensors"),
    [
        (Quantization(format="fp8", block=(8, 8)), {"weight_scale_inv": randn(1, 2)}),
        (Quantization(format="mxfp4"), {"weight_scale": torch.zeros(4, 3, dtype=torch.uint8)}),
    ],
)
def test_parts_that_do_not_fit_are_named(quantization, tensors):
    whole = {
        "x.weight": randn(16, 16).to(torch.float8_e4m3fn),
        "x.weight_packed": torch.zeros(4, 32, dtype=torch.uint8),
        **{f"x.{name}": tensor for name, tensor in tensors.items()},
    }
    with pytest.raises(ConfigError, match=r"'x\.weight'"):
        dequantize("x.weight", whole, quantization)


def quantised_copy(folder: Path, out: Path, kind: str) -> tuple[Path, Path]:
    """The checkpoint with its matrices quantised, and one with the same numbers stored plainly."""
    packed_folder = Path(shutil.copytree(folder, out / "packed"))
    plain_folder = Path(shutil.copytree(folder, out / "plain"))
    weight_map = {}
    for file in sorted(folder.glob("*.safetensors")):
        packed, plain = {}, {}
        for name, tensor in load_file(file).items():
            plain[name] = packed[name] = tensor
            if not re.search(r"(_proj|\.w[123])\.weight$", name):
                continue
            del packed[name]
            stem = name.removesuffix(".weight")
            if kind == "fp8":
                weight, scale = pack_fp8(tensor, 48)  # partial blocks
                packed |= {name: weight, f"{stem}.weight_scale_inv": scale}
                plain[name] = decode_fp8(weight, scale, 48)
            else:
                weight, scale, shape = pack_int4(tensor, 8)
                packed |= {f"{stem}.weight_packed": weight, f"{stem}.weight_scale": scale}
                packed[f"{stem}.weight_shape"] = shape
                plain[name] = decode_int4(weight, scale, shape)
        save_file(packed, packed_folder / file.name, metadata={"format": "pt"})
        save_file(plain, plain_folder / file.name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(packed, file.name))
    index = {"metadata": {}, "weight_map": weight_map}
    (packed_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "fp8": {"quant_method": "fp8", "weight_block_size": [48, 48]},
        "int4": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    }[kind]
    (packed_folder / "config.json").write_text(json.dumps(config))
    return packed_folder, plain_folder


@pytest.mark.parametrize(("family", "kind"), [("deepseek_v3", "fp8"), ("qwen3", "int4")])
def test_quantised_checkpoint_is_the_model_of_its_numbers(tiny_folder, tmp_path, family, kind):
    packed, plain = quantised_copy(tiny_folder(family), tmp_path, kind)
    assert check_model(packed).is_supported
    prompt = random_prompt(random.Random(0), 70)
    results = []
    for folder in (packed, plain):
        pipeline = BarePipeline(folder, (3, 5))
        sequence = pipeline.sequence(prompt)
        pipeline.prefill([sequence], 64, random.Random(1))
        results.append(sequence.all_logits())
    assert torch.equal(*results)


def test_fp8_minimax_equals_transformers_on_the_same_numbers(tiny_folder, tmp_path):
    from model_oracle import load_oracle

    packed, plain = quantised_copy(tiny_folder("minimax_m2"), tmp_path, "fp8")
    prompt = random_prompt(random.Random(0), 70)
    pipeline = BarePipeline(packed, (4, 4))
    sequence = pipeline.sequence(prompt)
    pipeline.prefill([sequence], 64, random.Random(1))
    expected = oracle_logits(load_oracle(plain), prompt)
    torch.testing.assert_close(sequence.all_logits(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("family", "kind"),
    [("kimi_linear", None), ("deepseek_v3", "fp8"), ("kimi_k3", "mxfp4"), ("qwen3_moe", "int4")],
)
def test_stage_never_holds_more_than_its_weights_and_one_tensor(
    tiny_folder, tmp_path, family, kind
):
    folder = tiny_folder(family)
    if kind in ("fp8", "int4"):
        folder, _ = quantised_copy(folder, tmp_path, kind)
    spec, ops = read_model_spec(folder), select_ops(CPU)
    own = [f"model.layers.{layer}." for layer in range(2, 5)]
    shapes = tensor_shapes(spec, stored_names(folder)).items()
    largest = max(prod(shape) for name, shape in shapes if shape and name.startswith(tuple(own)))
    with LiveBytes() as live, CheckpointReader(folder, torch.bfloat16, CPU) as weights:
        stage = StageModel(spec, 2, 5, weights, ops)
    one_tensor = 4 * largest + largest * 5 // 2  # decoded, and what it is decoded from
    assert stage.weight_bytes <= live.peak <= stage.weight_bytes + one_tensor
    assert one_tensor < stage.weight_bytes / 4


def test_missing_scale_is_reported(tiny_folder, tmp_path):
    packed, _ = quantised_copy(tiny_folder("qwen3"), tmp_path, "int4")
    path = packed / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.layers.2.mlp.up_proj.weight_scale"]
    path.write_text(json.dumps(index))
    (problem,) = check_model(packed).unsupported
    assert "model.layers.2.mlp.up_proj.weight" in problem


def test_plain_tensors_of_a_quantised_checkpoint_are_read_as_they_are(tiny_folder, tmp_path):
    packed, plain = quantised_copy(tiny_folder("qwen3"), tmp_path, "fp8")
    name, shape = "model.embed_tokens.weight", (512, 64)
    read = []
    for folder in (packed, plain):
        with CheckpointReader(folder, torch.float32, CPU) as weights:
            read.append(weights.read(name, shape))
    assert torch.equal(*read)


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_quantised_tensor_of_another_shape_is_reported(tiny_folder, tmp_path, kind):
    packed, _ = quantised_copy(tiny_folder("qwen3"), tmp_path, kind)
    path = packed / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"intermediate_size": config["intermediate_size"] + 16}))
    problems = check_model(packed).unsupported
    assert any("mlp.up_proj" in problem and "has shape" in problem for problem in problems)
