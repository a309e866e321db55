"""Processes of a server are killed: a stage costs no answer; of a driver or a replica requests in
flight are told, the next ones are answered, and nothing is left of what died."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from conftest import ENGINE

from wavepp import LLM

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

IN_FLIGHT = 6
TOLD_S_MAX = 30.0
BACK_S_MAX = 120.0
LONG = {"max_tokens": 400, "ignore_eos": True, "return_token_ids": True}
PROMPT = [7] * 50
ASKED = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
PARTS = {"replica": "ray::ServeReplica", "driver": "ray::DriverActor", "stage": "ray::StageActor"}


def processes(part: str) -> set[psutil.Process]:
    """Processes of this session's Ray that play a part. (An actor's title is its command line.)"""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if process.cmdline()[0].startswith(PARTS[part]):
                found.add(process)
        except (psutil.Error, IndexError):
            continue
    return found


def ours(before: set[psutil.Process]) -> set[psutil.Process]:
    """Processes of any part that were not there before."""
    return {process for part in PARTS for process in processes(part)} - before


@pytest.fixture(scope="module")
def others() -> set[psutil.Process]:
    """What other tests' servers run on."""
    return ours(set())


@pytest.fixture(scope="module")
def server_url(serve_address: str, tiny_llama: Path, others: set[psutil.Process]) -> Iterator[str]:
    from ray import serve

    from wavepp.serve import app_builder

    application = app_builder({"model": str(tiny_llama), **ENGINE})
    serve.run(application, name="killed", route_prefix="/killed")
    assert len(ours(others)) == 4
    yield f"{serve_address}/killed"
    serve.delete("killed")
    assert ours(others) == set()


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> tuple[int, ...]:
    """What an engine in this process answers."""
    with LLM(tiny_llama, transport="local", **ENGINE) as llm:
        (result,) = llm.generate([PROMPT], max_tokens=4, ignore_eos=True)
        return result.token_ids


async def tokens_of(client: httpx.AsyncClient) -> tuple[int, ...] | None:
    """The answer to ASKED; None while there is none."""
    try:
        answer = await client.post("/v1/completions", json=ASKED)
    except httpx.TransportError:
        return None
    if answer.status_code != 200:
        assert answer.json()["error"]["code"] == "engine_dead"
        return None
    return tuple(answer.json()["choices"][0]["token_ids"])


@asynccontextmanager
async def load(url: str) -> AsyncIterator[list[asyncio.Task[httpx.Response]]]:
    """Long answers in flight, every second one a stream."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        tasks = [
            asyncio.create_task(
                client.post(
                    "/v1/completions", json={"prompt": [9 + n] * 40, "stream": n % 2 == 0, **LONG}
                )
            )
            for n in range(IN_FLIGHT)
        ]
        yield tasks


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error object of an answer, or at the end of a stream."""
    if answer.status_code == 200:
        *_, last, done, rest = answer.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        error: dict[str, Any] = json.loads(last.removeprefix("data: "))["error"]
        return error
    assert answer.status_code == 503
    error = answer.json()["error"]
    return error


def assert_whole(answers: list[httpx.Response]) -> None:
    """What `load` asked for is all there."""
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert "error" not in answer.text
    for answer in answers[::2]:
        *chunks, done, rest = answer.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        choices = [json.loads(chunk.removeprefix("data: "))["choices"][0] for chunk in chunks]
        # a reader that is late finds several tokens in one chunk
        assert sum(len(choice["token_ids"]) for choice in choices) == LONG["max_tokens"]
    for answer in answers[1::2]:
        assert len(answer.json()["choices"][0]["token_ids"]) == LONG["max_tokens"]


async def test_a_stage_that_is_killed_costs_no_answer(
    server_url: str, others: set[psutil.Process], expected: tuple[int, ...]
) -> None:
    before, stages = ours(others), processes("stage") - others
    async with load(server_url) as tasks, httpx.AsyncClient(base_url=server_url) as client:
        client.timeout = httpx.Timeout(BACK_S_MAX)
        await asyncio.sleep(1.0)
        victim = next(iter(stages))
        os.kill(victim.pid, signal.SIGKILL)
        assert (await client.get("/health")).status_code == 200
        assert sum(task.done() for task in tasks) == 0
        assert_whole(await asyncio.gather(*tasks))
        assert await tokens_of(client) == expected
        assert "wavepp:stage_restarts_total 1.0" in (await client.get("/metrics")).text
    after = ours(others)
    assert before - after == {victim}
    assert len(after) == 4


@pytest.mark.parametrize("part", ["replica", "driver"])
async def test_what_is_killed_is_replaced(
    part: str, server_url: str, others: set[psutil.Process], expected: tuple[int, ...]
) -> None:
    before = ours(others)
    async with load(server_url) as tasks, httpx.AsyncClient(base_url=server_url) as client:
        await asyncio.sleep(1.0)
        assert (await client.get("/load")).json() == {"server_load": IN_FLIGHT}
        victim = next(iter(processes(part) - others))
        os.kill(victim.pid, signal.SIGKILL)
        done, late = await asyncio.wait(tasks, timeout=TOLD_S_MAX)
        assert late == set()
        for task in done:
            assert error_of(task.result())["code"] == "engine_dead"

        client.timeout = httpx.Timeout(BACK_S_MAX)
        deadline = time.monotonic() + BACK_S_MAX
        while (tokens := await tokens_of(client)) is None:
            assert time.monotonic() < deadline, "nobody answers"
            await asyncio.sleep(0.2)
        assert tokens == expected
    assert [process for process in before if process.is_running()] == []
    assert len(ours(others)) == 4


async def test_of_several_pipelines_one_may_die_and_no_request_fails(
    serve_address: str, tiny_llama: Path
) -> None:
    from ray import serve

    from wavepp.serve import app_builder

    before = ours(set())
    config = {"model": str(tiny_llama), **ENGINE, "pipeline_parallel_size": 1, "num_replicas": 2}
    await asyncio.to_thread(serve.run, app_builder(config), name="several", route_prefix="/several")
    try:
        async with load(f"{serve_address}/several") as tasks:
            await asyncio.sleep(1.0)
            assert sum(task.done() for task in tasks) == 0
            os.kill(next(iter(processes("driver") - before)).pid, signal.SIGKILL)
            answers = await asyncio.gather(*tasks)
    finally:
        await asyncio.to_thread(serve.delete, "several")
    assert_whole(answers)
    deadline = time.monotonic() + TOLD_S_MAX
    while ours(before):  # its successor may have been on the way
        assert time.monotonic() < deadline, ours(before)
        await asyncio.sleep(0.1)
