"""Several pipelines as one: an EngineBackend whose requests go to replicas by Serve's router.

Owns: the calls in flight. A replica that dies, or whose pipeline does, loses nobody's request:
prefill can be done again, so the request is sent to another one, and tokens that were told already
are not told twice.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from wavepp.actors.streams import TokenStream
from wavepp.config import EngineConfig
from wavepp.control.work import StageFacts
from wavepp.engine import build_backend
from wavepp.errors import EngineDeadError, WavePPError
from wavepp.requests import (
    EngineStats,
    PrefillRequest,
    PrefillResult,
    Produced,
    RequestTimings,
)

logger = logging.getLogger(__name__)

TRIES_MAX = 5
RETRY_S = 0.5
CLOSE_S_MAX = 5.0
NOT_SUMMED = frozenset(
    {"wall_s", "lease_age_s_max", "stages", "wave_tokens", "wave_size_counts", "wave_budget"}
)

Answer = Produced | PrefillResult | WavePPError


@serve.deployment(name="pipeline")
class PipelineReplica:
    """One pipeline, for a `ReplicaSet` in another process.

    Args:
        config: of the engine; a plain dict, so that a change of it is a change of the deployment.
    """

    async def __init__(self, config: Mapping[str, Any]) -> None:  # type: ignore[misc]  # awaited
        self._backend = build_backend(EngineConfig(**config))
        self._going: asyncio.Task[None] | None = None
        self._facts = await self._backend.start()

    async def facts(self) -> tuple[StageFacts, ...]:
        """What its stages said when they started."""
        return self._facts

    async def answer(self, request: PrefillRequest, stream: bool) -> AsyncGenerator[Answer]:
        """The tokens as they come, if asked for, and the result; errors meant for the user are
        items, since Ray would wrap them."""
        running = asyncio.create_task(self._backend.submit(request, stream=stream))
        try:
            await asyncio.sleep(0)  # it is submitted before anybody asks for more of it
            known = 0
            while stream and (more := await self._backend.more(request.request_id, known)):
                known += len(more)
                for produced in more:
                    yield produced
            yield await running
        except WavePPError as error:
            yield error
            if isinstance(error, EngineDeadError):
                self._go()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def stats(self) -> EngineStats:
        """As EngineBackend.stats."""
        return await self._backend.stats()

    async def reset(self, stage: int | None) -> bool:
        """As EngineBackend.reset_prefix_cache."""
        return await self._backend.reset_prefix_cache(stage)

    async def check_health(self) -> None:
        """Serve replaces a replica that raises here."""
        await self._backend.check_health()

    async def __del__(self) -> None:
        """Serve calls and awaits this when the replica's requests are drained."""
        await self._backend.close()

    def _go(self) -> None:
        """Ends this process: its pipeline is dead for good, and while it is there it fails every
        request at once, which makes it the least loaded replica. What it had is sent to others."""

        async def close_and_exit() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S_MAX):
                    await self._backend.close()
            os._exit(1)

        if self._going is None:
            self._going = asyncio.create_task(close_and_exit())


class _Call:
    """One request in flight."""

    def __init__(self) -> None:
        self.tokens = TokenStream()
        self.num_told = 0
        self.response: Any = None
        self.is_aborted = False


class ReplicaSet:
    """EngineBackend over all replicas of a pipeline."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._calls: dict[str, _Call] = {}

    async def start(self) -> tuple[StageFacts, ...]:
        """As EngineBackend.start; the replicas are there already."""
        facts: tuple[StageFacts, ...] = await self._handle.facts.remote()
        return facts

    async def submit(self, request: PrefillRequest, *, stream: bool = False) -> PrefillResult:
        """As EngineBackend.submit."""
        call = self._calls[request.request_id] = _Call()
        began_s = time.monotonic()
        try:
            for tries_left in reversed(range(TRIES_MAX)):
                try:
                    return await self._try(call, request, stream)
                except (RayActorError, RayServeException, EngineDeadError) as error:
                    if call.is_aborted or not tries_left:
                        raise
                    logger.warning("a replica failed, trying another: %s", error)
                    await asyncio.sleep(RETRY_S)
            raise AssertionError("the last try returns or raises")
        except (RayError, RayServeException, EngineDeadError, asyncio.CancelledError) as error:
            if call.is_aborted:
                return _aborted(request, began_s)
            if isinstance(error, EngineDeadError | asyncio.CancelledError):
                raise
            raise EngineDeadError(f"no replica answers: {_first_line(error)}") from None
        finally:
            call.tokens.close()
            if self._calls.get(request.request_id) is call:
                del self._calls[request.request_id]

    async def more(self, request_id: str, known: int) -> tuple[Produced, ...]:
        """As EngineBackend.more."""
        call = self._calls.get(request_id)
        return () if call is None else await call.tokens.after(known)

    async def abort(self, request_id: str) -> bool:
        """As EngineBackend.abort."""
        call = self._calls.get(request_id)
        if call is None:
            return False
        call.is_aborted = True
        if call.response is not None:
            call.response.cancel()
        return True

    async def stats(self) -> EngineStats:
        """As EngineBackend.stats: of all replicas together."""
        try:
            return merge_stats(await self._handle.broadcast("stats").results_async())
        except (RayError, RayServeException) as error:
            raise EngineDeadError(f"a replica does not answer: {_first_line(error)}") from None

    async def reset_prefix_cache(self, stage: int | None = None) -> bool:
        """As EngineBackend.reset_prefix_cache."""
        return all(await self._handle.broadcast("reset", stage).results_async())

    async def check_health(self) -> None:
        """As EngineBackend.check_health: Serve looks after its replicas itself."""

    async def close(self) -> None:
        """As EngineBackend.close: the replicas are Serve's."""
        for request_id in list(self._calls):
            await self.abort(request_id)

    async def _try(self, call: _Call, request: PrefillRequest, stream: bool) -> PrefillResult:
        """One replica's answer."""
        call.response = self._handle.options(stream=True).answer.remote(request, stream)
        count = 0
        try:
            async for item in call.response:
                match item:
                    case PrefillResult():
                        return item
                    case Produced():
                        count += 1
                        if count > call.num_told:
                            call.num_told = count
                            call.tokens.put(item)
                    case _:
                        raise item
        except BaseException:
            with suppress(RayError):
                call.response.cancel()
            raise
        raise EngineDeadError("a replica's answer ended without a result")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _aborted(request: PrefillRequest, began_s: float) -> PrefillResult:
    return PrefillResult(
        request_id=request.request_id,
        token_ids=(),
        finish_reason="abort",
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=0,
        timings=RequestTimings(queued_s=began_s, done_s=time.monotonic()),
    )


def merge_stats(parts: Sequence[EngineStats]) -> EngineStats:
    """Counts of several pipelines together; the stages of each follow those of the one before."""
    assert parts, "there is a replica"
    sums = {
        field.name: sum(getattr(part, field.name) for part in parts)
        for field in fields(EngineStats)
        if field.name not in NOT_SUMMED
    }
    stages = [stage for part in parts for stage in part.stages]
    return EngineStats(
        wall_s=max(part.wall_s for part in parts),
        lease_age_s_max=max(part.lease_age_s_max for part in parts),
        stages=tuple(replace(stage, stage=index) for index, stage in enumerate(stages)),
        wave_tokens=tuple(size for part in parts for size in part.wave_tokens),
        wave_size_counts=tuple(map(sum, zip(*(p.wave_size_counts for p in parts), strict=True))),
        wave_budget=max(part.wave_budget for part in parts),
        **sums,
    )
