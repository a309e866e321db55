"""Engine on the local transport, with a real tiny checkpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from wavepp import ConfigError, Engine, EngineConfig, EngineDeadError, RequestError


def config(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(
        **{"model": folder, "transport": "local", "threads_per_stage": 1, **options}
    )


async def reach_wave(engine: Engine, wave: int) -> None:
    while (await engine.stats()).waves < wave:  # noqa: ASYNC110  stats are all there is to wait on
        await asyncio.sleep(0.001)


async def test_prefill_takes_text_and_token_ids_alike(tiny_llama: Path) -> None:
    async with Engine(config(tiny_llama, pipeline_parallel_size=2)) as engine:
        tokens = await engine.tokenize("What is the capital of France?")
        by_text = await engine.prefill("What is the capital of France?", request_id="t")
        by_ids = await engine.prefill(tokens)
    assert by_text.request_id == "t"
    assert by_text.token_ids == by_ids.token_ids
    assert len(by_text.token_ids) == 1
    assert by_text.num_prompt_tokens == by_ids.num_prompt_tokens == len(tokens)
    assert by_text.finish_reason == "length"
    assert by_text.error is None


async def test_stages_and_chunks_change_no_answer(tiny_llama: Path) -> None:
    prompt = [(7 * i) % 500 + 5 for i in range(300)]
    answers = []
    for options in (
        {},
        {"pipeline_parallel_size": 3, "max_num_batched_tokens": 64},
        {
            "pipeline_parallel_size": 2,
            "layer_partition": (1, 7),
            "max_num_batched_tokens": 50,
            "planner": "greedy",
        },
    ):
        async with Engine(config(tiny_llama, **options)) as engine:
            answers.append(await engine.prefill(prompt, logprobs=3))
    assert len({answer.token_ids for answer in answers}) == 1
    numbers = [answer.logprobs[0].chosen.logprob for answer in answers if answer.logprobs]
    assert numbers == pytest.approx([numbers[0]] * 3, abs=2e-5)


async def test_logprobs_come_as_asked(tiny_llama: Path) -> None:
    async with Engine(config(tiny_llama)) as engine:
        result = await engine.prefill([5, 6, 7, 8], logprobs=2, prompt_logprobs=3)
    assert result.logprobs is not None
    assert result.prompt_logprobs is not None
    assert [len(position.top) for position in result.logprobs] == [2]
    assert result.logprobs[0].chosen == result.logprobs[0].top[0]
    assert result.prompt_logprobs[0] is None
    assert [p.chosen.token_id for p in result.prompt_logprobs[1:] if p] == [6, 7, 8]
    assert [len(p.top) for p in result.prompt_logprobs[1:] if p] == [3, 3, 3]


async def test_zero_tokens_only_fill_the_cache(tiny_llama: Path) -> None:
    async with Engine(config(tiny_llama)) as engine:
        result = await engine.prefill([5, 6, 7], max_tokens=0)
    assert (result.token_ids, result.finish_reason, result.num_prompt_tokens) == ((), "length", 3)


async def test_sampling_repeats_with_a_seed(tiny_llama: Path) -> None:
    async with Engine(config(tiny_llama)) as engine:
        drawn = [
            await engine.prefill([5, 6, 7], temperature=5.0, seed=seed)
            for seed in (1, 1, *range(2, 12))
        ]
    tokens = [result.token_ids[0] for result in drawn]
    assert tokens[0] == tokens[1]
    assert len(set(tokens)) > 3


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "prompt is empty"),
        ([], {}, "prompt is empty"),
        ([512], {}, "token id 512 is outside the vocabulary of 512 tokens"),
        ([-1], {}, "token id -1 is outside"),
        ([5] * 101, {}, "the prompt has 101 tokens, max_model_len is 100"),
        ("long " * 200, {}, "max_model_len is 100"),
        (["text"], {}, r"prompt_token_ids\.0: .*\(got 'text'\)"),
        ([True], {}, r"\(got True\)"),
        (7, {}, "prompt_token_ids: "),
        (None, {}, "prompt_token_ids: "),
        ("\ud800", {}, "not valid Unicode"),
        ([5], {"max_token": 1}, "unknown field 'max_token'; did you mean 'max_tokens'"),
        ([5], {"max_tokens": 101}, "has 1 tokens and max_tokens is 101; max_model_len is 100"),
        ([5], {"cache_salt": b"x"}, "cache_salt: "),
        ([5], {"cache_salt": "x" * 1025}, "cache_salt: "),
        ([5], {"logprobs": True}, "logprobs: "),
        ([5], {"request_id": 5}, "request_id: "),
    ],
)
async def test_bad_input_is_refused_and_the_engine_goes_on(
    tiny_llama: Path, prompt: Any, options: dict[str, Any], message: str
) -> None:
    async with Engine(config(tiny_llama, max_model_len=100)) as engine:
        with pytest.raises(RequestError, match=message):
            await engine.prefill(prompt, **options)
        assert (await engine.prefill([5] * 100)).finish_reason == "length"
        assert (await engine.stats()).requests_finished == 1


async def test_salt_of_none_is_no_salt(tiny_llama: Path) -> None:
    async with Engine(config(tiny_llama)) as engine:
        assert (await engine.request([5], cache_salt=None)).cache_salt == ""


async def test_cancelling_the_task_aborts_the_request(tiny_llama: Path) -> None:
    async with Engine(config(tiny_llama, max_num_batched_tokens=16, block_size=16)) as engine:
        task = asyncio.create_task(engine.prefill([5] * 4000, request_id="gone"))
        await reach_wave(engine, 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await engine.abort("gone") is False
        again = await engine.prefill([5, 6], request_id="gone")
        assert again.finish_reason == "length"


async def test_abort_ends_the_request_with_abort(tiny_llama: Path) -> None:
    async with Engine(config(tiny_llama, max_num_batched_tokens=16, block_size=16)) as engine:
        task = asyncio.create_task(engine.prefill([5] * 4000, request_id="a"))
        await reach_wave(engine, 2)
        assert await engine.abort("a") is True
        result = await task
        assert (result.finish_reason, result.token_ids) == ("abort", ())
        assert await engine.abort("never-seen") is False


async def test_request_id_in_use_is_refused(tiny_llama: Path) -> None:
    async with Engine(config(tiny_llama, max_num_batched_tokens=16, block_size=16)) as engine:
        first = asyncio.create_task(engine.prefill([5] * 2000, request_id="a"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="request_id 'a' is in use") as caught:
            await engine.prefill([5], request_id="a")
        assert caught.value.code == "duplicate_request_id"
        assert (await first).finish_reason == "length"


async def test_many_requests_keep_their_order_through_a_short_queue(tiny_llama: Path) -> None:
    short = config(tiny_llama, max_num_queued_reqs=2, max_num_seqs=2)
    async with Engine(short) as engine:
        assert engine.window == 2
        requests = [await engine.request([5] * n, request_id=str(n)) for n in range(1, 40)]
        results = await engine.submit_all(requests)
    assert [result.num_prompt_tokens for result in results] == list(range(1, 40))


async def test_second_time_is_a_hit_until_the_cache_is_reset(tiny_llama: Path) -> None:
    prompt = [(7 * i) % 500 + 5 for i in range(300)]
    async with Engine(config(tiny_llama, pipeline_parallel_size=2)) as engine:
        answers = [await engine.prefill(prompt, logprobs=3) for _ in range(2)]
        other = await engine.prefill(prompt, cache_salt="other")
        assert await engine.reset_prefix_cache() is True
        answers.append(await engine.prefill(prompt, logprobs=3))
        stats = await engine.stats()
    assert [answer.num_cached_tokens for answer in answers] == [0, 256, 0]
    assert other.num_cached_tokens == 0
    assert (stats.prefix_queries, stats.prefix_hits) == (1200, 256)
    assert stats.cached_tokens == 256
    numbers = [answer.logprobs[0].chosen.logprob for answer in answers if answer.logprobs]
    assert numbers == pytest.approx([numbers[0]] * 3, abs=2e-5)
    assert stats.lock_hold_max_s > 0
    assert stats.invariant_violations == 0


async def test_engines_follow_one_another_in_one_loop(tiny_llama: Path) -> None:
    answers = []
    for _ in range(3):
        async with Engine(config(tiny_llama)) as engine:
            answers.append((await engine.prefill([5, 6, 7])).token_ids)
    assert len(set(answers)) == 1


async def test_stats_count_what_was_done(tiny_llama: Path) -> None:
    async with Engine(config(tiny_llama, pipeline_parallel_size=2)) as engine:
        await engine.prefill([5] * 10)
        await engine.prefill([5] * 20)
        stats = await engine.stats()
    assert (stats.requests_finished, stats.prompt_tokens) == (2, 30)
    assert (stats.requests_running, stats.requests_waiting, stats.ring_occupancy) == (0, 0, 0)
    assert [stage.layers for stage in stats.stages] == [f.layers for f in engine.facts]
    assert all(stage.busy_s > 0 for stage in stats.stages)


def test_engine_of_another_event_loop_says_so(tiny_llama: Path) -> None:
    """Nobody runs its pipeline any more."""
    engine = Engine(model=str(tiny_llama), transport="local")
    asyncio.run(engine.start())
    with pytest.raises(EngineDeadError, match="event loop that this engine was started in"):
        asyncio.run(engine.prefill([5, 6]))


async def test_engine_that_is_not_running_says_so(tiny_llama: Path) -> None:
    engine = Engine(config(tiny_llama))
    with pytest.raises(RuntimeError, match="not started"):
        await engine.prefill([5])
    await engine.start()
    with pytest.raises(RuntimeError, match="started before"):
        await engine.start()
    await engine.close()
    await engine.close()
    with pytest.raises(EngineDeadError, match="closed"):
        await engine.prefill([5])


async def test_engine_without_tokenizer_takes_token_ids_only(tiny_llama: Path) -> None:
    async with Engine(config(tiny_llama, skip_tokenizer_init=True)) as engine:
        assert engine.tokenizer is None
        assert (await engine.prefill([5, 6])).finish_reason == "length"
        with pytest.raises(RequestError, match="give token ids"):
            await engine.prefill("text")


async def test_wrong_folders_are_named_before_anything_starts(
    tiny_llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="nowhere is not a folder"):
        await Engine(model="nowhere", transport="local").start()
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        await Engine(model=tmp_path, transport="local").start()
    with pytest.raises(ConfigError, match="holds no tokenizer files"):
        await Engine(config(tiny_llama, tokenizer=tmp_path)).start()
    (tmp_path / "tokenizer.json").write_text("{not json")
    with pytest.raises(ConfigError, match="can't be read"):
        await Engine(config(tiny_llama, tokenizer=tmp_path)).start()


def test_engine_takes_a_config_or_its_fields() -> None:
    with pytest.raises(ConfigError, match="not both"):
        Engine(EngineConfig(model="m"), seed=1)
    with pytest.raises(ConfigError, match="did you mean 'seed'"):
        Engine(model="m", sed=1)
    assert Engine(model="m", seed=3).config.seed == 3


@pytest.mark.parametrize("config", ["folder", Path("folder"), {"model": "folder"}])
def test_engine_wants_a_config(config: Any) -> None:
    with pytest.raises(ConfigError, match="expected an EngineConfig"):
        Engine(config)


async def test_one_stage_may_forget_and_then_nobody_reuses(tiny_llama: Path) -> None:
    prompt = list(range(10, 10 + 130))
    options = {"pipeline_parallel_size": 2, "transport": "local", "block_size": 16}
    async with Engine(EngineConfig(model=str(tiny_llama), **options)) as engine:
        await engine.prefill(prompt)
        assert (await engine.prefill(prompt)).num_cached_tokens == 128
        assert await engine.reset_prefix_cache(stage=1) is True
        assert (await engine.prefill(prompt)).num_cached_tokens == 0
        with pytest.raises(RequestError, match="stages 0 to 1"):
            await engine.reset_prefix_cache(stage=2)
