"""Cost models: files are checked, shipped ones can be used, and the fitted one follows its fit."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from wavepp import ConfigError, EngineConfig
from wavepp.emulated.cost_model import load_cost_model, parse_cost_model, shipped_names
from wavepp.emulated.stage_model import build_stage_model, partition, stage_costs

ROOT = Path(__file__).parents[2]
SMALL = """
name: small
about: for tests
vocab_size: 100
max_model_len: 1000
carry_bytes: 8
kinds:
  a:
    {cache: attention, cache_bytes: 4, weight_bytes: 10, wave_s: 0.5, token_s: 1e-3,
     context_s: 1e-6}
  r:
    {cache: recurrent, cache_bytes: 256, cache_shards: 2, weight_bytes: 10, wave_s: 0.5,
     token_s: 2e-3}
layers:
  - {times: 2, kinds: [r, a]}
ends: {embedding_bytes: 5, embedding_token_s: 1e-4, head_bytes: 7, head_s: 0.25}
device:
  memory_bytes: 1e6
  memory_share: 0.5
  device_bytes_per_s: 1e9
  host_bytes_per_s: 1e6
  link_bytes_per_s: 1e6
  link_s: 0.01
tensor_parallel: {collective_wave_s: 0.1, collective_token_s: 1e-4, context_factor: 1.5}
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def config(cost_model: object, **options: object) -> EngineConfig:
    return EngineConfig(device="emulated", cost_model=cost_model, **options)


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_models_split_over_stages(name: str) -> None:
    model = load_cost_model(name)
    assert model.name == name
    layers = len(model.layer_kinds)
    for stages in (1, 2, 8):
        ranges = partition(model, stages)
        assert [lo for lo, _ in ranges] == [0, *(hi for _, hi in ranges[:-1])]
        assert ranges[-1][1] == layers
    stage = build_stage_model(config(name, pipeline_parallel_size=8), 3)
    assert stage.costs.c1 > 0
    assert all(group.units > 0 for group in stage.facts.groups)


def test_kimi_k3_has_the_coefficients_of_its_fit() -> None:
    fitted = runpy.run_path(str(ROOT / "scripts" / "fit_kimi_k3.py"))
    found, model = fitted["coefficients"](), load_cost_model("b300-kimi-k3")
    mla, tensor = model.kinds["mla"], model.tensor_parallel
    assert tensor is not None
    assert mla.token_s == model.kinds["kda"].token_s == pytest.approx(found["token_s"], rel=1e-3)
    assert mla.context_s == pytest.approx(found["context_s"], rel=1e-3)
    assert tensor.collective_token_s == pytest.approx(found["collective_token_s"], rel=1e-3)
    assert tensor.context_factor == pytest.approx(found["context_factor"], rel=1e-3)
    off = [modelled / published - 1 for _, published, modelled in fitted["residuals"]()]
    assert max(map(abs, off[:3])) < 0.03


def test_kimi_k3_has_the_sizes_of_the_released_configuration() -> None:
    model = load_cost_model("b300-kimi-k3")
    kinds = model.layer_kinds
    full = [n for n, kind in enumerate(kinds, 1) if kind.cache == "attention"]
    assert (len(kinds), full) == (93, [*range(4, 93, 4), 93])
    assert sum(kind.cache_bytes for kind in kinds if kind.cache == "attention") == 27_648
    state = 96 * 128 * 128 * 4 + 3 * 3 * 96 * 128 * 2
    assert model.kinds["kda"].cache_bytes == state
    assert [hi - lo for lo, hi in partition(model, 8)] == [12] * 7 + [9]


def test_stage_costs_are_the_sums_of_its_layers(small: Path) -> None:
    model = load_cost_model(str(small))
    first, last = stage_costs(model, (0, 1)), stage_costs(model, (1, 4))
    assert (first.c0, first.c1, first.c2) == pytest.approx((0.5, 2.1e-3, 0.0))
    assert (last.c0, last.c1, last.c2) == pytest.approx((1.5, 4e-3, 2e-6))
    shared = stage_costs(model, (1, 4), devices=2)
    assert (shared.c0, shared.c1, shared.c2) == pytest.approx((1.05, 2.3e-3, 1.5e-6))


def test_stage_has_pools_of_what_weights_leave(small: Path) -> None:
    options = {"pipeline_parallel_size": 2, "block_size": 16, "max_num_seqs": 4}
    first = build_stage_model(config(small, **options), 0).facts
    # 500,000 bytes, less 25 of weights and embedding and 4 slots of 256; a block is 64 bytes of
    # attention and 16/4096 of a snapshot of 256 bytes
    attention, recurrent = first.groups
    assert (attention.bytes_per_unit, recurrent.bytes_per_unit) == (64, 256)
    assert attention.units == (500_000 - 25 - 4 * 256) // 65
    assert recurrent.units == attention.units * 16 // 4096
    assert first.weight_bytes == 25
    asked = build_stage_model(config(small, **options, num_gpu_blocks_override=9), 1).facts
    assert [group.units for group in asked.groups] == [9, 4]
    shared = build_stage_model(config(small, block_size=16, tensor_parallel_size=2), 0).facts
    assert [group.bytes_per_unit for group in shared.groups] == [2 * 64, 2 * 128]


@pytest.mark.parametrize(
    ("was", "becomes", "said"),
    [
        ("name: small", "nmae: small", "unknown field 'nmae'; did you mean 'name'?"),
        ("wave_s: 0.5", "wave_s: -1", "kinds.a.wave_s"),
        ("kinds: [r, a]", "kinds: [r, b]", "layers name 'b'"),
        ("vocab_size: 100", "", "vocab_size is required"),
        ("memory_bytes: 1e6", "memory_bytes: much", "device.memory_bytes"),
        ("name: small", "name: [", "not YAML"),
    ],
)
def test_bad_files_are_refused_by_field(was: str, becomes: str, said: str) -> None:
    with pytest.raises(ConfigError, match="cost_model here") as caught:
        parse_cost_model("here", SMALL.replace(was, becomes, 1))
    assert said in str(caught.value)


def test_unknown_names_and_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'b300-kimi-k3'"):
        load_cost_model("b300-kimi")
    with pytest.raises(ConfigError, match="No such file"):
        load_cost_model(str(tmp_path / "none.yaml"))


def test_what_does_not_fit_is_refused(small: Path) -> None:
    with pytest.raises(ConfigError, match="has only 4 layers"):
        build_stage_model(config(small, pipeline_parallel_size=5), 0)
    with pytest.raises(ConfigError, match="has only 1000"):
        build_stage_model(config(small, max_model_len=2000), 0)
    with pytest.raises(ConfigError, match="has no tensor_parallel"):
        build_stage_model(config("uniform", tensor_parallel_size=2), 0)
    with pytest.raises(ConfigError, match="left for the cache"):
        build_stage_model(config("b300-kimi-k3"), 0)


def test_configuration_needs_a_cost_model_for_emulated_devices_only() -> None:
    assert EngineConfig(device="emulated", cost_model="uniform").model == "uniform"
    assert EngineConfig(device="emulated", cost_model="uniform", model="m").model == "m"
    with pytest.raises(ConfigError, match="needs a cost_model"):
        EngineConfig(device="emulated")
    with pytest.raises(ConfigError, match="cost_model uniform is for device emulated"):
        EngineConfig(model="m", cost_model="uniform")
    with pytest.raises(ConfigError, match=r"time_scale 0\.5 is for device emulated"):
        EngineConfig(model="m", time_scale=0.5)
    with pytest.raises(ConfigError, match="model is required"):
        EngineConfig()
