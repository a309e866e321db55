"""A closed loop: some clients, each with one request in flight, until all prompts are done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from wavepp.bench.load import foreign_cores, read_cpu
from wavepp.engine import Engine
from wavepp.errors import EngineDeadError, WavePPError
from wavepp.requests import EngineStats, PrefillResult


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopRun:
    """One timed run: results and completion times in prompt order, and the engine around it.

    Completion is from submission to the first token, queueing included, in seconds. Foreign cores
    are those that other processes kept busy meanwhile.
    """

    wall_s: float
    completions_s: tuple[float, ...]
    results: tuple[PrefillResult, ...]
    before: EngineStats
    after: EngineStats
    foreign_cores: float = 0.0

    @property
    def input_tokens(self) -> int:
        """Prompt tokens of all requests, cached ones included."""
        return sum(result.num_prompt_tokens for result in self.results)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were reused, not computed."""
        return sum(result.num_cached_tokens for result in self.results)


async def run_closed_loop(
    engine: Engine, prompts: Sequence[Sequence[int]], concurrency: int
) -> LoopRun:
    """Runs every prompt, `concurrency` at a time.

    Raises:
        EngineDeadError: a request failed; a benchmark of failures says nothing.
    """
    results: list[PrefillResult | None] = [None] * len(prompts)
    completions = [0.0] * len(prompts)
    places = iter(range(len(prompts)))

    async def client() -> None:
        for place in places:
            began = time.perf_counter()
            result = await engine.prefill(prompts[place])
            completions[place] = time.perf_counter() - began
            if result.finish_reason not in ("stop", "length"):
                raise EngineDeadError(f"a request of the benchmark failed: {result.error}")
            results[place] = result

    before, cpu, began = await engine.stats(), read_cpu(), time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(client())
    except* WavePPError as errors:
        raise errors.exceptions[0] from None
    wall_s = time.perf_counter() - began
    foreign = foreign_cores(cpu, read_cpu(), wall_s)
    after = await engine.stats()
    done = tuple(result for result in results if result is not None)
    assert len(done) == len(prompts), (len(done), len(prompts))
    return LoopRun(
        wall_s=wall_s,
        completions_s=tuple(completions),
        results=done,
        before=before,
        after=after,
        foreign_cores=foreign,
    )
