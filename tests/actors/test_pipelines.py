"""What every transport must do: the same tests over in-process queues and over Ray."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from checksum_executor import FAIL_TOKEN, assert_served
from pipelines import eventually, random_prompts, request

from wavepp.actors.ports import EngineBackend
from wavepp.errors import RequestError

LAYERS = 4


async def test_pipeline_answers_every_request_rightly(pipeline: EngineBackend) -> None:
    prompts = random_prompts(0, 40)
    results = await asyncio.gather(
        *(
            pipeline.submit(
                request(
                    prompt,
                    max_tokens=index % 4,
                    logprobs=0 if index % 2 else None,
                    prompt_logprobs=1 if index % 3 == 0 else None,
                )
            )
            for index, prompt in enumerate(prompts)
        )
    )
    for index, (result, prompt) in enumerate(zip(results, prompts, strict=True)):
        assert_served(result, prompt, LAYERS, index % 4)
        assert result.num_cached_tokens == 0
        assert (result.prompt_logprobs is not None) == (index % 3 == 0)
        assert (result.logprobs is not None) == (index % 2 == 1)
        if result.logprobs is not None:
            chosen = tuple(entry.chosen.token_id for entry in result.logprobs)
            assert chosen == result.token_ids


async def test_timings_are_in_order(pipeline: EngineBackend) -> None:
    timings = (await pipeline.submit(request([11] * 30))).timings
    assert timings.admitted_s is not None
    assert timings.first_wave_s is not None
    assert timings.done_s is not None
    assert timings.hint_s is not None
    assert timings.queued_s <= timings.hint_s <= timings.admitted_s
    assert timings.admitted_s <= timings.first_wave_s < timings.done_s


@pytest.mark.parametrize("stage", [0, 1, 3])
async def test_failing_request_fails_alone(pipeline: EngineBackend, stage: int) -> None:
    prompts = random_prompts(stage, 12, longest=50)
    bad = [*range(20, 44), FAIL_TOKEN + stage, *range(20, 30)]
    good = [asyncio.create_task(pipeline.submit(request(prompt))) for prompt in prompts[:6]]
    failing = asyncio.create_task(pipeline.submit(request(bad)))
    good += [asyncio.create_task(pipeline.submit(request(prompt))) for prompt in prompts[6:]]
    result = await failing
    assert result.finish_reason == "error"
    assert result.error == (
        f"stage {stage}: RuntimeError: token {FAIL_TOKEN + stage} can't be computed"
    )
    assert result.token_ids == ()
    for task, prompt in zip(good, prompts, strict=True):
        assert_served(await task, prompt, LAYERS)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"tokens": []}, "empty_prompt"),
        ({"tokens": [1000]}, "token_out_of_range"),
        ({"tokens": [2**70]}, "token_out_of_range"),
        ({"tokens": [5] * 161}, "larger_than_pool"),
    ],
)
async def test_bad_request_is_refused_and_the_next_one_served(
    pipeline: EngineBackend, fields: dict[str, Any], code: str
) -> None:
    with pytest.raises(RequestError) as refused:
        await pipeline.submit(request(**fields))
    assert refused.value.code == code
    assert refused.value.param == "prompt"
    assert_served(await pipeline.submit(request([5] * 160)), [5] * 160, LAYERS)


async def test_live_id_is_refused(pipeline: EngineBackend) -> None:
    first = asyncio.create_task(pipeline.submit(request([5] * 100, request_id="twice")))
    second = asyncio.create_task(pipeline.submit(request([6] * 100, request_id="twice")))
    outcomes = await asyncio.gather(first, second, return_exceptions=True)
    (refused,) = [outcome for outcome in outcomes if isinstance(outcome, RequestError)]
    assert refused.code == "duplicate_request_id"
    assert_served(await pipeline.submit(request([7], request_id="twice")), [7], LAYERS)


async def test_abort_is_an_abort_at_any_moment(pipeline: EngineBackend) -> None:
    """Aborts spread over the whole life of requests, from before the first round to the end."""
    for delay_s in (0.0, 0.001, 0.003, 0.01, 0.03, 0.1):
        prompts = random_prompts(1, 6)
        tasks = {
            f"{delay_s}-{index}": asyncio.create_task(
                pipeline.submit(request(prompt, request_id=f"{delay_s}-{index}"))
            )
            for index, prompt in enumerate(prompts)
        }
        await asyncio.sleep(delay_s)
        for name in list(tasks)[::2]:
            await pipeline.abort(name)
        results = await asyncio.gather(*tasks.values())
        for index, result in enumerate(results):
            if result.finish_reason == "abort":
                assert index % 2 == 0
                assert (result.token_ids, result.kv_transfer_params) == ((), None)
            else:
                assert_served(result, prompts[index], LAYERS)


async def test_abort_of_an_unknown_id_is_false(pipeline: EngineBackend) -> None:
    assert await pipeline.abort("nobody") is False
    await pipeline.submit(request([9], request_id="over"))
    assert await pipeline.abort("over") is False


async def test_cancelling_the_caller_aborts_its_request(pipeline: EngineBackend) -> None:
    tasks = [asyncio.create_task(pipeline.submit(request([9] * 150))) for _ in range(12)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)  # one runs alone, others wait
    cancelled = [task for task in tasks if task.cancel()]
    outcomes = await asyncio.gather(*cancelled, return_exceptions=True)
    assert len(cancelled) >= 6
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)

    async def is_empty() -> bool:
        stats = await pipeline.stats()
        return stats.requests_waiting + stats.requests_running == 0

    await eventually(is_empty)


async def test_same_id_again_right_after_its_abort(pipeline: EngineBackend) -> None:
    for turn in range(5):
        prompt = [20 + turn] * 60
        first = asyncio.create_task(pipeline.submit(request(prompt, request_id="again")))
        await asyncio.sleep(0.004 * turn)
        await pipeline.abort("again")
        await first
    assert_served(await pipeline.submit(request([77] * 30, request_id="again")), [77] * 30, LAYERS)


async def test_results_that_are_kept_stall_nothing(pipeline: EngineBackend) -> None:
    """Far more waves than the ring has slots, with every result still held."""
    before = (await pipeline.stats()).waves
    kept = []
    for turn in range(4):
        prompts = random_prompts(turn, 8, longest=100)
        kept.append(await asyncio.gather(*(pipeline.submit(request(p)) for p in prompts)))
    assert (await pipeline.stats()).waves - before >= 50
    assert sum(len(results) for results in kept) == 32


async def test_stats_count_what_happened(pipeline: EngineBackend) -> None:
    before = await pipeline.stats()
    await pipeline.submit(request([9] * 33))
    after = await pipeline.stats()
    assert after.requests_finished - before.requests_finished == 1
    assert after.prompt_tokens - before.prompt_tokens == 33
    assert after.computed_tokens - before.computed_tokens == 33
    assert after.waves - before.waves == 3
    assert after.wave_tokens[-3:] == (16, 16, 1)
    assert after.ring_depth == 8
    assert [stage.layers for stage in after.stages] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    for old, new in zip(before.stages, after.stages, strict=True):
        assert new.waves - old.waves == 3
        assert new.busy_s > old.busy_s
        assert set(new.wait_s) == {"no_wave", "activation", "materialize", "sending"}
        assert new.blocks_total == 40


async def test_a_living_pipeline_is_healthy(pipeline: EngineBackend) -> None:
    await pipeline.check_health()
