"""Waves of equal time on the slowest stage: the policy that counts in seconds instead of tokens.

Owns: the time one wave may take, and the room of a wave counted in time. May not: measure, or pack.
Goes beyond the paper, which counts tokens only and loses to static packing where context is long.

Legend: P stages; M, b_min largest and smallest budget; S waves wanted (budget.py); c0 the constant
of a wave's time; V the work in the pipeline (admitted and not done), in seconds of the slowest
stage without the constants; v the work of one wave; c requests with work; g how unequal they are.

MPU gives the most that a wave may take, M, and the least, b_min; between them a wave gets what
costs the slowest stage least:

    loss(v) = (1 + c0 / v) * (max(1, m (1/c + (P-1) v / V)) + g (P-1) v / V)
               constants      waves too few for P stages   what long waves cost besides

1/c + (P-1)/n is the share of a stage's time for n = V/v waves of c requests that each come back for
more when they are through: n waves, then P-1 to pass the other stages; m leaves time for the next
request to be admitted. g has two parts. V/H stands for filling and draining: every other stage
idles for the longest wave once while H is computed, the work from one emptiness of the pipeline to
the next. H is not known. It is taken to be some times the work known of: V, and that of requests
that wait; more times where V is more than the pipeline needs, and more with what was computed since
it was empty. The other part grows with how unequal requests are: a long wave blocks short ones.
`best_wave_work` is the v of least loss.

What filling and draining costs is settled by the longest wave since the pipeline was empty:
shorter ones after it win nothing back. So while it is not empty, v stays as long as it was, or what
it would be with H as long as it may be, if that is less.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from wavepp.planner.budget import WaveGoals
from wavepp.planner.demand import Chunk, Demand
from wavepp.planner.packing import Cut, Piece, TokenRoom
from wavepp.planner.sizing import WaveSize, packing_rules
from wavepp.planner.wave_time import StageCosts, WaveLoad, WaveTimeModel, span_context
from wavepp.units import RequestId, WaveNumber

HORIZON_LEAST, HORIZON_MOST = 4.5, 25.0
"""Bounds of H, in V; the lower one in the work known of."""

PLENTY = 2.75
"""Where V makes more than so many times the waves wanted, of M tokens, H is as much longer."""

MARGIN = 1.15
"""m."""

HORIZON_GROWTH = 1.7
"""Between them, H for each second of work since the pipeline was empty."""

SPREAD_PER_VARIATION = 0.10
"""Of g, for each unit of the squared coefficient of variation of request sizes. All six numbers
were chosen on the virtual pipeline of the tests and on the cells of `docs/results.md`.
"""

SPREAD_WINDOW = 64
"""Requests over which sizes are compared."""

SHORT = 1.5
"""A piece shorter than so many of the shortest tails is not cut."""

FINEST = 4
"""V is cut into no more than so many times the waves that MPU wants."""

STRETCH = 1.1
"""A piece that is longer than the wave's time by no more than this factor is not cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineWork:
    """What `best_wave_work` weighs. Seconds are those of the slowest stage.

    Attributes:
        seconds: V. requests: c, at least 1. spread: g.
    """

    seconds: float
    requests: int
    spread: float


def best_wave_work(work: PipelineWork, *, constant_s: float, num_stages: int) -> float:
    """The v of least loss (module docstring), in seconds; V itself on one stage.

    Args:
        constant_s: c0.
    """
    others = num_stages - 1
    if others == 0:
        return work.seconds
    few = constant_s * work.seconds / (work.requests * (1 + work.spread / MARGIN) * others)
    # n waves of this keep P stages busy
    enough = work.seconds * max(0.0, 1 / MARGIN - 1 / work.requests) / others
    if few >= enough * enough:
        return math.sqrt(few)
    return min(enough, math.sqrt(constant_s * work.seconds / (work.spread * others)))


class Requests:
    """The requests in the pipeline, whole: what they had to compute when they were admitted. And
    how unequal the ones seen last were.
    """

    def __init__(self) -> None:
        self._sizes: deque[int] = deque(maxlen=SPREAD_WINDOW)
        self._spans: dict[RequestId, Chunk] = {}

    def __len__(self) -> int:
        return len(self._spans)

    def observe(self, demand: Demand) -> None:
        """Takes in requests that are new, or start anew, and forgets those that are gone."""
        present: dict[RequestId, Chunk] = {}
        for chunk in demand.chunks:
            present[chunk.request_id] = self._spans.get(chunk.request_id, chunk)
        for piece in demand.pieces:
            known = self._spans.get(piece.request_id)
            if known is None or piece.start < known.start:
                self._sizes.append(piece.remaining)
                known = Chunk(
                    request_id=piece.request_id, start=piece.start, length=piece.remaining
                )
            present[piece.request_id] = known
        self._spans = present

    @property
    def load(self) -> WaveLoad:
        """All of them together."""
        return WaveLoad.of(self._spans.values())

    @property
    def spread(self) -> float:
        """The part of g that grows with how unequal they are."""
        count = len(self._sizes)
        if count == 0:
            return 0.0
        mean = sum(self._sizes) / count
        variance = sum((size - mean) ** 2 for size in self._sizes) / count
        return SPREAD_PER_VARIATION * variance / (mean * mean)


