"""Made prompts, the same for the same seed.

cold    every prompt is its own
reuse   a shared prefix (one of a few), then a suffix of its own
mixed   every second prompt is a reuse one, the others are cold
storm   reuse, of which about half are aborted
trace   the requests of a file, see `trace_file.py`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from wavepp.bench.closed_loop import Ask
from wavepp.errors import ConfigError
from wavepp.units import align_down
from wavepp.validation import nearest

WorkloadName = Literal["cold", "reuse", "mixed", "storm", "trace"]
WORKLOADS: tuple[WorkloadName, ...] = get_args(WorkloadName)
SPECIAL_TOKENS = 3  # ids below this are often padding, begin and end: not drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What prompts look like.

    Attributes:
        prompt_len: tokens in a prompt.
        reuse_frac: the share of a prompt that is a shared prefix (cut to whole blocks).
    """

    prompt_len: int
    vocab_size: int
    block_size: int
    reuse_frac: float = 0.9
    num_prefixes: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.vocab_size <= SPECIAL_TOKENS:
            raise ConfigError(f"a vocabulary of {self.vocab_size} tokens is too small to draw from")

    @property
    def prefix_len(self) -> int:
        """Tokens in a shared prefix: whole blocks, and at least one token is left to compute."""
        wanted = min(int(self.prompt_len * self.reuse_frac), self.prompt_len - 1)
        return align_down(wanted, self.block_size)


def parse_workloads(text: str) -> tuple[WorkloadName, ...]:
    """The workloads of a comma-separated list.

    Raises:
        ConfigError: one is unknown.
    """
    names: list[WorkloadName] = []
    for part in text.split(","):
        known = [name for name in WORKLOADS if name == part.strip()]
        if not known:
            raise ConfigError(
                f"workload {part.strip()!r} is not one of {', '.join(WORKLOADS)}"
                f"{nearest(part.strip(), WORKLOADS)}"
            )
        names += known
    return tuple(names)


def shares_prefixes(name: WorkloadName) -> bool:
    """Whether its prompts begin with prefixes that are to be cached before."""
    return name in ("reuse", "mixed", "storm")


def prefixes(shape: Shape) -> list[list[int]]:
    """The shared prefixes: the same for all runs of a shape."""
    return [_draw(shape, shape.prefix_len, "prefix", place) for place in range(shape.num_prefixes)]


def asks(name: WorkloadName, shape: Shape, count: int, run: int) -> list[Ask]:
    """The requests of one timed run of a made workload; every run number has its own."""
    made = []
    for place, tokens in enumerate(prompts(name, shape, count, run)):
        shared = name != "cold" and not (name == "mixed" and place % 2 == 0)
        made.append(Ask(tokens=tokens, expected=shape.prefix_len if shared else 0))
    return made


def arriving(made: Sequence[Ask], rate: float, seed: int) -> list[Ask]:
    """The same requests, arriving at random: `rate` a second, with exponential gaps."""
    rng = np.random.Generator(np.random.PCG64(seed))
    times = np.cumsum(rng.exponential(1.0 / rate, size=len(made)))
    return [replace(ask, at_s=float(at_s)) for ask, at_s in zip(made, times, strict=True)]


def prompts(name: WorkloadName, shape: Shape, count: int, run: int) -> list[list[int]]:
    """The prompts of one timed run; every run number has its own.

    Returns:
        `count` prompts of `shape.prompt_len` token ids each.
    """
    shared = prefixes(shape) if name != "cold" else []
    made = []
    for place in range(count):
        if name == "cold" or (name == "mixed" and place % 2 == 0):
            made.append(_draw(shape, shape.prompt_len, f"{name}-whole-{run}", place))
            continue
        prefix = shared[place % len(shared)]
        suffix_len = shape.prompt_len - len(prefix)
        made.append(prefix + _draw(shape, suffix_len, f"{name}-suffix-{run}", place))
    return made


def _draw(shape: Shape, length: int, stream: str, place: int) -> list[int]:
    """Token ids that depend on the seed, the stream's name and the place, and nothing else."""
    key = [shape.seed, place, *stream.encode()]
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))
    drawn: list[int] = rng.integers(SPECIAL_TOKENS, shape.vocab_size, size=length).tolist()
    return drawn
