"""A load on a server of OpenAI's API, and what one request of it took.

Owns: arrivals (by a rate, and by how many may be out at once) and the clock of each answer. Every
request is streamed: its first token is timed where the client sees it.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from wavepp.errors import ConfigError

ANSWER_S_MAX = 6 * 3600.0
DONE = "[DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where requests go, and with what.

    Attributes:
        extra: fields of every body.
    """

    url: str
    model: str
    api_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """When requests are sent.

    Attributes:
        per_s: on average, apart as chance has it (Poisson); None: all at once.
        in_flight_max: most that may be out; None: any number.
    """

    per_s: float | None = None
    in_flight_max: int | None = None
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One request as its client saw it; seconds from its sending.

    Attributes:
        error: None: it was answered to the end.
        between_s: from each token (or group of tokens in one event) to the next.
        prompt_tokens, cached_tokens, output_tokens: as the server counts them.
    """

    sent_s: float
    error: str | None = None
    first_s: float | None = None
    end_s: float = 0.0
    between_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


async def find_model(base_url: str, api_key: str | None) -> str:
    """The name of the first model that a server lists.

    Raises:
        ConfigError: nothing there answers so.
    """
    url = f"{base_url}/v1/models"
    try:
        async with (
            aiohttp.ClientSession(headers=_headers(api_key)) as session,
            session.get(url) as answer,
        ):
            answer.raise_for_status()
            return str((await answer.json())["data"][0]["id"])
    except (aiohttp.ClientError, OSError, KeyError, IndexError, ValueError) as error:
        raise ConfigError(f"{url}: {error}") from None


async def send_all(
    target: Target, prompts: Sequence[str | list[int]], arrivals: Arrivals
) -> list[Outcome]:
    """Sends every prompt; outcomes in their order."""
    rng = random.Random(arrivals.seed)
    room = asyncio.Semaphore(arrivals.in_flight_max or max(len(prompts), 1))
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=ANSWER_S_MAX)
    headers = _headers(target.api_key)

    async def send(session: aiohttp.ClientSession, prompt: str | list[int]) -> Outcome:
        async with room:
            return await _send(session, target, prompt)

    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers
    ) as session:
        tasks: list[asyncio.Task[Outcome]] = []
        for prompt in prompts:
            if arrivals.per_s is not None and tasks:
                await asyncio.sleep(rng.expovariate(arrivals.per_s))
            tasks.append(asyncio.create_task(send(session, prompt)))
        return list(await asyncio.gather(*tasks))


async def _send(session: aiohttp.ClientSession, target: Target, prompt: str | list[int]) -> Outcome:
    body = {
        "model": target.model,
        "prompt": prompt,
        "stream": True,
        "stream_options": {"include_usage": True},
        **target.extra,
    }
    outcome = Outcome(sent_s=time.perf_counter())
    try:
        async with session.post(target.url, json=body) as answer:
            if answer.status != 200:
                outcome.error = f"{answer.status}: {(await answer.text())[:200]}"
                return outcome
            await _receive(answer, outcome)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    return outcome


async def _receive(answer: aiohttp.ClientResponse, outcome: Outcome) -> None:
    latest_s, is_whole = outcome.sent_s, False
    async for data in _events(answer):
        now = time.perf_counter()
        if data == DONE:
            is_whole = True
            continue
        event = json.loads(data)
        if "error" in event:
            outcome.error = str(event["error"].get("message"))
            return
        if event.get("choices"):
            if outcome.first_s is None:
                outcome.first_s = now - outcome.sent_s
            else:
                outcome.between_s.append(now - latest_s)
            latest_s = now
        if usage := event.get("usage"):
            outcome.prompt_tokens = int(usage["prompt_tokens"])
            outcome.output_tokens = int(usage["completion_tokens"])
            details = usage.get("prompt_tokens_details") or {}
            outcome.cached_tokens = int(details.get("cached_tokens") or 0)
    outcome.end_s = latest_s - outcome.sent_s
    if not is_whole:
        outcome.error = "the answer broke off"


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """The data of the answer's events, which may come in pieces."""
    async for line in answer.content:
        text = line.decode().strip()
        if text.startswith("data: "):
            yield text.removeprefix("data: ")


def _headers(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
