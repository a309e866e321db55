"""Reuse on real pipelines, case by case: what is hit, what is not, and that stages agree."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Any

import pytest
from checksum_executor import ChecksumExecutor, assert_served, checksum
from pipelines import request
from reuse_workloads import assert_conserved, controls, local

from wavepp.actors.local import LocalPipeline, LocalPlanes
from wavepp.cache.keys import make_prompt
from wavepp.control.driver import DriverControl
from wavepp.errors import RequestError
from wavepp.protocol.messages import RoundMessage, RoundReply
from wavepp.requests import PrefillResult

B = 4
FOUR: dict[str, Any] = {
    "pipeline_parallel_size": 4,
    "block_size": B,
    "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 60,
    "max_num_seqs": 8,
}
TWO: dict[str, Any] = {**FOUR, "pipeline_parallel_size": 2}


def distinct(count: int, start: int = 10) -> list[int]:
    """T(n): tokens that no other prompt has, if `start` differs by enough."""
    return list(range(start, start + count))


async def serve(pipeline: LocalPipeline, prompt: list[int], **fields: Any) -> PrefillResult:
    """One request, alone, with its answer checked."""
    result = await pipeline.submit(request(prompt, **fields))
    assert_served(result, prompt, pipeline._config.pipeline_parallel_size)
    return result


def cached_on(pipeline: LocalPipeline, prompt: list[int]) -> list[int]:
    """What each stage could reuse of a prompt, in tokens."""
    asked = make_prompt(prompt, B)
    votes = [control.cache.hint(asked).reuse for control in controls(pipeline)]
    return [vote.highest(asked.reuse_cap) for vote in votes]


@pytest.mark.parametrize("length", [2, 7, 8, 9, 31, 32, 33, 100])
async def test_row_a14_same_prompt_right_after_the_reply_hits_all_but_the_last_block(
    length: int,
) -> None:
    async with local(checksum, **FOUR) as pipeline:
        prompt = distinct(length)
        assert (await serve(pipeline, prompt)).num_cached_tokens == 0
        expected = B * ((length - 1) // B)
        assert cached_on(pipeline, prompt) == [expected] * 4
        assert (await serve(pipeline, prompt)).num_cached_tokens == expected


async def test_rows_e3_e4_full_hit_leaves_a_token_to_compute_and_counts_what_was_reused() -> None:
    async with local(checksum, **TWO) as pipeline:
        assert (await serve(pipeline, [9])).num_cached_tokens == 0
        assert (await serve(pipeline, [9])).num_cached_tokens == 0
        prompt = distinct(2 * B)
        await serve(pipeline, prompt)
        before = await pipeline.stats()
        assert (await serve(pipeline, prompt)).num_cached_tokens == B
        after = await pipeline.stats()
        assert after.prefix_hits - before.prefix_hits == B
        assert after.prefix_queries - before.prefix_queries == 2 * B
        assert after.cached_tokens - before.cached_tokens == B
        assert after.computed_tokens - before.computed_tokens == B


async def test_row_c9_prefix_of_an_aborted_request_is_right() -> None:
    """A is given up after two of four chunks; then its first two chunks and something new."""
    executor = partial(ChecksumExecutor, wave_s=0.02)
    async with local(executor, **FOUR, ring_depth=2) as pipeline:
        first = distinct(64)
        task = asyncio.create_task(pipeline.submit(request(first, request_id="a")))
        while (await pipeline.stats()).computed_tokens < 32:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await pipeline.abort("a")
        assert (await task).finish_reason == "abort"
        again = await serve(pipeline, [*first[:32], *distinct(20, 300)])
        assert again.num_cached_tokens == 32


async def test_row_c3_blocks_of_an_aborted_request_go_to_another_after_its_last_wave() -> None:
    """The pool holds one of them; A's chunks are on their way through the stages when it ends."""
    options = {**FOUR, "num_gpu_blocks_override": 16, "min_wave_tokens": 16}
    async with local(partial(ChecksumExecutor, wave_s=0.01), **options) as pipeline:
        for turn in range(4):
            a, b = distinct(64), distinct(64, 100 + 64 * turn)
            task = asyncio.create_task(pipeline.submit(request(a, request_id="a")))
            while (await pipeline.stats()).stages[2].waves < 8 * turn + 1:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await pipeline.abort("a")
            other = asyncio.create_task(pipeline.submit(request(b)))
            assert (await task).finish_reason == "abort"
            assert_served(await other, b, 4)
            await assert_conserved(pipeline)
            await pipeline.reset_prefix_cache()


