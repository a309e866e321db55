"""Pools of models with recurrent layers: sizes, working slots behind snapshots, restoring."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from model_oracle import CPU, oracle_logits, random_prompt

from wavepp.config import EngineConfig
from wavepp.kernels.select import select_ops
from wavepp.kernels.wave import Span, build_wave
from wavepp.models.cache_pools import SNAPSHOT_TOKENS, CachePools, group_units
from wavepp.models.config import read_model_spec
from wavepp.models.loader import CheckpointReader
from wavepp.models.stage import StageModel

BLOCK = 64
SLOTS = 3


def pools_of(folder, *, host: int = 0) -> CachePools:
    spec = read_model_spec(folder)
    units = {"attention": 12, "recurrent": 4}
    host_units = {"attention": 0, "recurrent": host}
    pools = CachePools(
        spec,
        (0, 8),
        units=units,
        host_units=host_units,
        block_size=BLOCK,
        device=CPU,
        working_slots=SLOTS,
    )
    for pool in (pool for layer in pools.layers for pool in layer):
        pool.fill_(float("nan"))
    return pools


class OneStage:
    """A whole model as an executor would drive it: working slots, snapshot orders, effects."""

    def __init__(self, folder, pools: CachePools) -> None:
        with CheckpointReader(folder, torch.float32, CPU) as weights:
            self.model = StageModel(read_model_spec(folder), 0, 8, weights, select_ops(CPU))
        self.pools = pools

    @torch.inference_mode()
    def run(self, tokens, start, end, *, table, slot, snapshots=()) -> torch.Tensor:
        states = self.pools.span_states(start, slot, snapshots)
        tables = {"attention": np.array(table, dtype=np.int32)}
        span = Span(start=start, length=end - start, tables=tables, states=states)
        wave = build_wave([span], self.model.wave_groups, BLOCK, CPU)
        entered = self.model.embed(torch.tensor(tokens[start:end]))
        hidden = self.model.forward(entered, wave, self.pools.layers)["hidden"]
        return self.model.logits(hidden)


@pytest.mark.parametrize("from_host", [False, True])
@pytest.mark.parametrize("family", ["kimi_linear", "qwen3_next"])
def test_restored_slot_goes_on_bit_equal(tiny_folder, tiny_oracle, family, from_host):
    stage = OneStage(tiny_folder(family), pools_of(tiny_folder(family), host=2))
    tokens = random_prompt(random.Random(1), 250)
    table = [7, 2, 9, 4]
    stage.run(
        tokens,
        0,
        200,
        table=table,
        slot=1,
        snapshots=[(128, {"recurrent": 3}), (192, {"recurrent": 0})],
    )
    first = stage.run(tokens, 200, 250, table=table, slot=1)
    expected = oracle_logits(tiny_oracle(family), tokens)[200:]
    torch.testing.assert_close(first, expected, atol=1e-4, rtol=0)
    if from_host:
        pair = (np.array([3], dtype=np.int32), np.array([1], dtype=np.int32))
        stage.pools.offload("recurrent", *pair)
        for pool in (pool for layer in stage.pools.layers for pool in layer if len(layer) == 2):
            if pool.shape[0] == 4 + SLOTS:
                pool[3] = float("nan")
    stage.pools.restore("recurrent", 1 if from_host else 3, 2, from_host=from_host)
    again = stage.run(tokens, 128, 200, table=[7, 2, 8, 5], slot=2)
    more = stage.run(tokens, 200, 250, table=[7, 2, 8, 5], slot=2)
    torch.testing.assert_close(more, expected, atol=1e-4, rtol=0)
    stage.pools.restore("recurrent", 1 if from_host else 3, 0, from_host=from_host)
    assert torch.equal(stage.run(tokens, 128, 200, table=[7, 2, 1, 0], slot=0), again)


def test_slot_of_another_request_does_not_matter_at_the_start(tiny_folder):
    stage = OneStage(tiny_folder("kimi_linear"), pools_of(tiny_folder("kimi_linear")))
    tokens = random_prompt(random.Random(1), 70)
    clean = stage.run(tokens, 0, 70, table=[1, 2], slot=0)
    stage.run(random_prompt(random.Random(2), 90), 0, 90, table=[3, 4], slot=1)
    assert torch.equal(stage.run(tokens, 0, 70, table=[5, 6], slot=1), clean)


def test_units_leave_room_for_snapshots(tiny_folder):
    folder = tiny_folder("kimi_linear")
    spec = read_model_spec(folder)
    state = 6 * (4 * 16 * 16 * 4 + 3 * 192 * 4)
    paged = 2 * 40 * 4 * BLOCK
    asked = 512 * paged + 512 * BLOCK // SNAPSHOT_TOKENS * state
    config = EngineConfig(
        model=str(folder), block_size=BLOCK, kv_cache_memory_bytes=asked + 600, max_num_seqs=4
    )
    found = group_units(config, spec, (0, 8), 4096)
    assert (found["attention"].units, found["attention"].bytes_per_unit) == (512, paged)
    assert (found["recurrent"].units, found["recurrent"].bytes_per_unit) == (8, state)
    assert found["recurrent"].host_units == 0
    few = EngineConfig(model=str(folder), block_size=BLOCK, num_gpu_blocks_override=8)
    assert group_units(few, spec, (0, 8), 4096)["recurrent"].units == few.max_num_seqs
    only = group_units(few, spec, (0, 3), 4096)
    assert list(only) == ["recurrent"]
