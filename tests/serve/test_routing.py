"""Where requests go when there are several pipelines: to what they share, unless it is busy."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import httpx
import pytest
from conftest import ENGINE

from wavepp import Engine, EngineConfig
from wavepp.serve.routing import PrefixMemory

FAMILIES, MEMBERS, PREFIX, BLOCK = 20, 4, 96, 16


def keys(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def test_a_prefix_goes_where_it_went_before() -> None:
    memory: PrefixMemory[str] = PrefixMemory()
    memory.sent(keys("a1", "a2", "a3"), "one")
    memory.ended("one")
    assert memory.ranks(keys("a1", "a2", "b3"), ["one", "two"])[0] == ["one"]
    assert memory.ranks(keys("c1"), ["one", "two"])[0] == ["two"]  # it remembers less
    memory.sent(keys("a1", "a2", "b3"), "two")
    assert memory.ranks(keys("a1", "a2", "a3"), ["one", "two"])[0] == ["one"]
    assert memory.ranks(keys("a1", "a2"), ["one", "two"])[0] == ["two"]  # the latest


def test_a_busy_replica_is_passed_over() -> None:
    memory: PrefixMemory[str] = PrefixMemory(ahead_max=2)
    for _ in range(2):
        memory.sent(keys("a1"), "one")
    assert memory.ranks(keys("a1"), ["one", "two"])[0] == ["one"]
    memory.sent(keys("a1"), "one")
    assert memory.ranks(keys("a1"), ["one", "two"])[0] == ["two"]
    memory.ended("one")
    assert memory.ranks(keys("a1"), ["one", "two"])[0] == ["one"]


def test_all_replicas_are_there_to_fall_back_on() -> None:
    memory: PrefixMemory[str] = PrefixMemory()
    memory.sent(keys("a1"), "one")
    assert memory.ranks(keys("a1"), ["one", "two", "three"])[-1] == ["one", "two", "three"]
    assert memory.ranks(keys("a1"), []) == [[], []]


def test_what_is_gone_is_forgotten_and_memory_is_bounded() -> None:
    memory: PrefixMemory[str] = PrefixMemory(keys_max=3)
    memory.sent(keys("a1", "a2"), "one")
    memory.sent(keys("b1", "b2"), "two")  # a2 goes: the end of what was used longest ago
    assert len(memory._owners) == 3
    assert memory._owned == {"one": 1, "two": 2}
    memory.keep(["two"])
    assert memory.ranks(keys("a1"), ["two", "new"])[0] == ["new"]
    assert dict(memory._owned) == {"two": 2}


def family_prompts(seed: int) -> list[list[int]]:
    """Families that share a prefix, each of few members, in random order."""
    rng = random.Random(seed)

    def draw(count: int) -> list[int]:
        return [rng.randrange(5, 512) for _ in range(count)]

    prefixes = [draw(PREFIX) for _ in range(FAMILIES)]
    prompts = [prefix + draw(8) for prefix in prefixes for _ in range(MEMBERS)]
    rng.shuffle(prompts)
    return prompts


@pytest.mark.ray
async def test_two_pipelines_hit_more_than_by_turns(serve_address: str, tiny_llama: Path) -> None:
    from ray import serve

    from wavepp.serve import app_builder

    prompts = family_prompts(1)
    config = {"model": str(tiny_llama), **ENGINE, "transport": "local"}
    by_turns = await cached_by_turns(EngineConfig(**config), prompts)
    application = app_builder({**config, "num_replicas": 2})
    await asyncio.to_thread(serve.run, application, name="two", route_prefix="/two")
    try:
        address = f"{serve_address}/two"
        async with httpx.AsyncClient(base_url=address, timeout=120) as client:
            await asyncio.to_thread(wait_for, address)
            cached, tokens = 0, []
            for at in range(0, len(prompts), 4):
                calls = [
                    client.post(
                        "/v1/completions", json={"prompt": prompt, "return_token_ids": True}
                    )
                    for prompt in prompts[at : at + 4]
                ]
                for answer in await asyncio.gather(*calls):
                    body = answer.json()
                    assert answer.status_code == 200, body
                    cached += body["usage"]["prompt_tokens_details"]["cached_tokens"]
                    tokens.append(tuple(body["choices"][0]["token_ids"]))
            streamed = await client.post(
                "/v1/completions", json={"prompt": prompts[0], "stream": True}
            )
            metrics = (await client.get("/metrics")).text
            reset = (await client.post("/reset_prefix_cache")).json()
    finally:
        await asyncio.to_thread(serve.delete, "two")
    async with Engine(EngineConfig(**config)) as engine:
        expected = [
            result.token_ids
            for result in await engine.submit_all(
                [await engine.request(prompt) for prompt in prompts]
            )
        ]
    assert tokens == expected
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert reset == {"reset": True}
    assert cached >= 1.3 * by_turns > 0
    for stage in range(4):  # both pipelines' stages are told, and both were used
        (line,) = [
            line
            for line in metrics.splitlines()
            if line.startswith(f'wavepp:stage_busy_seconds_total{{stage="{stage}"}}')
        ]
        assert float(line.rsplit(" ", 1)[1]) > 0


async def cached_by_turns(config: EngineConfig, prompts: list[list[int]]) -> int:
    """Tokens reused when two pipelines get every second prompt each."""
    cached = 0
    for half in (prompts[::2], prompts[1::2]):
        async with Engine(config) as engine:
            for at in range(0, len(half), 2):
                requests = [await engine.request(prompt) for prompt in half[at : at + 2]]
                results = await engine.submit_all(requests)
                cached += sum(result.num_cached_tokens for result in results)
    return cached


def wait_for(address: str) -> None:
    import time

    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if httpx.get(f"{address}/health").status_code == 200:
            return
        time.sleep(0.1)
    raise AssertionError(f"{address} does not answer")
