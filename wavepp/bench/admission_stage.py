"""What `wavepp bench admission` times on one stage: keys, probes, hints, leases, escrows, and every
hold of the tree mutex in the life of a request, over real stage caches.

    foresee    the walk before a claim, without the mutex
    one run    each prompt is held as one run of blocks
    N runs     each prompt parts from N - 1 others: its path is N runs
    hybrid     attention, sliding and recurrent windows, with snapshots along each prompt
    cold       nothing of the prompt is held; prompts that are idle are evicted for it
    leaves     the same, out of a cache that is full of prompts of one block
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from wavepp.bench.admission_load import (
    Lives,
    Load,
    attention_cache,
    fill,
    fork,
    hybrid_cache,
    part_of,
)
from wavepp.bench.stopwatch import Stopwatch, timed
from wavepp.cache.keys import join_keys, make_prompt, split_keys
from wavepp.cache.store import StageCache
from wavepp.cache.types import Prompt
from wavepp.units import RequestId

FORKED_MAX = 4
"""Prompts of N runs: each takes N - 1 others to build."""
PROBER = RequestId("prober")
BURST_PROBE = "probe: whole prompt held, one of a burst"


class Section(Protocol):
    """Something built once and timed in every repeat."""

    def repeat(self) -> None:
        """Takes one repeat's samples."""
        ...


SectionFactory = Callable[[Load, Stopwatch], Section]


class Discovery:
    """Keys, probes and leases of prompts that are held as one run each."""

    def __init__(self, load: Load, watch: Stopwatch) -> None:
        self._load, self._watch = load, watch
        self._prompts = load.prompts("held", load.concurrency)
        self._parts = [
            part_of(load, prompt, n, int(load.rng("part", n).integers(1, len(prompt.keys))))
            for n, prompt in enumerate(self._prompts)
        ]
        self._cache = attention_cache(load, units=(load.concurrency + 1) * load.blocks)
        fill(self._cache, load, self._prompts)
        self._lives = Lives(self._cache, load, "one run", watch)

    def repeat(self) -> None:
        """Takes one repeat's samples."""
        for prompt in self._prompts:
            self._discover(prompt)
        self._probe_burst()
        self._probe_warm("probe: whole prompt held, warm", self._prompts)
        self._probe_warm("probe: part of it held, warm", self._parts)
        for prompt in self._prompts:
            self._payload(prompt)
        lease(self._cache, self._prompts, "one run", self._watch)
        for prompt in self._prompts:
            self._lives.live(prompt)

    def _discover(self, prompt: Prompt) -> None:
        """Keys, and the first probe with them: neither they nor the index are in a near cache."""
        tokens, size, watch = prompt.tokens, self._load.block_size, self._watch
        made, wall_us, cpu_us = timed(lambda: make_prompt(tokens, size))
        hint, probe_wall_us, probe_cpu_us = timed(lambda: self._cache.hint(made))
        assert hint.reuse.attention == prompt.tail, hint
        watch.note("keys", wall_us, cpu_us)
        watch.note("probe: whole prompt held, after hashing", probe_wall_us, probe_cpu_us)
        watch.note("hint discovery", wall_us + probe_wall_us, cpu_us + probe_cpu_us)

    def _probe_burst(self) -> None:
        """A round's hints: the keys of all its prompts are there, then each is looked up once."""
        size = self._load.block_size
        made = [make_prompt(prompt.tokens, size) for prompt in self._prompts]
        for prompt in made:
            self._watch.time(BURST_PROBE, lambda: self._cache.hint(prompt))  # noqa: B023

    def _payload(self, prompt: Prompt) -> None:
        """What a stage does, whose keys come from the driver."""
        tokens, size, joined = prompt.tokens, self._load.block_size, join_keys(prompt.keys)

        def take() -> None:
            keys = split_keys(joined, len(prompt.keys))
            self._cache.hint(make_prompt(tokens, size, keys=keys))

        self._watch.time("payload and probe", take)

    def _probe_warm(self, name: str, prompts: list[Prompt]) -> None:
        """Each prompt's second probe in a row."""
        for prompt in prompts:
            self._cache.hint(prompt)
            self._watch.time(name, lambda: self._cache.hint(prompt))  # noqa: B023  # called at once


