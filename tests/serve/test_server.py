"""The server as users meet it: Ray Serve, real connections, the official client, curl."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from conftest import ENGINE, MODEL_LEN

from wavepp import Engine, EngineConfig

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

REQUESTS = int(os.environ.get("WAVEPP_TEST_REQUESTS", "150"))
"""Of the load; 2000 takes minutes."""
CONCURRENCY = 64
FAMILIES = 5
GONE = 200
HALF_OPEN = 1000
SLOW = 2


@pytest.fixture
def client(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as made:
        yield made


async def direct(folder: Path, prompts: list[Any], **options: Any) -> list[tuple[int, ...]]:
    """What an engine in this process answers."""
    async with Engine(EngineConfig(model=folder, transport="local", **ENGINE)) as engine:
        requests = [await engine.request(prompt, **options) for prompt in prompts]
        return [result.token_ids for result in await engine.submit_all(requests)]


def metric(server: str, name: str) -> float:
    """The sum of a metric's lines."""
    lines = httpx.get(f"{server}/metrics").text.splitlines()
    found = [line for line in lines if line.startswith(f"wavepp:{name}")]
    assert found, name
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def nothing_held(server: str) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "leases{", "leases ", "escrow_blocks")
    lines = httpx.get(f"{server}/metrics").text.splitlines()
    held = [
        line
        for line in lines
        if line.startswith(tuple(f"wavepp:{name}" for name in (*names, "kv_cache_usage_perc")))
    ]
    assert len(held) >= 6, held
    return all(float(line.rsplit(" ", 1)[1]) == 0 for line in held)


def eventually_nothing_held(server: str) -> bool:
    deadline = time.monotonic() + 30
    while not nothing_held(server):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


