"""Admission runs beside execution: slow rounds don't slow waves while admitted work lasts."""

from __future__ import annotations

import asyncio
import json
import statistics
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from checksum_executor import ChecksumExecutor, assert_served
from pipelines import request
from reuse_workloads import local

from wavepp.actors.local import LocalPlanes
from wavepp.protocol.messages import RoundReply

ROUND_S = 0.05
WAVE_S = 0.04
OPTIONS: dict[str, Any] = {
    "pipeline_parallel_size": 2,
    "block_size": 4,
    "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 400,
    "max_num_seqs": 8,
    "ring_depth": 4,
}


class SlowRounds(LocalPlanes):
    """Every round takes 50 ms more."""

    async def round(self, messages: Any) -> tuple[RoundReply, ...]:
        await asyncio.sleep(ROUND_S)
        return await super().round(messages)


def times_between_waves(trace: Path) -> list[float]:
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    reports = [record["value"]["report"] for record in records if record["kind"] == "wave"]
    done = [report["done_s"] for report in reports if report["ack"]["stage"] == 1]
    return [after - before for before, after in pairwise(done[1:-8])]


async def run_waves(trace: Path) -> tuple[list[float], int]:
    """Twenty requests of three chunks each, eight lanes: (times between waves on the last stage
    from the second wave to the last but eight, rounds)."""
    prompts = [list(range(start, start + 48)) for start in range(10, 410, 20)]
    async with local(
        partial(ChecksumExecutor, wave_s=WAVE_S), **OPTIONS, trace=str(trace)
    ) as pipeline:
        results = await asyncio.gather(*(pipeline.submit(request(p)) for p in prompts))
        for result, prompt in zip(results, prompts, strict=True):
            assert_served(result, prompt, 2)
        rounds = (await pipeline.stats()).rounds
    return times_between_waves(trace), rounds


@pytest.mark.alone
async def test_slow_rounds_do_not_slow_waves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = await run_waves(tmp_path / "plain")
    monkeypatch.setattr("wavepp.actors.local.LocalPlanes", SlowRounds)
    slow, rounds = await run_waves(tmp_path / "slow")
    assert len(slow) >= 30
    assert rounds >= 8  # some are out nearly all the time, each longer than a wave
    assert statistics.median(slow) < 1.05 * statistics.median(plain)