class Forked:
    """Prompts whose path is many runs."""

    def __init__(self, load: Load, watch: Stopwatch) -> None:
        self._watch = watch
        self._prompts = load.prompts("forked", min(load.concurrency, FORKED_MAX))
        self._cache = attention_cache(
            load, units=(len(self._prompts) + 1) * (load.blocks + load.runs)
        )
        fill(self._cache, load, self._prompts)
        for number, prompt in enumerate(self._prompts):
            fork(self._cache, load, prompt, number)
        self._case = f"{load.runs} runs"
        self._lives = Lives(self._cache, load, self._case, watch)
        self._rounds = -(-load.concurrency // len(self._prompts))

    def repeat(self) -> None:
        """Takes one repeat's samples."""
        for _ in range(self._rounds):
            lease(self._cache, self._prompts, self._case, self._watch)
            for prompt in self._prompts:
                self._lives.live(prompt)


class Hybrid:
    """Prompts with snapshots, held in windows of all kinds."""

    def __init__(self, load: Load, watch: Stopwatch) -> None:
        self._watch = watch
        self._prompts = load.prompts("hybrid", load.concurrency)
        self._cache = hybrid_cache(load, units=(load.concurrency + 1) * load.blocks)
        fill(self._cache, load, self._prompts)
        self._lives = Lives(self._cache, load, "hybrid", watch)

    def repeat(self) -> None:
        """Takes one repeat's samples."""
        lease(self._cache, self._prompts, "hybrid", self._watch)
        for prompt in self._prompts:
            self._lives.live(prompt)


class Cold:
    """Prompts that are not held, in a cache that is full of others: the pool holds half of all,
    so each is gone again when its turn comes."""

    def __init__(self, load: Load, watch: Stopwatch) -> None:
        self._watch = watch
        self._prompts = load.prompts("cold", 2 * load.concurrency)
        self._cache = attention_cache(load, units=load.concurrency * load.blocks)
        fill(self._cache, load, self._prompts)
        self._lives = Lives(self._cache, load, "cold", watch)
        self._next = 0

    def repeat(self) -> None:
        """Takes one repeat's samples."""
        count = len(self._prompts) // 2
        turn, self._next = self._prompts[self._next :][:count], count - self._next
        for prompt in turn:
            self._escrow(prompt)
        for prompt in turn:
            self._lives.live(prompt)

    def _escrow(self, prompt: Prompt) -> None:
        """All of the prompt is reserved, out of what other prompts hold."""
        cache, watch = self._cache, self._watch
        vote = cache.lease(PROBER, 1, prompt, 0)
        assert vote.endpoint == 0, vote
        outcome = watch.time("escrow prepare", lambda: cache.prepare(PROBER))
        assert outcome.refusal is None, outcome
        outcome = watch.time("escrow commit", lambda: cache.commit(PROBER, 0))
        assert outcome.committed, outcome
        watch.time("escrow release", lambda: cache.release_escrow(PROBER))
        cache.release_lease(PROBER)


class Leaves:
    """Prompts that are not held, in a cache that is full of prompts of one block."""

    def __init__(self, load: Load, watch: Stopwatch) -> None:
        self._load = load
        self._cache = attention_cache(load, units=load.blocks + 1)
        self._lives = Lives(self._cache, load, "leaves", watch)
        self._turn = 0

    def repeat(self) -> None:
        """Takes one repeat's sample: what is evicted has to be put there anew."""
        load, size = self._load, self._load.block_size
        self._cache.reset()
        tokens = load.draw("leaf", self._turn, (load.blocks + 1) * (size + 1))
        rows = tokens.reshape(load.blocks + 1, size + 1)
        fill(self._cache, load, [make_prompt(row, size) for row in rows])
        self._lives.live(make_prompt(load.draw("cold", self._turn), size))
        self._turn += 1


SECTIONS: tuple[SectionFactory, ...] = (Discovery, Forked, Hybrid, Cold, Leaves)


def lease(cache: StageCache, prompts: list[Prompt], case: str, watch: Stopwatch) -> None:
    """Walks and pins whole prompts, and lets them go."""
    for prompt in prompts:
        vote = watch.time(
            f"lease: {case}",
            lambda: cache.lease(PROBER, 1, prompt, prompt.reuse_cap),  # noqa: B023  # called at once
        )
        assert vote.endpoint == prompt.reuse_cap, vote
        watch.time(f"release: {case}", lambda: cache.release_lease(PROBER))