async def test_the_official_client_works_unchanged(client: openai.OpenAI, tiny_llama: Path) -> None:
    (model,) = client.models.list().data
    expected = await direct(tiny_llama, ["Once upon"], max_tokens=5, ignore_eos=True)
    completion = client.completions.create(
        model=model.id,
        prompt="Once upon",
        max_tokens=5,
        logprobs=2,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    (choice,) = completion.choices
    assert choice.model_extra is not None
    assert tuple(choice.model_extra["token_ids"]) == expected[0]
    assert choice.logprobs is not None
    assert len(choice.logprobs.token_logprobs or ()) == 5
    pieces = client.completions.create(
        model=model.id,
        prompt="Once upon",
        max_tokens=5,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    assert "".join(piece.choices[0].text for piece in pieces) == choice.text

    asked: dict[str, Any] = {
        "model": model.id,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_completion_tokens": 4,
        "extra_body": {"ignore_eos": True},
    }
    chat = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert chat.choices[0].logprobs is not None
    assert len(chat.choices[0].logprobs.content or ()) == 4
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == chat.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4


def test_the_official_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="max_model_len is 512") as caught:
        client.completions.create(model="tiny", prompt=[5] * 5000)
    assert (caught.value.code, caught.value.param) == ("prompt_too_long", "prompt")


def test_curl_gets_an_answer(server: str) -> None:
    body = json.dumps({"model": "tiny", "prompt": "Hello", "max_tokens": 3, "stream": True})
    command = ["curl", "-sS", "--fail", f"{server}/v1/completions", "-d", body]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("data: {")
    assert done.stdout.endswith("data: [DONE]\n\n")


@pytest.mark.timeout(300 + REQUESTS)
async def test_under_load_all_get_their_own_answers(server: str, tiny_llama: Path) -> None:
    rng = random.Random(7)
    families = [[rng.randrange(5, 512) for _ in range(96)] for _ in range(FAMILIES)]
    prompts = [
        families[n % FAMILIES] + [rng.randrange(5, 512) for _ in range(rng.randint(1, 40))]
        for n in range(REQUESTS)
    ]
    expected = await direct(tiny_llama, prompts, max_tokens=2, ignore_eos=True)
    counted = ("prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total")
    before = {name: metric(server, name) for name in counted}
    limits, timeout = httpx.Limits(max_connections=CONCURRENCY), httpx.Timeout(120, pool=None)
    async with httpx.AsyncClient(base_url=server, timeout=timeout, limits=limits) as many:
        await many.post("/reset_prefix_cache")
        asked = {"max_tokens": 2, "ignore_eos": True, "return_token_ids": True, "cache_salt": "h"}
        answers = await asyncio.gather(
            *(many.post("/v1/completions", json={"prompt": p, **asked}) for p in prompts)
        )
    assert {answer.status_code for answer in answers} == {200}
    bodies = [answer.json() for answer in answers]
    got = [tuple(body["choices"][0]["token_ids"]) for body in bodies]
    assert got == expected
    cached = [body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in bodies]
    assert all(count in (0, 96) or count % 16 == 0 for count in cached)
    assert sum(count >= 96 for count in cached) >= REQUESTS - FAMILIES * 4
    sums = (sum(cached), sum(map(len, prompts)), 2 * REQUESTS)
    assert [metric(server, name) - before[name] for name in counted] == [*sums]


def aborted(server: str) -> float:
    """Answers that ended because their client went away."""
    text = httpx.get(f"{server}/metrics").text
    found = re.search(r'request_success_total\{finished_reason="abort",[^}]*\} ([\d.]+)', text)
    return float(found[1]) if found else 0.0


async def test_clients_that_go_away_leave_nothing(server: str, tiny_llama: Path) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(5, 512) for _ in range(rng.randint(50, 400))] for _ in range(GONE)]
    stay = prompts[::4]
    expected = await direct(tiny_llama, stay, max_tokens=8, ignore_eos=True)
    asked = {"max_tokens": 8, "ignore_eos": True, "return_token_ids": True, "cache_salt": "gone"}

    async def ask(many: httpx.AsyncClient, number: int) -> tuple[int, ...] | None:
        body = {"prompt": prompts[number], **asked}
        if number % 4 == 0:
            answer = await many.post("/v1/completions", json=body)
            return tuple(answer.json()["choices"][0]["token_ids"])
        is_stream = number % 2 == 0
        call = many.stream("POST", "/v1/completions", json={**body, "stream": is_stream})
        try:
            async with asyncio.timeout(rng.uniform(0, 0.5)), call as response:
                async for _ in response.aiter_bytes():
                    pass
        except TimeoutError:
            return None
        return None

    limits = httpx.Limits(max_connections=GONE)
    async with httpx.AsyncClient(base_url=server, timeout=120, limits=limits) as many:
        got = await asyncio.gather(*(ask(many, number) for number in range(GONE)))
    assert [tokens for tokens in got if tokens is not None] == expected
    assert eventually_nothing_held(server)


async def test_answers_whose_client_went_away_are_counted(server: str) -> None:
    """A stream that is left after its first event, and a whole answer while it is made."""
    before = aborted(server)
    body = {"prompt": [5, 6, 7], "max_tokens": MODEL_LEN - 8, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=server, timeout=120) as client:
        call = client.stream("POST", "/v1/completions", json={**body, "stream": True})
        async with call as response:
            assert (await anext(response.aiter_lines())).startswith("data: {")
        assert await eventually(lambda: aborted(server) == before + 1)
        whole = asyncio.create_task(client.post("/v1/completions", json=body))
        assert await eventually(lambda: metric(server, "num_requests_running") == 1)
        whole.cancel()
        assert await eventually(lambda: aborted(server) == before + 2)
    assert eventually_nothing_held(server)


async def eventually(is_true: Callable[[], bool]) -> bool:
    """Whether something comes true within half a minute; asked off the event loop."""
    for _ in range(600):
        if await asyncio.to_thread(is_true):
            return True
        await asyncio.sleep(0.05)
    return False


