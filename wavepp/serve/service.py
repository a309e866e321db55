"""One server: an engine, what came in for it, and what goes out.

Owns: the engine's lifetime, the answers in flight, health and metrics. May not: know HTTP or Ray;
`app.py` speaks the one, `deployment.py` runs on the other. Whoever awaits an answer, or iterates
over a stream, and is cancelled has aborted its requests.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from wavepp import __version__
from wavepp.batch.asking import build_requests, check_model
from wavepp.batch.responses import Naming, failure_of
from wavepp.config import EngineConfig
from wavepp.engine import Engine, all_or_none
from wavepp.errors import RequestError, WavePPError
from wavepp.requests import EngineStats, Increment, PrefillRequest, PrefillResult
from wavepp.serve.asked import Asked, Kind, read_asked
from wavepp.serve.health import HealthWatch
from wavepp.serve.metrics import Metrics
from wavepp.serve.problems import ApiError, problem_of
from wavepp.serve.wire import DONE, Chunks, as_json, event, whole_body

STATS_S_MAX = 1.0
ID_CHARS_MAX = 128
ANSWER_PREFIXES = ("cmpl-", "chatcmpl-")


class Service:
    """What is behind the endpoints.

    Args:
        engine: not started yet.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.config: EngineConfig = engine.config
        self.metrics = Metrics(engine.config)
        self.health = HealthWatch(engine)
        self._live: dict[int, Asked] = {}  # two clients may use one name
        self._started = int(time.time())
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Builds the pipeline; requests can run when it returns.

        Raises:
            ConfigError: the configuration or checkpoint can't be used.
        """
        await self.engine.start()
        self._watching = asyncio.create_task(self.health.watch(), name="wavepp-health")

    async def close(self) -> None:
        """Ends the engine and whatever runs on it. Safe to call twice."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self.engine.close()

    @property
    def load(self) -> int:
        """Answers in flight."""
        return len(self._live)

    # -- answers ---------------------------------------------------------------------------------

    async def ask(self, kind: Kind, fields: Mapping[str, Any], given_id: str | None) -> Asked:
        """A question that this engine can run, tokenised.

        Raises:
            RequestError: it can't be served.
        """
        answer_id = uuid.uuid4().hex
        if given_id is not None and 0 < len(given_id) <= ID_CHARS_MAX and given_id.isprintable():
            answer_id = given_id
        naming = Naming(model=self.config.model_name, created=int(time.time()))
        try:
            asked = read_asked(kind, fields, answer_id=answer_id, naming=naming)
            check_model(asked.question.model, self.config)
            # Clients may use a name twice; the engine may not.
            unique = f"{answer_id}-{uuid.uuid4().hex[:8]}"
            requests = await build_requests(self.engine, asked.question, unique)
        except RequestError as error:
            self.metrics.refused(error.code)
            raise
        return replace(asked, requests=requests)

    async def answer(self, asked: Asked) -> tuple[int, bytes]:
        """Status and body of the whole answer."""
        with self._in_flight(asked):
            results = await all_or_none([self._run(request) for request in asked.requests])
        failure = failure_of(results)
        if failure is not None:
            return failure[0], as_json(failure[1])
        tokenizer = self.engine.tokenizer
        body = await self.engine.on_worker(lambda: as_json(whole_body(asked, results, tokenizer)))
        return 200, body

    async def events(self, asked: Asked) -> AsyncGenerator[bytes]:
        """The answer as server-sent events. A refusal is raised before the first of them; what goes
        wrong later is an event."""
        chunks = Chunks(asked, self.engine.tokenizer)
        results: list[PrefillResult] = []
        is_begun = False
        steps = merged([self.engine.stream_request(request) for request in asked.requests])
        with self._in_flight(asked):
            async with aclosing(steps):
                try:
                    async for index, step in steps:
                        if step.result is not None:
                            self.metrics.answered(step.result)
                            results.append(step.result)
                            _raise_failure(step.result)
                        yield await self.engine.on_worker(partial(chunks.chunk, index, step))
                        is_begun = True
                except (WavePPError, ApiError) as error:
                    if isinstance(error, RequestError):
                        self.metrics.refused(error.code)
                    if not is_begun:
                        raise
                    yield event(problem_of(error)[1])
                except (asyncio.CancelledError, GeneratorExit):
                    self.metrics.left(len(asked.requests) - len(results))
                    raise
        if chunks.wants_usage:
            yield chunks.usage(results)
        yield DONE

    async def abort(self, answer_ids: Sequence[str]) -> list[str]:
        """Aborts answers by the names clients know; returns those that were in flight."""
        found = []
        for answer_id in answer_ids:
            bare = answer_id
            for prefix in ANSWER_PREFIXES:
                bare = bare.removeprefix(prefix)
            live = [asked for asked in self._live.values() if asked.answer_id == bare]
            requests = [request for asked in live for request in asked.requests]
            aborted = [await self.engine.abort(request.request_id) for request in requests]
            if any(aborted):
                found.append(answer_id)
        return found

    async def _run(self, request: PrefillRequest) -> PrefillResult:
        try:
            result = await self.engine.submit(request)
        except RequestError as error:
            self.metrics.refused(error.code)
            raise
        except asyncio.CancelledError:
            self.metrics.left()
            raise
        self.metrics.answered(result)
        return result

    @contextmanager
    def _in_flight(self, asked: Asked) -> Iterator[None]:
        self._live[id(asked)] = asked
        try:
            yield
        finally:
            del self._live[id(asked)]

    # -- what operators ask ----------------------------------------------------------------------

    async def stats(self) -> EngineStats | None:
        """The engine's snapshot, or None when there is none in time."""
        with suppress(TimeoutError, WavePPError):
            async with asyncio.timeout(STATS_S_MAX):
                return await self.engine.stats()
        return None

    async def metrics_text(self) -> bytes:
        """What Prometheus reads."""
        return self.metrics.text(await self.stats())

    def models(self) -> dict[str, Any]:
        """The model as `/v1/models` lists it."""
        model = {
            "id": self.config.model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "wavepp",
            "root": self.config.model,
            "parent": None,
            "max_model_len": self.max_model_len,
        }
        return {"object": "list", "data": [model]}

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return min(stage.max_model_len for stage in self.engine.facts)

    def server_info(self) -> dict[str, Any]:
        """The configuration and the split, for people."""
        return {
            "version": __version__,
            "config": self.config.model_dump(mode="json"),
            "stages": [
                {"stage": stage.stage, "layers": list(stage.layers), "bytes": stage.weight_bytes}
                for stage in self.engine.facts
            ],
        }


def _raise_failure(result: PrefillResult) -> None:
    failure = failure_of([result])
    if failure is not None:
        status, body = failure
        raise ApiError(status, body["error"]["message"], code=body["error"]["code"])


async def merged(
    streams: Sequence[AsyncGenerator[Increment]],
) -> AsyncGenerator[tuple[int, Increment]]:
    """Items of several streams as they come, each with its stream's place; the first failure ends
    them all."""
    queue: asyncio.Queue[tuple[int, Increment] | BaseException | None] = asyncio.Queue()

    async def drain(index: int, stream: AsyncGenerator[Increment]) -> None:
        try:
            async with aclosing(stream):
                async for step in stream:
                    queue.put_nowait((index, step))
        except Exception as error:  # whatever it is, the reader shall not wait for ever
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(drain(index, stream)) for index, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def chained(first: bytes, rest: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
    """A stream whose first item was taken already."""
    async with aclosing(rest):
        yield first
        async for item in rest:
            yield item
