"""Faults that other engines had, as small cases on a real pipeline. A row's letter: a agreement,
c aborts and frees, d hybrid state."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from checksum_executor import ChecksumExecutor, assert_served
from pipelines import request
from reuse_workloads import assert_conserved, local

from wavepp.actors.ports import Carry, StageOutput
from wavepp.control.work import StageWork

B = 4
FOUR: dict[str, Any] = {
    "pipeline_parallel_size": 4,
    "block_size": B,
    "max_num_batched_tokens": 2 * B,
    "num_gpu_blocks_override": 40,
    "planner": "greedy",
    "max_num_seqs": 8,
}


class NotingExecutor(ChecksumExecutor):
    """Keeps the first position of every span it is given."""

    def __init__(self, *args: Any, seen: dict[int, list[int]], **options: Any) -> None:
        super().__init__(*args, **options)
        self._seen = seen

    def forward(self, work: StageWork, carry: Carry | None) -> StageOutput:
        starts = self._seen.setdefault(int(self.facts.stage), [])
        starts.extend(span.start for span in work.spans)
        return super().forward(work, carry)


@pytest.mark.parametrize("kinds", ["FFFF", "RFSF"])
async def test_row_c7_three_chunks_in_flight_and_an_abort_leave_nothing(kinds: str) -> None:
    executor = partial(ChecksumExecutor, wave_s=0.01, kinds=kinds)
    async with local(executor, **FOUR) as pipeline:
        for turn in range(3):
            prompt = [100 * turn + i for i in range(10, 10 + 10 * B)]
            task = asyncio.create_task(pipeline.submit(request(prompt, request_id="a")))
            while (await pipeline.stats()).ring_occupancy < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await pipeline.abort("a")
            assert (await task).finish_reason == "abort"
            await assert_conserved(pipeline)
            again = await pipeline.submit(request(prompt))  # on what the chunks left behind
            assert_served(again, prompt, 4, kinds=kinds)


@pytest.mark.parametrize("wave_s", [0.0, 0.003])
async def test_row_c11_blocks_that_change_hands_when_a_request_ends_keep_no_old_key(
    wave_s: float,
) -> None:
    """The pool holds little more than one prompt, so each takes the blocks of the one before."""
    options = {**FOUR, "num_gpu_blocks_override": 12, "lease_headroom_waves": 0}
    async with local(partial(ChecksumExecutor, wave_s=wave_s), **options) as pipeline:
        prompts = [[50 * n + i for i in range(10, 10 + 9 * B)] for n in range(6)]
        for _ in range(2):
            results = await asyncio.gather(*(pipeline.submit(request(p)) for p in prompts))
            for result, prompt in zip(results, prompts, strict=True):
                assert_served(result, prompt, 4)
        for prompt in reversed(prompts):
            assert_served(await pipeline.submit(request(prompt)), prompt, 4)


async def test_row_c14_four_chunks_stand_where_they_belong_on_every_stage() -> None:
    seen: dict[int, list[int]] = {}
    async with local(partial(NotingExecutor, seen=seen), **FOUR) as pipeline:
        prompt = list(range(10, 10 + 8 * B))
        assert_served(await pipeline.submit(request(prompt)), prompt, 4)
        assert seen == {stage: [0, 8, 16, 24] for stage in range(4)}
        seen.clear()
        other = [*prompt[: 4 * B], 5, 6]
        assert_served(await pipeline.submit(request(other)), other, 4)
        assert seen == {stage: [16] for stage in range(4)}


async def test_row_d5_a_slot_that_another_request_used_starts_empty() -> None:
    executor = partial(ChecksumExecutor, kinds="RRFR")
    async with local(executor, **{**FOUR, "max_num_seqs": 1}) as pipeline:
        first, other = list(range(10, 50)), list(range(300, 333))
        assert_served(await pipeline.submit(request(first)), first, 4)
        result = await pipeline.submit(request(other))
        assert result.num_cached_tokens == 0
        assert_served(result, other, 4)
