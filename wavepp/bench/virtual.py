"""A pipeline of emulated devices under a virtual clock: benchmarks that a busy machine cannot bend.

Driver and stages are the real machines with real caches, as in `wavepp sim`; waves take what the
cost model says; messages take a drawn time about the means below; copies take none. Seconds are
virtual, so equal seeds give equal rows. What the runtime itself costs (threads, Ray, Python) is not
in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from wavepp.actors.driver import driver_options
from wavepp.bench.closed_loop import Ask, LoopRun
from wavepp.config import EngineConfig
from wavepp.control.options import cache_groups
from wavepp.emulated.stage_model import StageModel, build_stage_model
from wavepp.errors import ConfigError, EngineDeadError
from wavepp.requests import EngineStats, PrefillResult, StageStats
from wavepp.sim.options import VOCABULARY, Job, StageOptions, WorldOptions
from wavepp.sim.times import WaveTime
from wavepp.sim.world import World

ROUND_DELAY_S = 1e-3
"""Mean time of a round's message, one way; of a wave's schedule or activations, besides bytes."""
WAVE_DELAY_S = 3e-4

ABSENT = ("driver_cores", "stage_cores", "foreign_cores", "driver_bound")
"""Fields of a row that only a real machine has."""


def stage_models(config: EngineConfig) -> tuple[StageModel, ...]:
    """All stages of a configuration.

    Raises:
        ConfigError: the device is not emulated, or the cost model can't be used.
    """
    if config.device != "emulated":
        raise ConfigError(f"device {config.device}: the virtual clock is for emulated devices")
    return tuple(build_stage_model(config, n) for n in range(config.pipeline_parallel_size))


class VirtualEngine:
    """One pipeline, empty at first; runs go on where the one before has ended."""

    def __init__(
        self, config: EngineConfig, models: Sequence[StageModel], *, seed: int = 0
    ) -> None:
        self.config = config
        self.models = models
        self.world = World(world_options(config, models), seed=seed)
        self.world.after_finish = self._finished
        self._asks: Sequence[Ask] = ()
        self._serial = 0
        self._first = 0  # serial of the run's first request
        self._next = 0
        self._left = 0
        self._refill = False

    @property
    def vocab_size(self) -> int:
        """Tokens are below it."""
        return VOCABULARY

    def closed_loop(self, asks: Sequence[Ask], concurrency: int) -> LoopRun:
        """All requests, `concurrency` in flight."""
        return self._run(asks, min(concurrency, len(asks)), refill=True)

    def open_loop(self, asks: Sequence[Ask]) -> LoopRun:
        """All requests, each at its time."""
        return self._run(asks, len(asks), refill=False)

    def waves(self) -> list[list[WaveTime]]:
        """Of each stage, all waves so far."""
        return [list(stage.times.waves) for stage in self.world.stages]

    def _run(self, asks: Sequence[Ask], at_once: int, *, refill: bool) -> LoopRun:
        self._asks, self._refill = asks, refill
        self._first, self._next, self._left = self._serial, 0, len(asks)
        began_s, before = self.world.clock.now, self._stats()
        for _ in range(at_once):
            self._submit(began_s)
        while self._left:
            if not self.world.step():
                raise EngineDeadError(f"{self._left} requests were never answered")
        ended_s, after = self.world.clock.now, self._stats()
        results = [self._result(self._first + place) for place in range(len(asks))]
        return LoopRun(
            wall_s=ended_s - began_s,
            completions_s=tuple(_took_s(result) for result in results),
            results=tuple(results),
            before=before,
            after=after,
            expected=tuple(ask.expected for ask in asks),
        )

    def _submit(self, at_s: float) -> None:
        ask = self._asks[self._next]
        self._next += 1
        tokens = np.asarray(ask.tokens, dtype=np.int32)
        arrives_s = at_s if self._refill else at_s + ask.at_s  # clients ask when they can
        job = Job(name=f"r{self._serial}", at_s=arrives_s, tokens=tokens)
        self._serial += 1
        self.world.submit(job)

    def _finished(self, job: Job) -> None:
        self._left -= 1
        del self.world.texts[self.world.names[job.name]]
        if self._refill and self._next < len(self._asks):
            self._submit(self.world.clock.now)

    def _result(self, serial: int) -> PrefillResult:
        result = self.world.results[f"r{serial}"]
        if result.finish_reason == "error":
            raise EngineDeadError(f"a request of the benchmark failed: {result.error}")
        return result

    def _stats(self) -> EngineStats:
        world, driver = self.world, self.world.driver
        counters, tally = driver.counters, driver.leader.books.tally
        now = world.clock.now
        return EngineStats(
            requests_waiting=driver.num_live - len(driver.leader.admitted),
            requests_running=len(driver.leader.admitted),
            requests_finished=counters.finished,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            computed_tokens=counters.computed_tokens,
            waves=driver.ring.completed,
            ring_depth=driver.ring.depth,
            ring_occupancy=len(driver.ring),
            wall_s=now,
            rounds=driver.rounds.number,
            capacity_refusals=tally.no_room,
            rolled_back=tally.rolled_back,
            deferred=tally.deferred,
            stages=tuple(self._stage_stats(index, now) for index in range(len(world.stages))),
            wave_tokens=tuple(world.wave_tokens),
        )

    def _stage_stats(self, index: int, now: float) -> StageStats:
        times = self.world.stages[index].times
        return StageStats(
            stage=index,
            layers=self.models[index].facts.layers,
            busy_s=times.busy_s,
            wait_s={
                "no_wave": times.no_wave_s,
                "activation": times.activation_s,
                "sending": times.sending_s,
            },
            idle_s=max(now - times.until_s, 0.0),
            waves=len(times.waves),
        )


def _took_s(result: PrefillResult) -> float:
    """From arrival to the first token."""
    assert result.timings.done_s is not None, "it was answered"
    return result.timings.done_s - result.timings.queued_s


def world_options(config: EngineConfig, models: Sequence[StageModel]) -> WorldOptions:
    """The pipeline of a configuration, in a simulation's words.

    Raises:
        ConfigError: the file of wave times can't be used.
    """
    driver = driver_options(config)
    named = {field.name for field in fields(WorldOptions)}
    shared = {f.name: getattr(driver, f.name) for f in fields(driver) if f.name in named}
    return WorldOptions(
        stages=tuple(_stage(config, model) for model in models),
        block_size=config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        round_delay_s=ROUND_DELAY_S,
        wave_delay_s=WAVE_DELAY_S,
        **shared,
    )


def _stage(config: EngineConfig, model: StageModel) -> StageOptions:
    return StageOptions(
        groups=cache_groups(model.facts),
        costs=model.costs,
        head_s=model.head_s,
        link_s=model.link_s,
        link_token_s=model.carry_bytes / model.link_bytes_per_s,
        snapshot_interval=config.snapshot_interval,
        max_snapshots_per_path=config.max_snapshots_per_path,
    )
