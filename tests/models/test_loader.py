"""A stage opens its own shards and reads its own tensors; damage is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from wavepp.errors import ConfigError
from wavepp.kernels.select import select_ops
from wavepp.models.config import read_model_spec
from wavepp.models.loader import INDEX_NAME, SINGLE_NAME, CheckpointReader, DummyWeights
from wavepp.models.stage import StageModel, tensor_shapes

CPU = torch.device("cpu")


@pytest.fixture
def llama(tiny_folder, tmp_path) -> Path:
    """A copy of the tiny llama that a test may damage."""
    return Path(shutil.copytree(tiny_folder("llama"), tmp_path / "llama"))


def load_stage(folder: Path, lo: int, hi: int) -> tuple[StageModel, CheckpointReader]:
    spec = read_model_spec(folder)
    with CheckpointReader(folder, torch.float32, CPU) as weights:
        model = StageModel(spec, lo, hi, weights, select_ops(CPU))
        opened = weights.files_opened
    weights.files_read = opened  # type: ignore[attr-defined]
    return model, weights


def weight_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX_NAME).read_text())["weight_map"]


def names_of(folder: Path, lo: int, hi: int) -> set[str]:
    layers = {n for n in weight_map(folder) for i in range(lo, hi) if f".layers.{i}." in n}
    first = {"model.embed_tokens.weight"} if lo == 0 else set()
    last = {"model.norm.weight", "lm_head.weight"} if hi == 8 else set()
    return layers | first | last


@pytest.mark.parametrize(("lo", "hi"), [(0, 3), (3, 5), (5, 8), (0, 8)])
def test_stage_reads_its_tensors_and_nothing_else(llama, lo, hi):
    _, weights = load_stage(llama, lo, hi)
    assert sorted(weights.tensors_read) == sorted(names_of(llama, lo, hi))


@pytest.mark.parametrize(("lo", "hi"), [(0, 3), (3, 5), (5, 8)])
def test_stage_loads_with_only_its_shards_there(llama, lo, hi):
    files = weight_map(llama)
    needed = {files[name] for name in names_of(llama, lo, hi)}
    assert needed != set(files.values())
    for file in set(files.values()) - needed:
        (llama / file).unlink()
    _, weights = load_stage(llama, lo, hi)
    assert set(weights.files_read) == needed


def test_single_file_checkpoint_is_the_same_model(llama):
    merged = {}
    for file in set(weight_map(llama).values()):
        with safe_open(str(llama / file), framework="pt") as handle:
            merged |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        (llama / file).unlink()
    (llama / INDEX_NAME).unlink()
    save_file(merged, str(llama / SINGLE_NAME), metadata={"format": "pt"})
    model, weights = load_stage(llama, 2, 8)
    assert weights.files_read == (SINGLE_NAME,)
    rows = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    head, norm = merged["lm_head.weight"], merged["model.norm.weight"]
    scaled = rows / (rows.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm
    torch.testing.assert_close(model.logits(rows), scaled @ head.T)


def test_tied_head_is_the_embedding(tiny_folder):
    folder = tiny_folder("qwen2")
    assert "lm_head.weight" not in weight_map(folder)
    _, last = load_stage(folder, 7, 8)
    assert "model.embed_tokens.weight" in last.tensors_read
    whole, reader = load_stage(folder, 0, 8)
    assert reader.tensors_read.count("model.embed_tokens.weight") == 1
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert whole.weight_bytes <= stored  # the table counts once


def test_weight_bytes_are_those_of_the_spec(tiny_folder):
    for family in ("llama", "qwen3"):
        model, _ = load_stage(tiny_folder(family), 2, 8)
        expected = model.spec.parameters_in(2, 8) * 4
        extra = 0
        if family == "qwen3":  # the two head norms are held once per head
            mixer = model.spec.layers[0].mixer
            heads = mixer.num_heads + mixer.num_kv_heads
            extra = 6 * (heads - 2) * mixer.head_dim * 4
        assert model.weight_bytes == expected + extra


def test_tensor_names_are_those_of_the_checkpoint(tiny_folder):
    for family in ("llama", "mistral", "qwen2", "qwen3"):
        folder = tiny_folder(family)
        assert sorted(tensor_shapes(read_model_spec(folder))) == sorted(weight_map(folder))


def test_missing_tensor_is_named(llama):
    index = json.loads((llama / INDEX_NAME).read_text())
    del index["weight_map"]["model.layers.4.mlp.up_proj.weight"]
    (llama / INDEX_NAME).write_text(json.dumps(index))
    load_stage(llama, 0, 4)
    with pytest.raises(ConfigError, match=r"'model\.layers\.4\.mlp\.up_proj\.weight'"):
        load_stage(llama, 4, 8)


def test_missing_shard_is_named(llama):
    file = weight_map(llama)["model.norm.weight"]
    (llama / file).unlink()
    with pytest.raises(ConfigError, match=f"{file}: no such file"):
        load_stage(llama, 0, 8)


@pytest.mark.parametrize("keep", [0, 5, 600, -100])
def test_truncated_shard_is_named(llama, keep):
    path = llama / weight_map(llama)["model.norm.weight"]
    content = path.read_bytes()
    path.write_bytes(content[:keep])
    with pytest.raises(ConfigError, match=f"{path.name}: damaged or incomplete"):
        load_stage(llama, 7, 8)


def test_corrupt_header_is_named(llama):
    path = llama / weight_map(llama)["model.norm.weight"]
    path.write_bytes(b"\xff" * 1000)
    with pytest.raises(ConfigError, match=f"{path.name}: damaged or incomplete"):
        load_stage(llama, 7, 8)


def test_wrong_shape_is_named_with_both(llama):
    config = json.loads((llama / "config.json").read_text())
    config["intermediate_size"] = 96
    (llama / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"shape \[128, 64\], config\.json says \[96, 64\]"):
        load_stage(llama, 0, 1)


def test_integer_weights_are_refused(llama):
    path = llama / weight_map(llama)["model.norm.weight"]
    with safe_open(str(path), framework="pt") as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    save_file(tensors, str(path), metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="dtype I8"):
        load_stage(llama, 7, 8)


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../x"}}']
)
def test_damaged_index_is_named(llama, content):
    (llama / INDEX_NAME).write_text(content)
    with pytest.raises(ConfigError, match=r"index\.json"):
        load_stage(llama, 0, 1)


def test_no_weights_at_all_is_named(llama):
    for file in llama.glob("model*"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"neither model\.safetensors\.index\.json nor"):
        load_stage(llama, 0, 1)


def test_dummy_weights_do_not_depend_on_the_split(tiny_folder):
    spec = read_model_spec(tiny_folder("qwen3"))
    ops = select_ops(CPU)
    whole = StageModel(spec, 0, 8, DummyWeights(3, torch.float32, CPU), ops)
    part = StageModel(spec, 5, 8, DummyWeights(3, torch.float32, CPU), ops)
    other = StageModel(spec, 5, 8, DummyWeights(4, torch.float32, CPU), ops)
    rows = torch.ones(2, 64)
    assert torch.equal(whole.logits(rows), part.logits(rows))
    assert not torch.equal(whole.logits(rows), other.logits(rows))


def test_bfloat16_checkpoint_is_widened_exactly(tmp_path):
    from wavepp.models.tiny import make_tiny

    folder = make_tiny("llama", tmp_path, dtype=torch.bfloat16)
    assert read_model_spec(folder).dtype == "bfloat16"
    with CheckpointReader(folder, torch.float32, CPU) as wide:
        a = wide.read("model.norm.weight", (64,))
    with CheckpointReader(folder, torch.bfloat16, CPU) as narrow:
        b = narrow.read("model.norm.weight", (64,))
    assert torch.equal(a, b.float())
