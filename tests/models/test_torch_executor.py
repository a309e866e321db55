"""The torch executor: waves in, carries and outputs out; pool sizes, threads, bad options."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from model_oracle import oracle_logits, random_prompt

from wavepp.actors.carry import pack_carry, unpack_carry
from wavepp.actors.executors import TorchExecutor
from wavepp.actors.factories import torch_executor
from wavepp.config import EngineConfig
from wavepp.control.work import Sampling, SpanWork, StageWork
from wavepp.errors import ConfigError
from wavepp.models.tiny import make_tiny
from wavepp.units import RequestId, WaveNumber

BLOCK = 16


def build(folder, stages: int = 1, **options) -> list[TorchExecutor]:
    options = {"num_gpu_blocks_override": 64, "threads_per_stage": 1, **options}
    config = EngineConfig(
        model=str(folder), pipeline_parallel_size=stages, block_size=BLOCK, **options
    )
    return [torch_executor(config, stage) for stage in range(stages)]


def span(
    name: str, tokens: Sequence[int], start: int, length: int, blocks: Sequence[int], **options
) -> SpanWork:
    end = start + length
    table = np.array(blocks[: -(-end // BLOCK)], dtype=np.int32)
    return SpanWork(
        request_id=RequestId(name),
        start=start,
        length=length,
        token_ids=np.array(tokens[start:end], dtype=np.int32),
        block_tables={group: table for group in ("attention", "sliding_48")},
        next_token_id=tokens[end] if end < len(tokens) else None,
        sample=end == len(tokens),
        **options,
    )


def run(stages: Sequence[TorchExecutor], spans: Sequence[SpanWork], *, packed: bool = False):
    work = StageWork(wave=WaveNumber(0), spans=tuple(spans))
    carry = None
    for stage in stages:
        output = stage.forward(work, carry)
        carry = output.carry
        if packed and carry is not None:
            carry = unpack_carry(read_only(pack_carry(carry)))
    assert carry is None
    return output.outputs


def read_only(packed):
    """As a transport hands them over: arrays on memory that can't be written."""
    return {
        name: (dtype, np.frombuffer(array.tobytes(), dtype=array.dtype).reshape(array.shape))
        for name, (dtype, array) in packed.items()
    }


@pytest.mark.parametrize("family", ["llama", "mistral_sliding", "qwen2"])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_outputs_equal_transformers(tiny_folder, tiny_oracle, family, stages):
    """First tokens with logprobs, and every prompt token's, over chunks that mix two requests."""
    executors = build(tiny_folder(family), stages)
    rng = random.Random(stages)
    prompts = {"a": random_prompt(rng, 150), "b": random_prompt(rng, 101)}
    blocks = {"a": list(range(63, 40, -1)), "b": [3, 30, 7, 1, 12, 9, 5, 20]}
    asked = Sampling(logprobs=5, prompt_logprobs=3)
    cuts = [{"a": (0, 70), "b": (0, 33)}, {"a": (70, 71)}, {"a": (71, 150), "b": (33, 101)}]
    scores = {name: [] for name in prompts}
    finals = {}
    for wave in cuts:
        spans = [
            span(name, prompts[name], lo, hi - lo, blocks[name], sampling=asked)
            for name, (lo, hi) in wave.items()
        ]
        for output in run(executors, spans, packed=True):
            scores[output.request_id] += output.prompt_logprobs
            finals[output.request_id] = output
    for name, prompt in prompts.items():
        table = torch.log_softmax(oracle_logits(tiny_oracle(family), prompt), -1)
        assert [p.chosen.token_id for p in scores[name]] == prompt[1:]
        for position, score in enumerate(scores[name]):
            expected = table[position]
            assert score.chosen.logprob == pytest.approx(
                float(expected[score.chosen.token_id]), abs=2e-5
            )
            assert [t.rank for t in score.top] == [1, 2, 3]
            top = expected.topk(3).values.tolist()
            assert [t.logprob for t in score.top] == pytest.approx(top, abs=2e-5)
        assert finals[name].token_id == int(table[-1].argmax())
        assert finals[name].logprobs.chosen.rank == 1
        assert len(finals[name].logprobs.top) == 5


def test_only_asked_positions_get_logits(tiny_folder, monkeypatch):
    (executor,) = build(tiny_folder("llama"))
    seen = []
    logits = executor._model.logits
    monkeypatch.setattr(executor._model, "logits", lambda x: seen.append(len(x)) or logits(x))
    tokens = random_prompt(random.Random(0), 60)
    run([executor], [span("a", tokens, 0, 50, [1, 2, 3, 4])])
    assert seen == []
    run([executor], [span("a", tokens, 50, 10, [1, 2, 3, 4])])
    assert seen == [1]