@pytest.mark.parametrize("apart", [0, 1, 3])
async def test_row_d11_equal_prompts_in_flight_together_are_right(apart: int) -> None:
    """In one wave, and when the first one has left stage apart-1: what a stage has not executed
    can't be reused there."""
    executor = partial(ChecksumExecutor, wave_s=0.01)
    options = {**FOUR, "defer_shared_prefix": False, "max_num_batched_tokens": 24}
    async with local(executor, **options) as pipeline:
        prompt = distinct(11)
        tasks = [asyncio.create_task(pipeline.submit(request(prompt)))]
        while apart and not (await pipeline.stats()).stages[apart - 1].waves:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        tasks += [asyncio.create_task(pipeline.submit(request(prompt))) for _ in range(2)]
        for task in tasks:
            assert_served(await task, prompt, 4)
        assert (await serve(pipeline, prompt)).num_cached_tokens == 8


async def test_burst_with_a_shared_prefix_computes_it_once() -> None:
    """The others wait for the first one, since the ring has its work."""
    options = {**TWO, "max_num_batched_tokens": 16, "min_wave_tokens": 4}
    async with local(partial(ChecksumExecutor, wave_s=0.005), **options) as pipeline:
        shared = distinct(96)
        prompts = [[*shared, *distinct(5, 200 + 10 * i)] for i in range(6)]
        results = await asyncio.gather(*(pipeline.submit(request(p)) for p in prompts))
        for result, prompt in zip(results, prompts, strict=True):
            assert_served(result, prompt, 2)
        stats = await pipeline.stats()
        assert stats.deferred >= 5
        assert stats.computed_tokens < 2 * len(shared)


def bad_hash(data: bytes) -> bytes:
    """256 keys for everything."""
    return bytes([sum(data) % 256])


async def test_row_e1_colliding_keys_cost_time_but_change_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "wavepp.actors.local.DriverControl", partial(DriverControl, hash_bytes=bad_hash)
    )
    rng = random.Random(8)
    async with local(checksum, **FOUR) as pipeline:
        base = [rng.randint(10, 500) for _ in range(60)]
        for _ in range(40):
            kept = rng.randint(0, 60)
            prompt = [*base[:kept], *(rng.randint(10, 500) for _ in range(rng.randint(1, 20)))]
            await serve(pipeline, prompt)
        stats = await pipeline.stats()
        assert stats.endpoints_lowered > 0  # hints promised what the walk did not find
        assert stats.prefix_hits > 0
        assert (await serve(pipeline, base)).num_cached_tokens <= 60


async def test_rows_a4_a5_endpoint_is_the_minimum_of_stages_with_unequal_pools() -> None:
    """Stage 2 keeps least; whatever is left there decides, and nothing else suffers."""
    units = (60, 40, 22, 60)

    def factory(config: Any, stage: int) -> ChecksumExecutor:
        return ChecksumExecutor(config, stage, units=units[stage])

    rng = random.Random(4)
    documents = [distinct(40, 10 + 60 * i) for i in range(5)]
    lower = 0
    async with local(factory, **FOUR) as pipeline:
        for turn in range(30):
            prompt = [*rng.choice(documents), *distinct(6, 400 + 10 * turn)]
            await assert_conserved(pipeline)
            held = cached_on(pipeline, prompt)
            lower += min(held) < max(held)
            assert (await serve(pipeline, prompt)).num_cached_tokens == min(held)
        assert lower > 3
        with pytest.raises(RequestError, match=r"needs 23 cache blocks .* stage 2 has 22"):
            await pipeline.submit(request([5] * 90))


async def test_leases_of_unequal_stages_are_counted_when_hints_promise_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "wavepp.actors.local.DriverControl", partial(DriverControl, hash_bytes=bad_hash)
    )

    def factory(config: Any, stage: int) -> ChecksumExecutor:
        return ChecksumExecutor(config, stage, units=(60, 22)[stage])

    rng = random.Random(9)
    documents = [distinct(40, 10 + 60 * i) for i in range(5)]
    async with local(factory, pipeline_parallel_size=2, block_size=4) as pipeline:
        for turn in range(40):
            await serve(pipeline, [*rng.choice(documents), *distinct(6, 400 + 10 * turn)])
        stats = await pipeline.stats()
        assert 0 < stats.lease_mismatches <= stats.endpoints_lowered


