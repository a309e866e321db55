"""Timed runs of an engine: a closed loop, arrivals at given times, or a storm of cancellations.

Owns: the clock and the clients. Requests are checked before the clock starts, so that what is timed
is the pipeline. What was measured is judged in `report.py`.

closed   some clients, each with one request in flight, until all prompts are done
open     every request is submitted at its own time, whatever the others do
storm    a closed loop in which requests are aborted at drawn times
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from wavepp.bench.load import foreign_cores, read_cpu
from wavepp.engine import Engine
from wavepp.errors import EngineDeadError, WavePPError
from wavepp.requests import EngineStats, PrefillRequest, PrefillResult

Tokens = Sequence[int] | npt.NDArray[np.int32]

ABORT_SHARE = 0.5  # of the requests of a storm
ABORT_WITHIN = 1.5  # of the mean completion so far: aborts fall into every state of a request
FIRST_ABORTS_S = 0.05  # the same before anything has completed
ABORT_AT_ONCE = 0.25  # of the aborts: clients that leave as soon as they have asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request of a workload.

    Attributes:
        expected: tokens at its front that others are meant to have left in the cache.
        at_s: when it arrives, from the beginning of an open run.
    """

    tokens: Tokens
    expected: int = 0
    at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopRun:
    """One timed run: results and completion times in prompt order, and the engine around it.

    Completion is from submission to the first token, queueing included, in seconds. Foreign cores
    are those that other processes kept busy meanwhile. `time_scale`: seconds of the clock for one
    of an emulated device; times here are the clock's. `expected`: as in `Ask`, one a request.
    """

    wall_s: float
    completions_s: tuple[float, ...]
    results: tuple[PrefillResult, ...]
    before: EngineStats
    after: EngineStats
    foreign_cores: float = 0.0
    time_scale: float = 1.0
    expected: tuple[int, ...] = ()

    @property
    def done(self) -> tuple[int, ...]:
        """Places of the requests that were not aborted."""
        return tuple(n for n, r in enumerate(self.results) if r.finish_reason != "abort")

    @property
    def input_tokens(self) -> int:
        """Prompt tokens of the requests that completed, cached ones included."""
        return sum(self.results[n].num_prompt_tokens for n in self.done)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were reused, not computed."""
        return sum(self.results[n].num_cached_tokens for n in self.done)

    @property
    def device_s(self) -> float:
        """The wall time in seconds of the devices."""
        return self.wall_s / self.time_scale

    @property
    def read_s(self) -> float:
        """Seconds between the two readings of the engine: what shares are shares of."""
        return self.after.wall_s - self.before.wall_s or self.wall_s

    @property
    def latencies_s(self) -> tuple[float, ...]:
        """Completion times of what completed, in seconds of the devices."""
        return tuple(self.completions_s[n] / self.time_scale for n in self.done)


async def run_closed_loop(
    engine: Engine,
    prompts: Sequence[Tokens | Ask],
    concurrency: int,
    *,
    storm_seed: int | None = None,
) -> LoopRun:
    """Runs every prompt, `concurrency` at a time; with a seed, as a storm of cancellations.

    Raises:
        EngineDeadError: a request failed; a benchmark of failures says nothing.
    """
    asks = [item if isinstance(item, Ask) else Ask(tokens=item) for item in prompts]
    async with _timed(engine, asks) as run:
        storm = None if storm_seed is None else _Storm(engine, storm_seed)
        places = iter(range(len(asks)))

        async def client() -> None:
            for place in places:
                await run.submit(place, storm)

        await _all([client() for _ in range(min(concurrency, len(asks)))])
    return run.finished()


async def run_open_loop(engine: Engine, asks: Sequence[Ask]) -> LoopRun:
    """Runs every request, each submitted at its time.

    Raises:
        EngineDeadError: a request failed.
    """
    scale = engine.config.time_scale
    async with _timed(engine, asks) as run:

        async def client(place: int) -> None:
            due_s = run.began_s + asks[place].at_s * scale
            await asyncio.sleep(max(due_s - time.perf_counter(), 0.0))
            await run.submit(place)

        await _all([client(place) for place in range(len(asks))])
    return run.finished()


class _Run:
    """A run under way."""

    def __init__(
        self, engine: Engine, requests: Sequence[PrefillRequest], asks: Sequence[Ask]
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._asks = asks
        self._results: list[PrefillResult | None] = [None] * len(requests)
        self._completions_s = [0.0] * len(requests)
        self.began_s = 0.0
        self.wall_s = 0.0
        self.foreign = 0.0
        self.before: EngineStats | None = None
        self.after: EngineStats | None = None

    async def submit(self, place: int, storm: _Storm | None = None) -> None:
        """Runs one request to its end."""
        request, began_s = self._requests[place], time.perf_counter()
        if storm is None:
            result = await self._engine.submit(request)
        else:
            result = await storm.submit(request)
        took_s = time.perf_counter() - began_s
        if result.finish_reason == "error" or (storm is None and result.finish_reason == "abort"):
            raise EngineDeadError(f"a request of the benchmark failed: {result.error}")
        self._completions_s[place], self._results[place] = took_s, result

    def finished(self) -> LoopRun:
        """What was measured."""
        results = tuple(result for result in self._results if result is not None)
        assert len(results) == len(self._requests), (len(results), len(self._requests))
        assert self.before is not None, "the run is over"
        assert self.after is not None, "the run is over"
        return LoopRun(
            wall_s=self.wall_s,
            completions_s=tuple(self._completions_s),
            results=results,
            before=self.before,
            after=self.after,
            foreign_cores=self.foreign,
            time_scale=self._engine.config.time_scale,
            expected=tuple(ask.expected for ask in self._asks),
        )


class _Storm:
    """Aborts about half of the requests, somewhere in their life."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine = engine
        self._rng = random.Random(seed)
        self._mean_s, self._count = FIRST_ABORTS_S / ABORT_WITHIN, 0

    async def submit(self, request: PrefillRequest) -> PrefillResult:
        """Runs a request to its end, or to its abort."""
        aborted = self._rng.random() < ABORT_SHARE
        drawn = self._rng.random() - ABORT_AT_ONCE
        # However fast the engine is and however late a timer, a storm aborts something.
        delay_s = max(0.0, drawn) / (1 - ABORT_AT_ONCE) * ABORT_WITHIN * self._mean_s
        began_s = time.perf_counter()
        work = asyncio.ensure_future(self._engine.submit(request))
        if aborted:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(work), delay_s)
            await self._engine.abort(request.request_id)
        result = await work
        if not aborted:
            self._count += 1
            self._mean_s += (time.perf_counter() - began_s - self._mean_s) / self._count
        return result


@asynccontextmanager
async def _timed(engine: Engine, asks: Sequence[Ask]) -> AsyncIterator[_Run]:
    """A run between two readings of the engine; the clock stops when the block ends."""
    requests = [await engine.request(ask.tokens) for ask in asks]  # type: ignore[arg-type]  # arrays are taken too
    run = _Run(engine, requests, asks)
    run.before, cpu, run.began_s = await engine.stats(), read_cpu(), time.perf_counter()
    yield run
    run.wall_s = time.perf_counter() - run.began_s
    run.foreign = foreign_cores(cpu, read_cpu(), run.wall_s)
    run.after = await engine.stats()


async def _all(clients: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Runs the clients; the first error of a request ends all."""
    try:
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client)
    except* WavePPError as errors:
        raise errors.exceptions[0] from None
