"""A pipeline under a virtual clock: the real planners, a linear cost model, a closed loop of users.

Every wave takes costs[s].seconds(load) on stage s; a stage runs one wave at a time, in order; at
most R waves are in flight; at most `lanes` requests are admitted, each `admission_s` after it could
be. Prefixes are given (reuse is a start position), so nothing but planning is modelled.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from wavepp.planner.demand import Demand, newest_chunks
from wavepp.planner.factory import PlannerOptions, make_planner
from wavepp.planner.packing import Cut, Piece
from wavepp.planner.planner import Planner
from wavepp.planner.ring import Ring
from wavepp.planner.wave_time import StageCosts, WaveLoad
from wavepp.units import RequestId, WaveNumber


@dataclass(frozen=True, slots=True)
class Prompt:
    """[0, reused) is cached, [reused, total) is to be computed."""

    total: int
    reused: int = 0


@dataclass(slots=True)
class Job:
    serial: int
    prompt: Prompt
    arrived_s: float
    planned: int
    computed: int
    done_s: float | None = None

    @property
    def request_id(self) -> RequestId:
        return RequestId(f"r{self.serial}")


@dataclass(slots=True)
class Outcome:
    """What a run came to. Seconds are virtual."""

    wall_s: float
    prompt_tokens: int
    latencies_s: list[float]
    busy_s: list[float]
    wave_tokens: list[int] = field(default_factory=list)
    schedules: list[tuple[Cut, ...]] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.prompt_tokens / self.wall_s

    @property
    def busy_share(self) -> float:
        return min(self.busy_s) / self.wall_s

    def latency(self, quantile: float) -> float:
        ordered = sorted(self.latencies_s)
        return ordered[min(int(quantile * len(ordered)), len(ordered) - 1)]


class VirtualPipeline:
    def __init__(
        self,
        planner: Planner,
        costs: Sequence[StageCosts],
        *,
        ring_depth: int,
        lanes: int = 16,
        admission_s: float = 0.01,
        transfer_s: float = 0.0,
    ) -> None:
        self.planner = planner
        self.costs = costs
        self.ring: Ring[tuple[Cut, ...]] = Ring(ring_depth)
        self.lanes = lanes
        self.admission_s = admission_s
        self.transfer_s = transfer_s
        self.now = 0.0
        self.turn = 0
        self.waiting: deque[Job] = deque()
        self.entering: list[Job] = []
        self.admitted: dict[RequestId, Job] = {}
        self._free_s = [0.0] * len(costs)
        self._times: dict[WaveNumber, list[float]] = {}
        self._events: list[tuple[float, int, str, object]] = []
        self._sequence = 0
        self.outcome = Outcome(0.0, 0, [], [0.0] * len(costs))

    def run(self, prompts: Sequence[Prompt], *, concurrency: int) -> Outcome:
        """All prompts, `concurrency` users sending the next one as soon as theirs is done."""
        queue = deque(enumerate(prompts))
        for _ in range(min(concurrency, len(queue))):
            self._push(0.0, "arrive", None)
        while self._events:
            self.now, _, kind, what = heapq.heappop(self._events)
            if kind == "arrive" and queue:
                serial, prompt = queue.popleft()
                self.waiting.append(
                    Job(serial, prompt, self.now, planned=prompt.reused, computed=prompt.reused)
                )
                self.turn += 1
            elif kind == "admit":
                assert isinstance(what, Job)
                self.entering.remove(what)
                self.admitted[what.request_id] = what
            elif kind == "done":
                assert isinstance(what, int)
                self._complete(WaveNumber(what))
                self.turn += 1
            self._turn()
        assert not self.admitted, "work was left over"
        assert not self.waiting, "work was left over"
        self.outcome.wall_s = self.now
        return self.outcome

    def _push(self, at: float, kind: str, what: object) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (at, self._sequence, kind, what))

    def _turn(self) -> None:
        while self.waiting and len(self.admitted) + len(self.entering) < self.lanes:
            job = self.waiting.popleft()
            self.entering.append(job)
            self._push(self.now + self.admission_s, "admit", job)
        while self.ring.has_room and self._plan():
            pass

    def demand(self) -> Demand:
        jobs = sorted(self.admitted.values(), key=lambda job: job.serial)
        pieces = tuple(
            Piece(
                request_id=job.request_id,
                start=job.planned,
                remaining=job.prompt.total - job.planned,
            )
            for job in jobs
            if job.planned < job.prompt.total
        )
        return Demand(
            pieces=pieces,
            chunks=newest_chunks(self.ring),
            ring_waves=len(self.ring),
            turn=self.turn,
            in_admission=len(self.entering),
            behind=len(self.waiting),
        )

    def _plan(self) -> bool:
        plan = self.planner.plan(self.demand(), now=self.now)
        if plan.wait_until is not None:
            assert plan.wait_until > self.now
            self._push(plan.wait_until, "wake", None)
        if not plan.cuts:
            return False
        number = self.ring.next_number
        for cut in plan.cuts:
            job = self.admitted[cut.request_id]
            assert job.planned == cut.start, (job.planned, cut)
            job.planned += cut.length
        self.planner.launched(number, plan.cuts, now=self.now)
        self.ring.launch(number, plan.cuts)
        self._execute(number, plan.cuts)
        return True

    def _execute(self, number: WaveNumber, cuts: tuple[Cut, ...]) -> None:
        load = WaveLoad.of(cuts)
        at = self.now
        times = []
        for stage, costs in enumerate(self.costs):
            seconds = costs.seconds(load)
            at = max(at, self._free_s[stage]) + seconds
            self._free_s[stage] = at
            self.outcome.busy_s[stage] += seconds
            times.append(seconds)
            at += self.transfer_s
        self._times[number] = times
        self.outcome.wave_tokens.append(load.tokens)
        self.outcome.schedules.append(cuts)
        self._push(at, "done", number)

    def _complete(self, number: WaveNumber) -> None:
        cuts = self.ring.complete(number)
        self.planner.timed(number, self._times.pop(number))
        for cut in cuts:
            job = self.admitted[cut.request_id]
            assert job.computed == cut.start, (job.computed, cut)
            job.computed += cut.length
            if job.computed == job.prompt.total:
                del self.admitted[cut.request_id]
                self.outcome.prompt_tokens += job.prompt.total
                self.outcome.latencies_s.append(self.now - job.arrived_s)
                self._push(self.now, "arrive", None)


def simulate(
    name: str,
    prompts: Sequence[Prompt],
    *,
    concurrency: int,
    costs: Sequence[StageCosts],
    wave_tokens_max: int = 16384,
    wave_tokens_min: int = 8192,
    block_size: int = 64,
    lanes: int = 16,
    admission_s: float = 0.01,
    known_costs: bool = False,
) -> Outcome:
    """One planner on one workload, R = 2P, F = 2."""
    num_stages = len(costs)
    options = PlannerOptions(
        wave_tokens_max=wave_tokens_max,
        wave_tokens_min=wave_tokens_min,
        block_size=block_size,
        num_stages=num_stages,
        ring_depth=2 * num_stages,
        stage_costs=costs if known_costs else None,
    )
    pipeline = VirtualPipeline(
        make_planner(name, options),
        costs,
        ring_depth=2 * num_stages,
        lanes=lanes,
        admission_s=admission_s,
    )
    return pipeline.run(prompts, concurrency=concurrency)
