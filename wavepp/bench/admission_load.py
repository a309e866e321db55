"""The prompts and the stage caches that `wavepp bench admission` measures on.

Owns: what prompts look like, the pools, and the life of one request on one stage, in the very holds
of the tree mutex that a stage takes for it. No network and no executor: blocks are published as if
they had been computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from wavepp.bench.stopwatch import Stopwatch, timed
from wavepp.cache.keys import make_prompt
from wavepp.cache.store import StageCache
from wavepp.cache.types import CacheConfig, GroupSpec, Int32Array, Prompt
from wavepp.planner.snapshots import SnapshotWants, place_snapshots
from wavepp.units import RequestId, ceil_div

T = TypeVar("T")

FIRST_TOKEN, VOCAB_SIZE = 3, 128_000
WAVE_TOKENS = 16_384
SNAPSHOT_INTERVAL_BLOCKS = 256
SNAPSHOTS_PER_PROMPT = 16
SLIDING_WINDOW = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Prompts of one length, so many at a time.

    Attributes:
        runs: runs of a forked prompt's path.
        stages: of the pipeline that admits.
    """

    prompt_len: int
    concurrency: int
    block_size: int
    runs: int
    stages: int
    seed: int

    @property
    def blocks(self) -> int:
        """Blocks of one prompt."""
        return ceil_div(self.prompt_len, self.block_size)

    @property
    def wave_tokens(self) -> int:
        """Tokens in a span of a cold prompt: whole blocks."""
        return max(WAVE_TOKENS // self.block_size, 1) * self.block_size

    def rng(self, stream: str, number: int) -> np.random.Generator:
        """Random numbers that depend on seed, stream and number only."""
        key = [self.seed, number, *stream.encode()]
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))

    def draw(self, stream: str, number: int, length: int | None = None) -> Int32Array:
        """Tokens, int32 [length]; a prompt's length unless said."""
        count = self.prompt_len if length is None else length
        rng = self.rng(stream, number)
        return rng.integers(FIRST_TOKEN, VOCAB_SIZE, count, dtype=np.int32)

    def prompts(self, stream: str, count: int) -> list[Prompt]:
        """Distinct prompts with their keys."""
        return [make_prompt(self.draw(stream, n), self.block_size) for n in range(count)]


def part_of(load: Load, prompt: Prompt, number: int, blocks: int) -> Prompt:
    """A prompt that begins with so many blocks of another one, and goes on otherwise."""
    kept = prompt.tokens[: blocks * load.block_size]
    own = load.draw("own", number, load.prompt_len - len(kept))
    return make_prompt(np.concatenate([kept, own]), load.block_size)


def attention_cache(load: Load, *, units: int) -> StageCache:
    """An empty cache of one attention window."""
    return _cache(load, (GroupSpec(name="attention", kind="attention", units=units),))


def hybrid_cache(load: Load, *, units: int) -> StageCache:
    """An empty cache of all three kinds of windows."""
    snapshots = (SNAPSHOTS_PER_PROMPT + 1) * load.concurrency
    groups = (
        GroupSpec(name="attention", kind="attention", units=units),
        GroupSpec(name="sliding", kind="sliding", units=units, window=SLIDING_WINDOW),
        GroupSpec(name="state", kind="recurrent", units=snapshots),
    )
    return _cache(load, groups)


def _cache(load: Load, groups: tuple[GroupSpec, ...]) -> StageCache:
    config = CacheConfig(
        block_size=load.block_size,
        groups=groups,
        slots=load.concurrency,
        snapshot_interval=SNAPSHOT_INTERVAL_BLOCKS * load.block_size,
        max_snapshots_per_path=SNAPSHOTS_PER_PROMPT,
    )
    # Real locks, as a running stage has them.
    locks = [threading.Lock() for _ in range(config.hint_shards)]
    return StageCache(config, shard_locks=locks)