class TimeRoom:
    """Room for `seconds` of work on one stage, and for no more than `tokens_max` tokens.

    The first piece, when it is longer, is cut into equal times, not into full waves and a rest. A
    part of it has its wave alone: parts of others would make their own unequal, and short pieces
    that pass it again and again would hold long ones up.
    """

    def __init__(
        self, costs: StageCosts, *, seconds: float, tokens_max: int, tokens_min: int
    ) -> None:
        self._costs = costs
        self._seconds = seconds
        self._used = 0.0
        self._is_cut = False
        self._tokens_left = tokens_max
        self._tokens_min = tokens_min

    def tokens_for(self, piece: Piece) -> int:
        """What fits by time and by tokens; a wave that holds nothing takes at least `tokens_min`
        of what there is; one that holds a part of its first piece, nothing more.
        """
        if self._is_cut:
            return 0
        work = self._costs.work_seconds(_load_of_piece(piece))
        most = self._seconds * STRETCH
        too_short_to_cut = self._used == 0 and piece.remaining < SHORT * self._tokens_min
        if self._used + work <= most or too_short_to_cut:
            return min(piece.remaining, self._tokens_left)
        if self._used > 0:
            fitting = self._costs.tokens_within(piece.start, self._seconds - self._used)
            return min(fitting, self._tokens_left)
        part = work / math.ceil(work / most)
        fitting = self._costs.tokens_within(piece.start, part * (1 + 1e-9))
        return min(max(fitting, self._tokens_min), self._tokens_left)

    def take(self, cut: Cut) -> None:
        """The span is in the wave."""
        load = WaveLoad(tokens=cut.length, context=span_context(cut.start, cut.length))
        self._is_cut = self._is_cut or (self._used == 0 and not cut.final)
        self._tokens_left -= cut.length
        self._used += self._costs.work_seconds(load)
        assert self._tokens_left >= 0, self._tokens_left

    @property
    def is_half_full(self) -> bool:
        """At least half of the time is taken."""
        return 2 * self._used >= self._seconds


class BalancedSizing:
    """Waves of equal time, as long as costs least."""

    def __init__(self, goals: WaveGoals, costs: Sequence[StageCosts] | None = None) -> None:
        self.goals = goals
        self.model = WaveTimeModel(
            costs if costs is not None else [None] * goals.num_stages,
            wave_tokens_max=goals.ladder[0],
        )
        self._requests = Requests()
        self._launched: deque[tuple[WaveNumber, WaveLoad]] = deque(maxlen=goals.ring_depth)
        self._since_empty = WaveLoad(tokens=0, context=0)
        self._proposed = self._longest = 0.0  # v, in waves of M tokens: costs may be learned anew

    def size(self, demand: Demand) -> WaveSize:
        """The time of least loss, at most M tokens."""
        self._requests.observe(demand)
        if demand.ring_waves == 0:
            self._since_empty = WaveLoad(tokens=0, context=0)
            self._longest = 0.0
        top = self.goals.ladder[0]
        load = self._requests.load
        costs = self.model.slowest(load)
        seconds = self._wave_work(demand, load, costs)
        start = demand.pieces[0].start
        full = WaveLoad(tokens=top, context=span_context(start, top))
        if seconds >= costs.work_seconds(full):
            rules = packing_rules(self.goals, top, fills_up=False)
            return WaveSize(budget=top, room=TokenRoom(top), rules=rules)
        budget = max(costs.tokens_within(start, seconds), self.goals.wave_tokens_min)
        rules = packing_rules(self.goals, budget, fills_up=False)
        least = max(rules.tail_tokens_min, self.goals.block_size)  # else cuts fall inside blocks
        room = TimeRoom(costs, seconds=seconds, tokens_max=top, tokens_min=least)
        return WaveSize(budget=budget, room=room, rules=rules)

    def decided(self, wave: WaveNumber, cuts: Sequence[Cut]) -> None:
        """Remembers what the wave holds while it may be in the ring."""
        load = WaveLoad.of(cuts)
        self._launched.append((wave, load))
        self._longest = max(self._longest, self._proposed)
        self._since_empty = WaveLoad(
            tokens=self._since_empty.tokens + load.tokens,
            context=self._since_empty.context + load.context,
        )

    def timed(self, wave: WaveNumber, stage_seconds: Sequence[float]) -> None:
        """Feeds the model."""
        for number, load in self._launched:
            if number == wave:
                self.model.add(load, stage_seconds)

    def _wave_work(self, demand: Demand, load: WaveLoad, costs: StageCosts) -> float:
        """v: of least loss, or as it was since the pipeline was empty; but no more than 4S waves.

        Requests about to be admitted count too, as if they were like those that are: the first of
        a burst is not cut as if it were alone.
        """
        requests = len(self._requests) + demand.in_admission
        seconds = costs.work_seconds(load) * requests / len(self._requests)
        top = self.goals.ladder[0]
        full = costs.work_seconds(WaveLoad(tokens=top, context=span_context(0, top)))
        plenty = max(1.0, seconds / (PLENTY * self.goals.waves_wanted * full))
        known_of = 1 + demand.behind / requests
        grown = HORIZON_GROWTH * costs.work_seconds(self._since_empty) / seconds
        horizon = min(max(HORIZON_LEAST * plenty * known_of, grown), HORIZON_MOST)

        def best(horizon: float) -> float:
            spread = 1 / horizon + self._requests.spread
            work = PipelineWork(seconds=seconds, requests=requests, spread=spread)
            return best_wave_work(work, constant_s=costs.c0, num_stages=self.goals.num_stages)

        found = max(best(horizon), min(self._longest * full, best(HORIZON_MOST)))
        self._proposed = found / full
        return max(found, seconds / (FINEST * self.goals.waves_wanted))


def _load_of_piece(piece: Piece) -> WaveLoad:
    return WaveLoad(tokens=piece.remaining, context=span_context(piece.start, piece.remaining))
