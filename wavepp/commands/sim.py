"""`wavepp sim`: the simulator from the command line. Owns the wall clock; a simulation has none."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator

from wavepp.errors import ConfigError
from wavepp.sim.campaign import Campaign, Outcome, run_seed
from wavepp.sim.trace import HEADING

SECONDS_PER_MINUTE = 60.0
PROGRESS_S = 10.0


def run(seeds: str, minutes: float | None) -> bool:
    """Runs one seed with its trace, or many with a summary; True: nothing was wrong.

    Args:
        seeds: "7", or "0:200" for 0, 1, ..., 199.
        minutes: go on with the seeds after these until the time is over.

    Raises:
        ConfigError: no seeds, or no minutes.
    """
    first, end = parse_seeds(seeds)
    if minutes is not None and minutes <= 0:
        raise ConfigError(f"minutes {minutes:g} must be positive")
    if end is None and minutes is None:
        return _one(first)
    return _many(first, end, minutes)


def parse_seeds(text: str) -> tuple[int, int | None]:
    """A seed, or a range: (first, None) or (first, one after the last)."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if match is None:
        raise ConfigError(f"seeds {text!r}: write one seed (7) or a range (0:200)")
    first, end = int(match[1]), None if match[2] is None else int(match[2])
    if end is not None and end <= first:
        raise ConfigError(f"seeds {text!r}: the range is empty")
    return first, end


def _one(seed: int) -> bool:
    _print(HEADING)
    outcome = run_seed(seed, show=_print)
    campaign = Campaign()
    campaign.add(outcome)
    _print("")
    for line in campaign.summary():
        _print(line)
    _tell(outcome)
    return outcome.violation is None


def _many(first: int, end: int | None, minutes: float | None) -> bool:
    campaign = Campaign()
    started = told = time.monotonic()
    deadline = None if minutes is None else started + minutes * SECONDS_PER_MINUTE
    for seed in _seeds(first, end, deadline):
        outcome = run_seed(seed)
        campaign.add(outcome)
        _tell(outcome)
        if time.monotonic() - told > PROGRESS_S and sys.stderr.isatty():
            told = time.monotonic()
            sys.stderr.write(f"\r{campaign.seeds} seeds, {len(campaign.violations)} violations ")
    seconds = time.monotonic() - started
    for line in campaign.summary():
        _print(line)
    _print(f"time        {seconds:.1f} s, {campaign.events / seconds:,.0f} events/s")
    return not campaign.failed


def _seeds(first: int, end: int | None, deadline: float | None) -> Iterator[int]:
    """The range; with a deadline also what comes after it, until then."""
    seed = first
    while (end is not None and seed < end) or (
        deadline is not None and time.monotonic() < deadline
    ):
        yield seed
        seed += 1


def _tell(outcome: Outcome) -> None:
    if outcome.violation is not None:
        _print(f"seed {outcome.seed} after {outcome.events} events: {outcome.violation}")
        _print(f"  again, with every event: wavepp sim {outcome.seed}")


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