def test_metrics_go_through_rays_own_exporter_too(server: str, ray_session: Any) -> None:
    (node,) = ray_session.nodes()
    exporter = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    asked = {"prompt": [3] * 77, "max_tokens": 2, "ignore_eos": True}
    assert httpx.post(f"{server}/v1/completions", json=asked, timeout=60).status_code == 200
    names = ("prompt_tokens_total", "computed_tokens_total", "e2e_request_latency_seconds_count")
    names += ("stage_busy_seconds_total", "iteration_tokens_total_sum", "cache_config_info")
    expected = {name: metric(server, name) for name in names}

    def told(name: str) -> float:
        lines = [
            line
            for line in httpx.get(exporter).text.splitlines()
            if line.startswith(f"ray_wavepp_{name}{{") and 'application="wavepp"' in line
        ]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    deadline = time.monotonic() + 60  # both the server and Ray tell every few seconds
    while (found := {name: told(name) for name in names}) != pytest.approx(expected):
        assert time.monotonic() < deadline, (found, expected)
        time.sleep(0.5)


def test_huge_bodies_are_refused_and_others_served(server: str) -> None:
    body = b'{"prompt": "' + b"a" * (50 * 2**20) + b'"}'
    try:
        refused: httpx.Response | None = httpx.post(
            f"{server}/v1/completions", content=body, timeout=60
        )
    except httpx.WriteError:  # the server need not read to the end what it refuses
        refused = None
    assert refused is None or refused.status_code == 413
    answer = httpx.post(f"{server}/v1/completions", json={"prompt": "a"}, timeout=60)
    assert answer.status_code == 200


def test_half_open_connections_are_in_nobodys_way(server: str) -> None:
    where = urlsplit(server)
    assert where.hostname is not None
    assert where.port is not None
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    with ExitStack() as stack:
        for number in range(HALF_OPEN):
            made = socket.create_connection((where.hostname, where.port), timeout=30)
            stack.enter_context(closing(made))
            made.sendall(head if number % 2 else head[:30])
        assert httpx.get(f"{server}/health", timeout=30).status_code == 200
        answer = httpx.post(f"{server}/v1/completions", json={"prompt": "a"}, timeout=60)
        assert answer.status_code == 200
    assert eventually_nothing_held(server)


def unread_bytes(port: int) -> list[int]:
    """What sockets of the server's port hold because nobody reads it, connection by connection."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    held = [line[4].partition(":")[0] for line in lines if line[1].endswith(f":{port:04X}")]
    return [count for count in (int(text, 16) for text in held) if count]


def test_slow_readers_are_in_nobodys_way(server: str) -> None:
    """Their streams are longer than what sockets hold; some come to the end, some go away."""
    where = urlsplit(server)
    assert where.port is not None
    prompts = [[7 + n] * 480 for n in range(24)]
    asked = {"prompt": prompts, "ignore_eos": True, "prompt_logprobs": 20, "stream": True}
    body = json.dumps(asked)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    with ExitStack() as stack:
        slow = [stack.enter_context(closing(socket.socket())) for _ in range(SLOW)]
        for made in slow:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            made.settimeout(120)
            made.connect((where.hostname, where.port))
            made.sendall(f"{head}Connection: close\r\n\r\n{body}".encode())
        assert {made.recv(12) for made in slow} == {b"HTTP/1.1 200"}
        answer = httpx.post(f"{server}/v1/completions", json={"prompt": "a"}, timeout=60)
        assert answer.status_code == 200
        assert eventually_nothing_held(server)  # the engine waits for no reader
        held = unread_bytes(where.port)
        assert len(held) == SLOW
        read = [b"".join(iter(partial(made.recv, 65536), b"")) for made in slow[1:]]
    for stream in read:
        assert stream.count(b'"finish_reason":"length"') == len(prompts)
        assert b"data: [DONE]\n\n" in stream[-40:]
        assert len(stream) > 1.2 * max(held)
    assert eventually_nothing_held(server)


async def test_health_does_not_queue_behind_work(server: str) -> None:
    async with httpx.AsyncClient(base_url=server, timeout=120) as many:
        asked = {"prompt": [5] * MODEL_LEN, "max_tokens": 0}
        work = [
            asyncio.create_task(many.post("/v1/completions", json={**asked, "cache_salt": str(n)}))
            for n in range(20)
        ]
        await asyncio.sleep(0)
        seen = 0
        while not all(task.done() for task in work):
            assert (await many.get("/health")).status_code == 200
            seen += sum(not task.done() for task in work) > 0
        assert {task.result().status_code for task in work} == {200}
    assert seen > 1