def test_prompt_logprobs_are_made_in_tiles(tiny_folder, monkeypatch):
    (executor,) = build(tiny_folder("llama"))
    tokens = random_prompt(random.Random(0), 60)
    work = [span("a", tokens, 0, 60, [1, 2, 3, 4], sampling=Sampling(prompt_logprobs=1))]
    whole = run([executor], work)
    monkeypatch.setattr("wavepp.models.stage.LOGITS_MAX", 512 * 7)
    seen = []
    logits = executor._model.logits
    monkeypatch.setattr(executor._model, "logits", lambda x: seen.append(len(x)) or logits(x))
    tiled = run([executor], work)
    assert seen == [1] + [7] * 8 + [3]
    for one, other in zip(whole[0].prompt_logprobs, tiled[0].prompt_logprobs, strict=True):
        assert one.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-5)
    assert len(tiled[0].prompt_logprobs) == 59


def test_seeded_sampling_depends_on_the_request_alone(tiny_folder):
    executors = build(tiny_folder("qwen3"), 2)
    rng = random.Random(4)
    tokens, others = random_prompt(rng, 40), random_prompt(rng, 30)
    hot = Sampling(temperature=3.0, top_p=0.95, seed=7)
    alone = run(executors, [span("a", tokens, 0, 40, [5, 6, 7], sampling=hot)])[0]
    crowded = run(
        executors,
        [
            span("b", others, 0, 30, [1, 2], sampling=Sampling(temperature=1.0)),
            span("z", tokens, 0, 40, [9, 8, 10], sampling=hot),
        ],
    )[1]
    assert alone.token_id == crowded.token_id
    seeds = [Sampling(temperature=3.0, seed=seed) for seed in range(12)]
    drawn = {
        run(executors, [span("a", tokens, 0, 40, [5, 6, 7], sampling=s)])[0].token_id for s in seeds
    }
    assert len(drawn) > 6


def test_unseeded_sampling_differs_by_request_and_repeats(tiny_folder):
    (executor,) = build(tiny_folder("qwen3"))
    tokens = random_prompt(random.Random(4), 20)
    hot = Sampling(temperature=3.0)

    def draw(name: str) -> int | None:
        return run([executor], [span(name, tokens, 0, 20, [5, 6], sampling=hot)])[0].token_id

    drawn = [draw(f"request-{i}") for i in range(12)]
    assert len(set(drawn)) > 6
    assert drawn == [draw(f"request-{i}") for i in range(12)]


def test_carry_is_never_written_to(tiny_folder):
    first, last = build(tiny_folder("llama"), 2)
    tokens = random_prompt(random.Random(0), 20)
    work = StageWork(wave=WaveNumber(0), spans=(span("a", tokens, 0, 20, [1, 2]),))
    carry = first.forward(work, None).carry
    before = carry["hidden"].clone()
    one = last.forward(work, carry).outputs
    assert torch.equal(carry["hidden"], before)
    assert last.forward(work, carry).outputs == one


def test_bfloat16_stages_agree_with_the_bfloat16_oracle(tmp_path):
    from model_oracle import load_oracle

    folder = make_tiny("qwen3", tmp_path, dtype=torch.bfloat16)
    executors = build(folder, 2)
    prompt = random_prompt(random.Random(2), 90)
    asked = Sampling(prompt_logprobs=0)
    work = [span("a", prompt, 0, 90, list(range(6)), sampling=asked)]
    carry = executors[0].forward(StageWork(wave=WaveNumber(0), spans=tuple(work)), None).carry
    assert carry["hidden"].dtype == torch.bfloat16
    (output,) = run(executors, work, packed=True)
    table = torch.log_softmax(oracle_logits(load_oracle(folder, torch.float32), prompt), -1)
    errors = [
        abs(score.chosen.logprob - float(table[i, score.chosen.token_id]))
        for i, score in enumerate(output.prompt_logprobs)
    ]
    assert max(errors) < 0.3
    assert sum(errors) / len(errors) < 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32])
