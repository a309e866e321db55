"""What `wavepp bench admission` times of the whole protocol: the real driver and the real stages,
in memory, without a network. Bursts of requests arrive, rounds are answered at once, waves compute
nothing.

    whole held     the same prompts again
    90 % held      they begin as held ones do
    cold           nothing of them is held: every stage promises what others hold idly

Owns: the order of messages, and whose time is whose. May not: decide; DriverControl and
StageControl do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import TracebackType

import numpy as np

from wavepp.bench.admission_load import VOCAB_SIZE, Load, part_of
from wavepp.bench.stopwatch import Stopwatch, Timer, timed
from wavepp.cache.types import Prompt
from wavepp.control.driver import DriverControl
from wavepp.control.facts import (
    AbortRequested,
    Arrival,
    Arrived,
    Fact,
    Finish,
    LaunchWave,
    RoundAnswered,
    SendRound,
    WaveCompleted,
)
from wavepp.control.options import CacheOptions, DriverOptions
from wavepp.control.stage import StageControl
from wavepp.control.work import GroupFacts, Sampling, StageFacts
from wavepp.protocol.messages import RoundMessage, WaveSchedule
from wavepp.units import StageIndex, ceil_div

HELD_SHARE = 0.9
NOW = 0.0
"""Nothing here waits for a time."""


class HoldMeter:
    """The tree mutex of a stage that has one caller: notes how long it would be held."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._timer = Timer()
        self.phase = "rounds"

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watch.note(f"one hold, in {self.phase}", *self._timer.stop())


class Admissions:
    """A pipeline in memory that admits bursts of requests."""

    def __init__(self, load: Load, watch: Stopwatch) -> None:
        self._load, self._watch = load, watch
        headroom = 2 * load.stages * load.wave_tokens
        facts = [_facts(load, stage) for stage in range(load.stages)]
        options = DriverOptions(
            ring_depth=2 * load.stages,
            wave_tokens_max=load.wave_tokens,
            max_num_seqs=load.concurrency,
            headroom_tokens=headroom,
        )
        cache = CacheOptions(slots=load.concurrency, headroom_tokens=headroom)
        self._driver = DriverControl(facts, options)
        self._locks = [HoldMeter(watch) for _ in facts]
        self._stages = [
            StageControl(fact, cache, tree_lock=lock)
            for fact, lock in zip(facts, self._locks, strict=True)
        ]
        self._rounds: deque[tuple[RoundMessage, ...]] = deque()
        self._waves: deque[WaveSchedule] = deque()
        self._names = 0
        self._answered = 0  # rounds
        self._driver_us = np.zeros(2)  # wall, CPU; of the current burst
        self._stage_us = np.zeros((load.stages, 2))
        self._critical_us = np.zeros(2)  # driver, and in each round the slowest stage
        self._held = load.prompts("held", load.concurrency)
        kept = int(HELD_SHARE * load.prompt_len) // load.block_size
        self._parts = [part_of(load, p, n, kept) for n, p in enumerate(self._held)]
        self._cold = load.prompts("cold", load.concurrency)
        self._burst("fill", self._held)
        self._drain()

    def repeat(self) -> None:
        """Takes one repeat's samples."""
        self._measure("whole held", self._held)
        self._drain()
        for case, prompts in ((f"{HELD_SHARE:.0%} held", self._parts), ("cold", self._cold)):
            for name in self._measure(case, prompts):
                self._tell(AbortRequested(user_id=name))
            self._drain()

    def _measure(self, case: str, prompts: Sequence[Prompt]) -> list[str]:
        """Admits a burst and notes whose time it took, divided by the requests."""
        rounds, count = self._driver.rounds.number, len(prompts)
        names, waited = self._burst(case, prompts)
        watch, per_stage = self._watch, self._stage_us.mean(axis=0)
        for what, spent in (
            ("driver", self._driver_us),
            ("one stage", per_stage),
            ("in all", self._critical_us),
        ):
            watch.note(f"admission, {case}: {what}", *(spent / count).tolist())
        watch.number(f"admission, {case}: rounds, at most", max(waited))
        watch.number(f"admission, {case}: rounds held", self._driver.rounds.number - rounds)
        return names

    def _burst(self, case: str, prompts: Sequence[Prompt]) -> tuple[list[str], list[int]]:
        """Requests that arrive together, until all are admitted: (names, for each the rounds that
        began after it came)."""
        for spent in (self._driver_us, self._stage_us, self._critical_us):
            spent[:] = 0.0
        began: dict[str, int] = {}
        admitted: dict[str, int] = {}
        for prompt in prompts:
            self._names += 1
            name = f"{case} {self._names}"
            began[name] = self._driver.rounds.number
            self._tell(Arrived(arrival=_arrival(name, prompt)))
        while len(admitted) < len(prompts):
            if self._rounds:
                self._round()
            else:
                self._wave()  # its requests' ends make room
            for record in self._driver.leader.admitted:
                name = record.request_id.rpartition("#")[0]
                admitted.setdefault(name, self._answered)
        return list(began), [admitted[name] - began[name] for name in began]

    def _drain(self) -> None:
        while self._rounds or self._waves:
            if self._rounds:
                self._round()
            else:
                self._wave()
        self._driver.check()
        for stage in self._stages:
            assert stage.is_idle, "a drained stage is idle"
            assert not stage.violations, stage.violation

    def _tell(self, fact: Fact) -> None:
        effects, wall_us, cpu_us = timed(lambda: self._driver.handle(fact, now=NOW))
        self._driver_us += (wall_us, cpu_us)
        self._critical_us += (wall_us, cpu_us)
        for effect in effects:
            match effect:
                case SendRound(messages=messages):
                    self._rounds.append(messages)
                case LaunchWave(schedule=schedule):
                    self._waves.append(schedule)
                case Finish(result=result):
                    assert result.finish_reason in ("length", "abort"), result

    def _round(self) -> None:
        messages, replies, slowest = self._rounds.popleft(), [], np.zeros(2)
        for stage, message in zip(self._stages, messages, strict=True):
            reply, *spent = timed(lambda: stage.handle(message, now=NOW))  # noqa: B023  # called at once
            self._stage_us[stage.stage] += spent
            slowest = np.maximum(slowest, spent)
            replies.append(reply)
        self._critical_us += slowest
        self._answered += 1
        self._tell(RoundAnswered(replies=tuple(replies)))

    def _wave(self) -> None:
        schedule = self._waves.popleft()
        for lock in self._locks:
            lock.phase = "waves"
        acks = tuple(stage.finished(stage.prepare(schedule), ()) for stage in self._stages)
        for lock in self._locks:
            lock.phase = "rounds"
        self._tell(WaveCompleted(wave=schedule.wave, outputs=(), errors=(), acks=acks))


def _facts(load: Load, stage: int) -> StageFacts:
    """A stage that holds all prompts of a burst beside the headroom, whatever that is."""
    units = ceil_div(4 * load.concurrency * (load.blocks + 1), 3)
    return StageFacts(
        stage=StageIndex(stage),
        layers=(stage, stage + 1),
        block_size=load.block_size,
        vocab_size=VOCAB_SIZE,
        max_model_len=load.prompt_len,
        groups=(GroupFacts(name="attention", kind="attention", units=units, bytes_per_unit=1),),
    )


def _arrival(name: str, prompt: Prompt) -> Arrival:
    tokens = prompt.tokens.astype(np.int64)
    return Arrival(user_id=name, token_ids=tokens, max_tokens=0, sampling=Sampling())
