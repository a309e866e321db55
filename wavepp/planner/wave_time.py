"""How long a wave takes on each stage: a linear model, fitted while waves run or read from a file.

Owns: the coefficients and their fit. May not: measure (it is told seconds), or cut waves. Goes
beyond the paper, which counts tokens only; the loss it reports for long reused prefixes is why.

    t = c0 + c1 * tokens + c2 * context        per stage, all coefficients >= 0

`tokens` is the sum of span lengths; `context` the sum over the wave's tokens of the positions each
attends to, itself included: for a span [s, s+l) that is l*s + l*(l+1)/2.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wavepp.errors import ConfigError
from wavepp.planner.demand import SpanLike

FORGETTING = 0.98
"""Weight of the past at each new sample: about 50 samples count, so drift is followed."""

PULL = 1e-4
"""Strength of the pull towards the start, against a sum of scaled squares of 1: enough that noise
of some per cent in equal waves does not pass for a large constant.
"""

CONSTANT_SHARE = 0.03
"""Of the work of M tokens, what a wave's constant is taken for until samples tell: waves of one
size never do, and a constant taken for nothing would call for ever smaller waves.
"""

LEAST_SHARE = 0.01
"""Of the seconds per token seen: what a token costs at least."""

COEFFICIENTS = ("c0", "c1", "c2")


def span_context(start: int, length: int) -> int:
    """Sum of attended positions over tokens [start, start + length)."""
    return length * start + length * (length + 1) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveLoad:
    """What a wave's time depends on."""

    tokens: int
    context: int

    @classmethod
    def of(cls, spans: Iterable[SpanLike]) -> WaveLoad:
        """The load of these spans together."""
        tokens = context = 0
        for span in spans:
            tokens += span.length
            context += span_context(span.start, span.length)
        return cls(tokens=tokens, context=context)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """One stage's coefficients, in seconds (a wave, a token, a token of context)."""

    c0: float
    c1: float
    c2: float

    def seconds(self, load: WaveLoad) -> float:
        """Predicted time of a wave."""
        return self.c0 + self.work_seconds(load)

    def work_seconds(self, load: WaveLoad) -> float:
        """The part of it that grows with the work."""
        return self.c1 * load.tokens + self.c2 * load.context

    def tokens_within(self, start: int, seconds: float) -> int:
        """Most tokens from `start` on whose work fits in so many seconds: the root of
        c2/2 l^2 + (c1 + c2 (s + 1/2)) l = seconds, rounded down.
        """
        if seconds <= 0:
            return 0
        half, slope = self.c2 / 2, self.c1 + self.c2 * (start + 0.5)
        if slope <= 0:
            return 0
        root = 2 * seconds / (slope + math.sqrt(slope * slope + 4 * half * seconds))
        return int(root)


def assumed_costs(wave_tokens_max: int, token_s: float = 1.0) -> StageCosts:
    """What is taken for true until samples tell: a small constant, and so many seconds a token."""
    return StageCosts(c0=CONSTANT_SHARE * wave_tokens_max * token_s, c1=token_s, c2=0.0)


class StageFit:
    """Recursive least squares with forgetting for one stage; coefficients stay non-negative.

    Samples are weighted by 1/t^2: relative errors count, so short waves are fitted as well as long
    ones, and a wave that took ten times its due counts no more than one that took no time.
    Directions that the samples say nothing about are held by a weak pull towards the start: the
    coefficients given, else what is assumed, at the rate seen.
    """

    def __init__(self, start: StageCosts | None = None, *, wave_tokens_max: int) -> None:
        self._start = start
        self._wave_tokens_max = wave_tokens_max
        self._gram = [[0.0] * 3 for _ in range(3)]
        self._moment = [0.0] * 3
        self._seconds = 0.0  # sums with forgetting: of seconds, of tokens, of samples
        self._tokens = 0.0
        self._weight = 0.0
        self._costs = start
        self.num_samples = 0

    @property
    def costs(self) -> StageCosts | None:
        """The coefficients now; None before the first sample of a fit that started from nothing."""
        if self._costs is None and self.num_samples > 0:
            self._costs = self._solve()
        return self._costs

    def add(self, load: WaveLoad, seconds: float) -> None:
        """A wave of this load took so many seconds. Samples of no time are ignored."""
        if seconds <= 0 or load.tokens <= 0:
            return
        row = (1.0 / seconds, load.tokens / seconds, load.context / seconds)
        for i in range(3):
            self._moment[i] = FORGETTING * self._moment[i] + row[i]
            for j in range(3):
                self._gram[i][j] = FORGETTING * self._gram[i][j] + row[i] * row[j]
        self._seconds = FORGETTING * self._seconds + seconds
        self._tokens = FORGETTING * self._tokens + load.tokens
        self._weight = FORGETTING * self._weight + 1.0
        self.num_samples += 1
        self._costs = None

    def _solve(self) -> StageCosts:
        """Normal equations in scaled unknowns, plus the pull, over the best non-negative subset."""
        start = self._start or self._assumed()
        scale = [math.sqrt(self._gram[i][i]) for i in range(3)]
        gram = [
            [self._gram[i][j] / (scale[i] * scale[j]) + PULL * (i == j) for j in range(3)]
            for i in range(3)
        ]
        given = (start.c0, start.c1, start.c2)
        moment = [self._moment[i] / scale[i] + PULL * given[i] * scale[i] for i in range(3)]
        c0, c1, c2 = (
            found / unit
            for found, unit in zip(_least_squares_nonnegative(gram, moment), scale, strict=True)
        )
        if c1 == 0 and c2 == 0:  # all constant, by the samples; but work is never for nothing
            c1 = LEAST_SHARE * self._seconds / self._tokens
        return StageCosts(c0=c0, c1=c1, c2=c2)

    def _assumed(self) -> StageCosts:
        """The assumption that gives the mean time seen."""
        constants = CONSTANT_SHARE * self._wave_tokens_max * self._weight
        return assumed_costs(self._wave_tokens_max, self._seconds / (self._tokens + constants))


