"""Traces of requests: read from a file, turned into prompts; and a generator of sample traces.

Owns: the line format, which is Mooncake's, one JSON object a line:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

`timestamp` in milliseconds; `hash_ids` name blocks of 512 tokens, equal ids are equal blocks, and a
block stands for everything before it too. Token ids are drawn from the block's id, so equal blocks
have equal tokens. `output_length` is ignored: one token is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wavepp.bench.closed_loop import Ask
from wavepp.bench.workloads import SPECIAL_TOKENS
from wavepp.errors import ConfigError
from wavepp.units import align_down, ceil_div

TRACE_BLOCK = 512
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLine:
    """One request of a trace."""

    timestamp_ms: float
    input_length: int
    hash_ids: tuple[int, ...]


def read_trace_file(path: Path, limit: int | None = None) -> list[TraceLine]:
    """The first `limit` requests of a file, in order of arrival.

    Raises:
        ConfigError: the file can't be read, or a line is no request; file and line are named.
    """
    try:
        with path.open(encoding="utf-8") as file:
            lines = [
                _parse(path, number, text)
                for number, text in zip(_numbers(limit), file, strict=False)
                if text.strip()
            ]
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"trace {path}: not a text file") from None
    if not lines:
        raise ConfigError(f"trace {path}: holds no request")
    return sorted(lines, key=lambda line: line.timestamp_ms)


def trace_asks(
    lines: Sequence[TraceLine], *, vocab_size: int, block_size: int, seed: int, scale: float
) -> list[Ask]:
    """The requests with their prompts.

    Args:
        scale: how many times faster than recorded they arrive.
    """
    first_ms, seen = lines[0].timestamp_ms, set[int]()
    blocks: dict[int, Int32Array] = {}
    made = []
    for line in lines:
        for block in line.hash_ids:
            if block not in blocks:
                blocks[block] = _tokens(block, vocab_size, seed)
        known = next((n for n, b in enumerate(line.hash_ids) if b not in seen), len(line.hash_ids))
        seen.update(line.hash_ids)
        tokens = np.concatenate([blocks[block] for block in line.hash_ids])[: line.input_length]
        reusable = min(known * TRACE_BLOCK, line.input_length - 1)
        made.append(
            Ask(
                tokens=tokens,
                expected=align_down(reusable, block_size),
                at_s=(line.timestamp_ms - first_ms) / 1000.0 / scale,
            )
        )
    return made


def sample_trace(count: int, seed: int) -> Iterator[str]:
    """Lines of a made trace: conversations that grow turn by turn, behind one of a few long system
    prompts. Arrivals are Poisson, a second apart on average."""
    rng = np.random.Generator(np.random.PCG64(seed))
    fresh = iter(range(1 << 30))
    systems = [_take(fresh, int(rng.integers(2, 9))) for _ in range(4)]
    talks: list[list[int]] = []
    at_ms = 0.0
    for _ in range(count):
        at_ms += rng.exponential(1000.0)
        if talks and rng.random() < 0.6:
            talk = talks[-1 - min(int(rng.exponential(6.0)), len(talks) - 1)]
        else:
            talk = list(systems[int(rng.integers(len(systems)))])
            talks.append(talk)
        talk += _take(fresh, 1 + int(rng.exponential(4.0)))
        length = len(talk) * TRACE_BLOCK - int(rng.integers(TRACE_BLOCK))
        yield json.dumps(
            {
                "timestamp": round(at_ms),
                "input_length": length,
                "output_length": 1,
                "hash_ids": talk,
            }
        )
        if length % TRACE_BLOCK:
            talk[-1] = next(fresh)  # the next turn fills this block with something else


def _take(numbers: Iterator[int], count: int) -> list[int]:
    return [next(numbers) for _ in range(count)]


def _numbers(limit: int | None) -> Iterator[int]:
    """Line numbers, as many as are wanted."""
    number = 0
    while limit is None or number < limit:
        number += 1
        yield number


def _parse(path: Path, number: int, text: str) -> TraceLine:
    try:
        record: Any = json.loads(text)
        line = TraceLine(
            timestamp_ms=float(record["timestamp"]),
            input_length=int(record["input_length"]),
            hash_ids=tuple(int(block) for block in record["hash_ids"]),
        )
    except (ValueError, TypeError, KeyError) as error:
        told = f"{type(error).__name__}: {error}"
        raise ConfigError(f"trace {path}: line {number} is no request ({told})") from None
    if line.input_length < 1 or len(line.hash_ids) < ceil_div(line.input_length, TRACE_BLOCK):
        raise ConfigError(
            f"trace {path}: line {number}: {len(line.hash_ids)} blocks of {TRACE_BLOCK} tokens for "
            f"input_length {line.input_length}"
        )
    return line


def _tokens(block: int, vocab_size: int, seed: int) -> Int32Array:
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, block])))
    return rng.integers(SPECIAL_TOKENS, vocab_size, size=TRACE_BLOCK, dtype=np.int32)