async def test_one_stage_that_lost_its_cache_lowers_the_endpoint_and_stops_nobody() -> None:
    async with local(checksum, **FOUR) as pipeline:
        prompt = distinct(50)
        await serve(pipeline, prompt)
        assert await pipeline.reset_prefix_cache(2) is True
        assert cached_on(pipeline, prompt) == [48, 48, 0, 48]
        assert (await serve(pipeline, prompt)).num_cached_tokens == 0
        assert (await serve(pipeline, prompt)).num_cached_tokens == 48
        assert await pipeline.reset_prefix_cache() is True
        assert cached_on(pipeline, prompt) == [0] * 4


async def test_reset_leaves_what_runs_alone() -> None:
    async with local(partial(ChecksumExecutor, wave_s=0.01), **FOUR) as pipeline:
        prompt = distinct(100)
        await serve(pipeline, prompt[:50])
        task = asyncio.create_task(pipeline.submit(request(prompt)))
        complete = []
        for _ in range(20):
            complete.append(await pipeline.reset_prefix_cache())
            await asyncio.sleep(0.005)
        assert_served(await task, prompt, 4)
        assert False in complete  # blocks in use stay


async def test_without_prefix_caching_nothing_is_kept() -> None:
    async with local(checksum, **FOUR, enable_prefix_caching=False) as pipeline:
        prompt = distinct(50)
        for _ in range(3):
            assert (await serve(pipeline, prompt)).num_cached_tokens == 0
        stats = await pipeline.stats()
        assert stats.prefix_hits == stats.cached_tokens == 0
        assert [stage.blocks_cached for stage in stats.stages] == [0] * 4


async def test_row_e2_salts_share_nothing() -> None:
    async with local(checksum, **TWO) as pipeline:
        prompt = distinct(30)
        hits = [
            (await serve(pipeline, prompt, cache_salt=salt)).num_cached_tokens
            for salt in ("", "a", "b", "a", "")
        ]
        assert hits == [0, 0, 0, 28, 28]


async def test_prompt_logprobs_reuse_nothing_but_are_reused() -> None:
    async with local(checksum, **TWO) as pipeline:
        prompt = distinct(30)
        for _ in range(2):
            scored = await serve(pipeline, prompt, prompt_logprobs=0)
            assert scored.num_cached_tokens == 0
            assert scored.prompt_logprobs is not None
            assert len(scored.prompt_logprobs) == 30
        assert (await serve(pipeline, prompt)).num_cached_tokens == 28


@pytest.mark.parametrize("kinds", ["RRRF", "FRFR", "RRRR"])
async def test_row_d2_third_prompt_hits_where_the_first_two_part(kinds: str) -> None:
    """T(20)|T(12) three times: a snapshot is kept at the junction, also where a stage has no
    attention, or nothing else."""
    executor = partial(ChecksumExecutor, kinds=kinds)
    async with local(executor, **{**FOUR, "max_num_batched_tokens": 4}) as pipeline:
        shared = distinct(20)
        hits = []
        for turn in range(3):
            prompt = [*shared, *distinct(12, 100 + 20 * turn)]
            result = await pipeline.submit(request(prompt))
            assert_served(result, prompt, 4, kinds=kinds)
            hits.append(result.num_cached_tokens)
        if "F" in kinds:  # else nothing tells where they part
            assert hits[2] >= 16, hits
        again = await pipeline.submit(request(prompt))
        assert_served(again, prompt, 4, kinds=kinds)
        assert again.num_cached_tokens == 28


async def test_host_tier_serves_what_the_device_has_evicted() -> None:
    options = {**TWO, "num_gpu_blocks_override": 20, "kv_offloading_size": 60.0}
    async with local(checksum, **options) as pipeline:
        prompts = [distinct(60, 10 + 60 * turn) for turn in range(4)]
        for prompt in prompts:
            await serve(pipeline, prompt)
        assert [(await serve(pipeline, prompt)).num_cached_tokens for prompt in prompts] == [56] * 4
        stats = await pipeline.stats()
        assert all(stage.brought_back > 0 for stage in stats.stages)
        assert all(stage.host_blocks_total == 60 for stage in stats.stages)


async def test_tokens_travel_to_each_stage_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []

    class Watched(LocalPlanes):
        async def round(self, messages: Any) -> tuple[RoundReply, ...]:
            for message in messages:
                assert isinstance(message, RoundMessage)
                sent.extend(prompt.request_id for prompt in message.prompts)
            return await super().round(messages)

    monkeypatch.setattr("wavepp.actors.local.LocalPlanes", Watched)
    async with local(checksum, **TWO) as pipeline:
        prompts = [distinct(30, 10 + 7 * turn) for turn in range(20)]
        await asyncio.gather(*(pipeline.submit(request(p)) for p in prompts))
    assert sorted(sent) == sorted(2 * list(dict.fromkeys(sent)))
    assert len(sent) == 40