class WaveTimeModel:
    """The stages' costs, and which of them is the slowest for some work."""

    def __init__(self, stages: Sequence[StageCosts | None], *, wave_tokens_max: int) -> None:
        assert stages, "a pipeline has at least one stage"
        self._wave_tokens_max = wave_tokens_max
        self._fits = [StageFit(costs, wave_tokens_max=wave_tokens_max) for costs in stages]

    @property
    def costs(self) -> tuple[StageCosts | None, ...]:
        """Per stage; None: nothing is known of it yet."""
        return tuple(fit.costs for fit in self._fits)

    def add(self, load: WaveLoad, stage_seconds: Sequence[float]) -> None:
        """A wave's busy time on each stage, first stage first."""
        assert len(stage_seconds) == len(self._fits), (len(stage_seconds), len(self._fits))
        for fit, seconds in zip(self._fits, stage_seconds, strict=True):
            fit.add(load, seconds)

    def slowest(self, load: WaveLoad) -> StageCosts:
        """The costs of the stage that would take longest for such a wave."""
        known = [costs for costs in self.costs if costs is not None]
        if not known:
            return assumed_costs(self._wave_tokens_max)
        return max(known, key=lambda costs: costs.seconds(load))


def fit_stage(samples: Iterable[tuple[WaveLoad, float]]) -> StageCosts:
    """Coefficients from a recorded profile, all samples counting alike in relative error.

    Raises:
        ConfigError: no usable sample.
    """
    gram = [[0.0] * 3 for _ in range(3)]
    moment = [0.0] * 3
    for load, seconds in samples:
        if seconds <= 0:
            continue
        row = (1.0 / seconds, load.tokens / seconds, load.context / seconds)
        for i, j in itertools.product(range(3), range(3)):
            gram[i][j] += row[i] * row[j]
        moment = [old + new for old, new in zip(moment, row, strict=True)]
    scale = [math.sqrt(gram[i][i]) for i in range(3)]
    if min(scale) == 0:
        raise ConfigError("wave times: no sample with tokens and a time above 0")
    scaled = [[gram[i][j] / (scale[i] * scale[j]) for j in range(3)] for i in range(3)]
    best = _least_squares_nonnegative(scaled, [moment[i] / scale[i] for i in range(3)])
    return StageCosts(c0=best[0] / scale[0], c1=best[1] / scale[1], c2=best[2] / scale[2])


def parse_stage_costs(document: Mapping[str, Any]) -> tuple[StageCosts, ...]:
    """Costs from a file's content: {"stages": [{"c0": s, "c1": s, "c2": s}, ...]}, one a stage.

    Raises:
        ConfigError: something is missing, unknown or negative; it is named.
    """
    entries = document.get("stages")
    if set(document) != {"stages"} or not isinstance(entries, list) or not entries:
        raise ConfigError("wave times: expected one key, 'stages', with a list of coefficients")
    return tuple(_parse_costs(index, entry) for index, entry in enumerate(entries))


def _parse_costs(index: int, entry: object) -> StageCosts:
    if not isinstance(entry, Mapping) or set(entry) != set(COEFFICIENTS):
        raise ConfigError(f"wave times, stage {index}: expected c0, c1 and c2, got {entry!r}")
    for name in COEFFICIENTS:
        value = entry[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"wave times, stage {index}: {name} {value!r} is no number")
        if not 0 <= value < math.inf:
            raise ConfigError(f"wave times, stage {index}: {name} {value!r} is not in [0, inf)")
    if entry["c1"] == 0 and entry["c2"] == 0:
        raise ConfigError(f"wave times, stage {index}: c1 and c2 are both 0")
    return StageCosts(c0=float(entry["c0"]), c1=float(entry["c1"]), c2=float(entry["c2"]))


def _least_squares_nonnegative(gram: list[list[float]], moment: list[float]) -> list[float]:
    """Minimises x'Gx/2 - m'x over x >= 0 for three unknowns, by trying every support."""
    best, best_value = [0.0, 0.0, 0.0], 0.0
    supports = [subset for size in (3, 2, 1) for subset in itertools.combinations(range(3), size)]
    for support in supports:
        solved = _solve_symmetric(gram, moment, support)
        if solved is None or min(solved) < 0:
            continue
        value = -sum(moment[i] * x for i, x in zip(support, solved, strict=True)) / 2
        if value < best_value:
            best_value = value
            best = [0.0, 0.0, 0.0]
            for i, x in zip(support, solved, strict=True):
                best[i] = x
        if len(support) == 3:
            break  # the unconstrained optimum is allowed, so it is the best
    return best


def _solve_symmetric(
    gram: list[list[float]], moment: list[float], support: tuple[int, ...]
) -> list[float] | None:
    """Gaussian elimination on the rows and columns of `support`; None: (nearly) singular."""
    rows = [[gram[i][j] for j in support] + [moment[i]] for i in support]
    size = len(support)
    for i in range(size):  # symmetric positive: no pivoting needed
        if rows[i][i] <= 1e-12:
            return None
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [a - factor * b for a, b in zip(rows[k], rows[i], strict=True)]
    solved = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solved[j] for j in range(i + 1, size))
        solved[i] = (rows[i][size] - known) / rows[i][i]
    return solved
