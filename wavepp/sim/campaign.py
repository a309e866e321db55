"""One seed, or many: worlds are drawn, run, and summed up.

Owns: the sums, and checker 13 (coverage): over many seeds every move of the lifecycle table is
taken. May not: know a clock; whoever runs it measures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash

from wavepp.protocol.states import Edge, all_edges
from wavepp.sim.checkers import CHECKERS
from wavepp.sim.draw import draw_world
from wavepp.sim.violation import Violation
from wavepp.sim.world import World

COVERAGE_SEEDS = 200
"""A campaign this long takes every move of the lifecycle table, or is a violation itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one seed. `violation`: None, or what a checker saw."""

    seed: int
    events: int
    simulated_s: float
    answers: Counter[str]
    edges: Counter[Edge]
    faults: Counter[str]
    digest: str
    violation: str | None = None


def run_seed(seed: int, *, show: Callable[[str], None] | None = None) -> Outcome:
    """Runs one seed's world to its end, or to the first violation.

    Args:
        show: where its trace lines go.
    """
    options, jobs = draw_world(seed)
    world = World(options, seed=seed, checkers=CHECKERS, show=show)
    for job in jobs:
        world.submit(job)
    violation = None
    try:
        world.run()
    except Violation as found:
        violation = str(found)
    answers = Counter(result.finish_reason for result in world.results.values())
    return Outcome(
        seed=seed,
        events=world.clock.events,
        simulated_s=world.clock.now,
        answers=Counter[str](answers) + Counter(f"refused, {w}" for w in world.refusals.values()),
        edges=world.edges,
        faults=world.faults_seen,
        digest=world.trace.digest,
        violation=violation,
    )


@dataclass(slots=True)
class Campaign:
    """The sum of many outcomes."""

    seeds: int = 0
    events: int = 0
    simulated_s: float = 0.0
    answers: Counter[str] = field(default_factory=Counter)
    edges: Counter[Edge] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    violations: dict[int, str] = field(default_factory=dict)
    _digest: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)

    def add(self, outcome: Outcome) -> None:
        """One more."""
        self.seeds += 1
        self.events += outcome.events
        self.simulated_s += outcome.simulated_s
        self.answers += outcome.answers
        self.edges += outcome.edges
        self.faults += outcome.faults
        self._digest.update(f"{outcome.seed} {outcome.digest}\n".encode())
        if outcome.violation is not None:
            self.violations[outcome.seed] = outcome.violation

    @property
    def digest(self) -> str:
        """Of all digests, in order."""
        return self._digest.hexdigest()

    @property
    def missing(self) -> list[str]:
        """Moves of the lifecycle table that nobody took."""
        gone = all_edges() - set(self.edges)
        return sorted(f"{phase.value} -{event.value}->" for phase, event in gone)

    @property
    def failed(self) -> bool:
        """Somebody saw something, or a long campaign left a move out."""
        return bool(self.violations) or (self.seeds >= COVERAGE_SEEDS and bool(self.missing))

    def summary(self) -> list[str]:
        """For people."""
        total = len(all_edges())
        lines = [
            f"seeds       {self.seeds:,}, {self.simulated_s:,.0f} s of simulated time",
            f"requests    {_counts(self.answers)}",
            f"lifecycle   {total - len(self.missing)} of {total} moves taken",
            *(f"            never: {move}" for move in self.missing),
            f"faults      {_counts(self.faults)}",
            f"digest      {self.digest}",
            f"violations  {len(self.violations)}",
        ]
        return lines


def _counts(counter: Counter[str]) -> str:
    pairs = sorted(counter.items(), key=lambda pair: (-pair[1], pair[0]))
    return f"{sum(counter.values()):,}: " + ", ".join(f"{name} {n:,}" for name, n in pairs)
