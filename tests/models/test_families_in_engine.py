"""Families beyond the dense ones in a running engine, and what they refuse."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch
from kimi_k3_reference import KimiK3
from model_oracle import oracle_logits, random_prompt

from wavepp import LLM
from wavepp.actors.factories import torch_executor
from wavepp.config import EngineConfig
from wavepp.errors import ConfigError
from wavepp.models.cache_pools import CachePools
from wavepp.models.config import read_model_spec

RECURRENT = ("kimi_linear", "kimi_k3", "qwen3_next", "qwen3_5_text")
FAMILIES = ("deepseek_v3", "minimax_m2", "qwen3_moe", "kimi_linear", "qwen3_next")


@pytest.mark.parametrize("family", FAMILIES)
def test_first_tokens_equal_transformers(tiny_folder, tiny_oracle, family):
    rng = random.Random(family)
    shared = random_prompt(rng, 64)
    prompts = [random_prompt(rng, 1), shared, shared + random_prompt(rng, 90)]
    oracle = tiny_oracle(family)
    expected = [int(oracle_logits(oracle, prompt)[-1].argmax()) for prompt in prompts]
    with LLM(
        model=tiny_folder(family),
        transport="local",
        pipeline_parallel_size=2,
        max_model_len=256,
        threads_per_stage=1,
        dtype="float32",
    ) as llm:
        for _ in range(2):  # the second time from the cache
            results = llm.prefill(prompts)
            assert [result.token_ids[0] for result in results] == expected


@pytest.mark.parametrize("family", ["kimi_linear", "qwen3_next"])
def test_blocks_that_cut_the_delta_rule_are_refused(tiny_folder, family):
    config = EngineConfig(model=str(tiny_folder(family)), block_size=96)
    with pytest.raises(ConfigError, match=r"block_size 96: recurrent layers .* multiple of 64"):
        torch_executor(config, 0)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm_moe_dsa", "kimi_linear", "kimi_k3"])
def test_blocks_and_states_come_back_from_the_host(tiny_folder, family):
    spec = read_model_spec(tiny_folder(family))
    units = {group.name: 6 for group in spec.groups}
    pools = CachePools(
        spec,
        (0, spec.num_layers),
        units=units,
        host_units=units,
        block_size=16,
        device=torch.device("cpu"),
    )
    for pool in (pool for layer in pools.layers for pool in layer):
        pool.copy_(torch.arange(pool.numel()).reshape(pool.shape) % 251)
    before = [[pool.clone() for pool in layer] for layer in pools.layers]
    ids = [np.array(some, dtype=np.int32) for some in ([1, 4], [5, 0], [2, 3])]
    for group in units:
        pools.offload(group, ids[0], ids[1])
        pools.bring_back(group, ids[1], ids[2])
    for was, now in zip(before, pools.layers, strict=True):
        for old, new in zip(was, now, strict=True):
            assert torch.equal(new[[2, 3]], old[[1, 4]])
            assert torch.equal(new[[0, 1, 4, 5]], old[[0, 1, 4, 5]])


@pytest.mark.parametrize("family", ["deepseek_v3", "glm_moe_dsa", "gemma3_text", *RECURRENT])
def test_decoded_tokens_equal_the_oracle(tiny_folder, tiny_oracle, family):
    """Steps of one token in waves with other prompts' chunks, across a block boundary, and again
    from the cache."""
    rng = random.Random(family)
    prompts = [random_prompt(rng, length) for length in (59, 125, 1, 200)]
    steps = 8
    if family == "kimi_k3":
        forward = KimiK3(tiny_folder(family))
    else:
        forward = partial(oracle_logits, tiny_oracle(family))
    with LLM(
        model=tiny_folder(family),
        transport="local",
        pipeline_parallel_size=2,
        max_model_len=256,
        max_num_batched_tokens=64,
        threads_per_stage=1,
        dtype="float32",
    ) as llm:
        cold, warm = (
            llm.generate(prompts, max_tokens=steps, logprobs=0, ignore_eos=True) for _ in range(2)
        )
    for prompt, *answers in zip(prompts, cold, warm, strict=True):
        for answer in answers:
            logits = forward([*prompt, *answer.token_ids])[len(prompt) - 1 : -1]
            expected = torch.log_softmax(logits, -1).max(-1)
            assert list(answer.token_ids) == expected.indices.tolist()
            ours = [score.chosen.logprob for score in answer.logprobs]
            assert ours == pytest.approx(expected.values.tolist(), abs=1e-4)
            assert len(answer.token_ids) == steps
