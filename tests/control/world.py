"""DriverControl and stages run together without threads, asyncio or a clock, in any order that the
planes allow: rounds and waves reach each stage in an order of their own."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from checksum_executor import ChecksumExecutor, assert_served

from wavepp.actors.ports import Parcel
from wavepp.actors.stage import StageCore
from wavepp.cache.types import Reservation
from wavepp.config import EngineConfig
from wavepp.control.driver import DriverControl
from wavepp.control.facts import (
    AbortRequested,
    Arrival,
    Arrived,
    Effect,
    Finish,
    LaunchWave,
    RoundAnswered,
    SendRound,
    TellProduced,
    TimerFired,
    WaveCompleted,
)
from wavepp.control.options import CacheOptions, DriverOptions
from wavepp.control.work import Sampling
from wavepp.planner.factory import PlannerName
from wavepp.protocol.messages import Admit, RoundMessage, RoundReply, SpanPlan, WaveSchedule
from wavepp.protocol.votes import Claim
from wavepp.requests import PrefillResult
from wavepp.units import RequestId, align_down


class World:
    """One driver, P stages, and the messages between them."""

    def __init__(
        self,
        *,
        stages: int,
        block_size: int = 4,
        blocks: int = 16,
        wave_tokens: int = 8,
        ring_depth: int = 3,
        lanes: int = 4,
        headroom_waves: int = 0,
        host_blocks: int = 0,
        kinds: str = "",
        caching: bool = True,
        planner: PlannerName = "greedy",
        reservation: Reservation = "escrow",
        **options_more: Any,
    ) -> None:
        """`kinds`: letters of the checksum executor, repeated over the layers. Only `greedy` takes
        waves of any size; for the others they are rounded to blocks."""
        if planner != "greedy":
            wave_tokens = max(align_down(wave_tokens, block_size), block_size)
        config = EngineConfig(
            model="checksum",
            pipeline_parallel_size=stages,
            block_size=block_size,
            num_gpu_blocks_override=blocks,
            max_num_seqs=lanes,
            kv_offloading_size=float(host_blocks),
        )
        self.epoch, self.now = 1, 0.0
        self.ticks = 0.0  # a stage's look at the clock takes so long
        self.layers = stages
        self.kinds = (kinds * stages)[:stages]
        headroom = headroom_waves * wave_tokens
        caches = CacheOptions(
            slots=lanes,
            headroom_tokens=headroom,
            snapshot_interval=2 * block_size,
            max_snapshots_per_path=3,
            enable_prefix_caching=caching,
            reservation=reservation,
        )
        self.cores = [
            StageCore(ChecksumExecutor(config, stage, kinds=self.kinds), caches, clock=self._clock)
            for stage in range(stages)
        ]
        options = DriverOptions(
            ring_depth=ring_depth,
            wave_tokens_max=wave_tokens,
            max_num_seqs=lanes,
            headroom_tokens=headroom,
            planner=planner,
            reservation=reservation,
            **options_more,
        )
        self.config, self.caches, self.options = config, caches, options
        self.driver = DriverControl([core.facts for core in self.cores], options)
        self._clear_planes()
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.arrived = 0
        self.inner_ids: dict[str, RequestId] = {}  # of the latest request of that name
        self.results: dict[str, PrefillResult] = {}
        self.told: dict[str, list[int]] = {}
        self.spans: list[SpanPlan] = []
        self.admissions: list[Admit] = []
        self.claims: list[Claim] = []
        self.launches: list[LaunchWave] = []
        self._entries_seen = 0

    def _clear_planes(self) -> None:
        stages = len(self.cores)
        self.waves: list[deque[WaveSchedule]] = [deque() for _ in range(stages)]
        self.parcels: list[deque[Parcel]] = [deque() for _ in range(stages + 1)]
        self.rounds: list[RoundMessage | None] = [None] * stages
        self.replies: list[RoundReply] = []

    def _clock(self) -> float:
        self.now += self.ticks
        return self.now

    def arrive(
        self,
        user_id: str,
        prompt: Sequence[int],
        *,
        max_tokens: int = 1,
        scores: bool = False,
        salt: str = "",
    ) -> None:
        arrival = Arrival(
            user_id=user_id,
            token_ids=np.asarray(prompt, dtype=np.int64),
            max_tokens=max_tokens,
            sampling=Sampling(prompt_logprobs=1 if scores else None),
            namespace=salt,
            stream=True,
        )
        assert self.driver.refusal(arrival) is None
        self.results.pop(user_id, None)
        self.told[user_id] = []
        self.prompts[user_id] = (list(prompt), max_tokens)
        self.arrived += 1
        self.inner_ids[user_id] = RequestId(f"{user_id}#{self.arrived}")
        self._perform(self.driver.handle(Arrived(arrival=arrival), now=self.now))

    def abort(self, user_id: str) -> None:
        self._perform(self.driver.handle(AbortRequested(user_id=user_id), now=self.now))

    def lose(self, stage: int) -> None:
        """A stage's process is gone; the driver knows it, and waits for another."""
        self.driver.stop(f"stage {stage} died")
        self._clear_planes()
        self.lost = stage

    def go_on(self, *, blocks: int | None = None) -> None:
        """Another stage, of so many blocks, is in its place: the next epoch begins."""
        self.epoch += 1
        executor = ChecksumExecutor(self.config, self.lost, units=blocks, kinds=self.kinds)
        new = StageCore(executor, self.caches, epoch=self.epoch, clock=self._clock)
        self.cores = [
            new if stage == self.lost else core.successor(self.epoch)
            for stage, core in enumerate(self.cores)
        ]
        before = self.driver
        facts = [core.facts for core in self.cores]
        self.driver = DriverControl(facts, replace(self.options, epoch=self.epoch))
        self._entries_seen = 0
        self._perform(self.driver.take_over(before, now=self.now))

    def moves(self) -> list[Callable[[], None]]:
        """Everything that may happen next."""
        moves: list[Callable[[], None]] = []
        for stage in range(len(self.cores)):
            if self.rounds[stage] is not None:
                moves.append(lambda stage=stage: self.deliver_round(stage))
            if self.waves[stage] and (stage == 0 or self.parcels[stage]):
                moves.append(lambda stage=stage: self.run_wave(stage))
        if len(self.replies) == len(self.cores):
            moves.append(self.answer_round)
        if self.parcels[-1]:
            moves.append(self.complete_wave)
        if not moves and self.driver.next_timer is not None:
            moves.append(self.wait)
        return moves

    def wait(self) -> None:
        """Nothing happens until the timer."""
        timer = self.driver.next_timer
        assert timer is not None
        self.now = max(self.now, timer)
        self._perform(self.driver.handle(TimerFired(), now=self.now))

    def deliver_round(self, stage: int) -> None:
        message = self.rounds[stage]
        assert message is not None
        self.rounds[stage] = None
        self.replies.append(self.cores[stage].control.handle(message, now=self.now))

    def run_wave(self, stage: int) -> None:
        core = self.cores[stage]
        prepared = core.prepare(self.waves[stage].popleft())
        parcel = core.forward(prepared, self.parcels[stage].popleft() if stage else None)
        assert parcel.fatal is None, parcel.fatal
        self.parcels[stage + 1].append(parcel)

    def hold_round(self) -> None:
        """The round that is out, from end to end."""
        for stage in range(len(self.cores)):
            self.deliver_round(stage)
        self.answer_round()

    def answer_round(self) -> None:
        replies, self.replies = tuple(self.replies), []
        self._perform(self.driver.handle(RoundAnswered(replies=replies), now=self.now))

    def complete_wave(self) -> None:
        parcel = self.parcels[-1].popleft()
        fact = WaveCompleted(
            epoch=parcel.epoch,
            wave=parcel.wave,
            outputs=parcel.outputs,
            errors=parcel.errors,
            acks=tuple(report.ack for report in parcel.reports),
            stage_seconds=tuple(report.busy_s for report in parcel.reports),
        )
        self._perform(self.driver.handle(fact, now=self.now))

    def step(self, rng: random.Random) -> bool:
        """One move; False: nothing can happen any more."""
        moves = self.moves()
        if not moves:
            return False
        self.now += 0.001
        rng.choice(moves)()
        self.driver.check()
        for core in self.cores:
            core.control.check()
        return True

    def drain(self, rng: random.Random | None = None) -> None:
        """Runs until nothing moves, and sees that nothing is left and every result is right."""
        rng = rng or random.Random(0)
        for _ in range(100_000):
            if not self.step(rng):
                break
        else:
            raise AssertionError("no end")
        self.check_idle()
        for user_id, result in self.results.items():
            self.check_result(user_id, result)

    def check_idle(self) -> None:
        assert self.driver.num_live == 0, self.driver.num_live
        assert not self.driver.is_busy
        self.driver.check()
        for core in self.cores:
            assert core.control.is_idle
            assert core.control.cache.leftovers() is None
            core.control.check()

    def check_result(self, user_id: str, result: PrefillResult) -> None:
        prompt, max_tokens = self.prompts[user_id]
        if result.finish_reason in ("length", "stop"):
            assert_served(result, prompt, self.layers, max_tokens, kinds=self.kinds)
        else:
            assert result.token_ids == ()

    def _perform(self, effects: list[Effect]) -> None:
        self._see_admissions()
        for effect in effects:
            match effect:
                case LaunchWave(schedule=schedule):
                    self.launches.append(effect)
                    self.spans.extend(schedule.spans)
                    for queue in self.waves:
                        queue.append(schedule)
                case SendRound(messages=messages):
                    assert self.rounds == [None] * len(self.cores)
                    self.rounds = list(messages)
                    self.claims.extend(messages[0].ask.claims)
                case TellProduced(user_id=user_id, produced=produced):
                    self.told[user_id].append(produced.token_id)
                case Finish(user_id=user_id, result=result):
                    assert user_id not in self.results
                    if result.token_ids:  # the last one is told with the result
                        assert self.told[user_id] == list(result.token_ids[:-1])
                    self.results[user_id] = result

    def _see_admissions(self) -> None:
        for entry in self.driver.log.unacked():
            if entry.number <= self._entries_seen:
                continue
            self._entries_seen = entry.number
            if isinstance(entry.decision, Admit):
                self.admissions.append(entry.decision)

    def first_admissions(self) -> list[int]:
        """Serial numbers in the order in which requests were admitted for the first time."""
        return _serials(admit.request_id for admit in self.admissions)

    def first_claims(self) -> list[int]:
        """Serial numbers in the order in which requests were given a lease for the first time."""
        return _serials(claim.request_id for claim in self.claims)


def _serials(names: Iterable[RequestId]) -> list[int]:
    return list(dict.fromkeys(int(name.rpartition("#")[2]) for name in names))