def test_packed_carry_comes_back_without_a_copy(dtype):
    tensor = torch.arange(24).reshape(4, 6).to(dtype)
    packed = pack_carry({"hidden": tensor})
    assert packed["hidden"][1].ctypes.data == tensor.data_ptr()
    frozen = read_only(packed)
    address = frozen["hidden"][1].ctypes.data
    back = unpack_carry(frozen)["hidden"]
    assert back.dtype == dtype
    assert torch.equal(back, tensor)
    assert back.data_ptr() == address
    del frozen, packed
    assert torch.equal(back, tensor)


def test_empty_carry_tensor_survives_packing():
    back = unpack_carry(read_only(pack_carry({"hidden": torch.empty(0, 8)})))
    assert back["hidden"].shape == (0, 8)


def test_facts_name_groups_layers_and_bytes(tmp_path):
    folder = make_tiny(
        "qwen3",
        tmp_path,
        overrides={"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 4},
    )
    first, last = build(folder, 2, layer_partition=(5, 3))
    assert (first.facts.layers, last.facts.layers) == ((0, 5), (5, 8))
    groups = [(g.name, g.kind, g.units, g.bytes_per_unit, g.window) for g in first.facts.groups]
    per_layer = 2 * 2 * 32 * 4 * BLOCK
    assert groups == [
        ("attention", "attention", 64, 4 * per_layer, None),
        ("sliding_32", "sliding", 64, 1 * per_layer, 32),
    ]
    assert [g.name for g in last.facts.groups] == ["sliding_32"]
    assert first.facts.eos_token_ids == (2, 4)
    assert (first.facts.vocab_size, first.facts.max_model_len) == (512, 4096)


def test_pool_size_follows_bytes_then_default(tiny_folder):
    per_block = 8 * 2 * 2 * 16 * 4 * BLOCK
    by_bytes = build(
        tiny_folder("llama"), num_gpu_blocks_override=None, kv_cache_memory_bytes=per_block * 10 + 5
    )[0]
    assert by_bytes.facts.groups[0].units == 10
    default = build(tiny_folder("llama"), num_gpu_blocks_override=None)[0].facts.groups[0]
    assert default.units * BLOCK >= 4096
    assert default.units * default.bytes_per_unit <= 1 << 30


def test_pool_of_less_than_a_block_is_refused(tiny_folder):
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes 100"):
        build(tiny_folder("llama"), num_gpu_blocks_override=None, kv_cache_memory_bytes=100)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_model_len": 5000}, "max_model_len 5000"),
        ({"layer_partition": (9,)}, "layer_partition 9"),
    ],
)
def test_bad_configuration_is_refused(tiny_folder, options, named):
    with pytest.raises(ConfigError, match=named):
        build(tiny_folder("llama"), **options)


def test_cuda_without_a_device_is_refused(tiny_folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device cuda"):
        build(tiny_folder("llama"), device="cuda")


def test_shorter_max_model_len_is_taken(tiny_folder):
    assert build(tiny_folder("llama"), max_model_len=100)[0].facts.max_model_len == 100


def test_dummy_weights_need_only_the_config(tiny_folder, tmp_path):
    (tmp_path / "config.json").write_bytes((tiny_folder("llama") / "config.json").read_bytes())
    tokens = random_prompt(random.Random(0), 20)
    work = [span("a", tokens, 0, 20, [1, 2], sampling=Sampling(logprobs=0))]
    whole = run(build(tmp_path, load_format="dummy"), work)
    split = run(build(tmp_path, 3, load_format="dummy"), work)
    assert whole[0].token_id == split[0].token_id
    other = run(build(tmp_path, load_format="dummy", seed=1), work)
    assert other[0].logprobs != whole[0].logprobs


def test_threads_are_set_where_forward_runs(tiny_folder):
    (executor,) = build(tiny_folder("llama"), threads_per_stage=2)
    tokens = random_prompt(random.Random(0), 20)
    counts = []

    def compute() -> None:
        run([executor], [span("a", tokens, 0, 20, [1, 2])])
        counts.append(torch.get_num_threads())

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    torch.set_num_threads(1)
    assert counts == [2]


def test_wave_without_spans_passes(tiny_folder):
    (executor,) = build(tiny_folder("llama"))
    assert executor.forward(StageWork(wave=WaveNumber(0), spans=()), None).outputs == ()
    executor.close()


@pytest.mark.parametrize("options", [{"num_gpu_blocks_override": 10**13}, {"block_size": 2**62}])
def test_pool_beyond_all_memory_is_refused(tiny_folder, options):
    config = EngineConfig(model=tiny_folder("llama"), **{"num_gpu_blocks_override": 64, **options})
    with pytest.raises(ConfigError, match="no memory for"):
        torch_executor(config, 0)