class Lives:
    """Lets requests live on one stage, one after another, and times every hold of its tree mutex.

    Args:
        case: what the requests meet; part of the samples' names.
        watch: gets the samples.
    """

    def __init__(self, cache: StageCache, load: Load, case: str, watch: Stopwatch) -> None:
        self.cache = cache
        self._load = load
        self._case = case
        self._watch = watch
        self._served = 0
        self._longest = (0.0, 0.0)  # wall and CPU microseconds, of the current request
        self._snapshots = any(not group.paged for group in cache.config.groups)

    def live(self, prompt: Prompt) -> None:
        """One request: hint, walk, claim, materialise, publish span by span, free."""
        cache = self.cache
        self._served += 1
        self._longest = (0.0, 0.0)
        name = RequestId(f"{self._case} {self._served}")
        limit = cache.hint(prompt).reuse.highest(prompt.reuse_cap)
        seen = self._watch.time(
            f"foresee, unlocked: {self._case}", lambda: cache.foresee(prompt, limit)
        )
        vote = self._hold("claim", lambda: cache.claim(name, 1, prompt, limit, foresight=seen))
        assert vote.committed, vote
        assert vote.endpoint == limit, (vote, limit)
        self._hold("materialize", lambda: cache.materialize(name))
        self._watch.time(f"settle, unlocked: {self._case}", cache.settle)
        for start, end in self._spans(limit, prompt.num_tokens):
            self._compute(name, prompt, start, end)
        self._hold("free", lambda: cache.free(name))
        self._watch.note(f"longest hold: {self._case}", *self._longest)

    def _spans(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        step = self._load.wave_tokens
        return ((at, min(at + step, end)) for at in range(start, end, step))

    def _compute(self, name: RequestId, prompt: Prompt, start: int, end: int) -> None:
        """One span, snapshots included, without computing anything."""
        cache, positions = self.cache, self._positions(prompt, start, end)
        if positions:
            self._hold("snapshot orders", lambda: cache.snapshot_orders(name, positions))

        def publish() -> None:
            cache.publish(name, end)
            for position in positions:
                cache.snapshot_taken(name, position)

        self._hold("publish", publish)

    def _positions(self, prompt: Prompt, start: int, end: int) -> Sequence[int]:
        if not self._snapshots:
            return ()
        config = self.cache.config
        wants = SnapshotWants(interval=config.snapshot_interval, exact=(prompt.tail,))
        length = end - start
        places = place_snapshots(
            start, length, wants, block_size=config.block_size, step=config.block_size
        )
        return places.positions(start, length)

    def _hold(self, what: str, action: Callable[[], T]) -> T:
        result, wall_us, cpu_us = timed(action)
        self._watch.note(f"{what}: {self._case}", wall_us, cpu_us)
        self._longest = (max(self._longest[0], wall_us), max(self._longest[1], cpu_us))
        return result


def fill(cache: StageCache, load: Load, prompts: Sequence[Prompt]) -> None:
    """Lets the cache hold these prompts, each as one run, and nothing pinned."""
    lives = Lives(cache, load, "fill", Stopwatch())
    for prompt in prompts:
        lives.live(prompt)


def fork(cache: StageCache, load: Load, prompt: Prompt, number: int) -> None:
    """Cuts a held prompt's path into `load.runs` runs: so many others part from it, each with one
    block of its own."""
    size = load.block_size
    last = len(prompt.keys) - 1
    cuts = sorted({1 + last * run // load.runs for run in range(load.runs - 1)})
    rng = load.rng("fork", number)
    others = []
    for cut in cuts:
        own = rng.integers(FIRST_TOKEN, VOCAB_SIZE, size + 1, dtype=np.int32)
        tokens = np.concatenate([prompt.tokens[: cut * size], own])
        keys = [*prompt.keys[:cut], rng.bytes(len(prompt.keys[0]))]
        others.append(make_prompt(tokens, size, keys=keys))
    fill(cache, load, others)
