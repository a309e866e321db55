"""Chained block keys and namespaces.

    H_0 = h(root || namespace),  H_i = h(H_(i-1) || tokens of block i)

A key names a whole prefix. Keys are hints: the tree compares the tokens themselves, so a
collision costs time and never gives wrong state. `root` is a constant, alike in every process.
Paper, section on admission (keys outside the mutex).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from wavepp.cache.types import Prompt

ROOT = b"wavepp/block-keys/1"
LENGTH_BYTES = 8

Hash = Callable[[bytes], bytes]


def encode_namespace(salt: str | None = None, *parts: str) -> bytes:
    """The namespace of a salt and whatever else changes what a token means (an adapter),
    unambiguously.

    Every part is preceded by its length, so ("ab", "c") and ("a", "bc") differ. No salt is the
    empty salt. Trailing empty parts are the same as absent ones.
    """
    named = [salt or "", *parts]
    while named and not named[-1]:
        named.pop()
    encoded = bytearray()
    for part in named:
        data = part.encode("utf-8", "surrogatepass")
        encoded += len(data).to_bytes(LENGTH_BYTES, "little")
        encoded += data
    return bytes(encoded)


def chain_keys(
    raw: bytes,
    block_size: int,
    namespace: bytes = b"",
    *,
    hash_bytes: Hash = xxhash.xxh3_128_digest,
) -> list[bytes]:
    """One key for each full block.

    Args:
        raw: tokens as little-endian int32 bytes.
        hash_bytes: h; a test may hand in a bad one.
    """
    assert block_size > 0, block_size
    assert len(raw) % 4 == 0, len(raw)
    step = 4 * block_size
    key = hash_bytes(ROOT + namespace)
    blocks = struct.iter_unpack(f"{step}s", memoryview(raw)[: len(raw) - len(raw) % step])
    return [key := hash_bytes(key + block) for (block,) in blocks]


def join_keys(keys: Sequence[bytes]) -> bytes:
    """Keys of equal length as one string, for the wire."""
    return b"".join(keys)


def split_keys(joined: bytes, count: int) -> list[bytes]:
    """What `join_keys` was given.

    Args:
        count: how many keys there are.
    """
    if not count:
        assert not joined, len(joined)
        return []
    size = len(joined) // count
    assert size * count == len(joined), (len(joined), count)
    return [key for (key,) in struct.iter_unpack(f"{size}s", joined)]


def make_prompt(
    tokens: Sequence[int] | npt.NDArray[np.integer],
    block_size: int,
    *,
    namespace: bytes = b"",
    keys: Sequence[bytes] | None = None,
    room_tokens: int = 0,
    reusable: bool = True,
    hash_bytes: Hash = xxhash.xxh3_128_digest,
) -> Prompt:
    """A prompt as the cache wants it. Copies the tokens, so a shared-memory array may go away
    afterwards.

    Args:
        tokens: [n], n >= 1.
        keys: the block keys, when they were made elsewhere (by the driver, from the same
        namespace); None: made here. room_tokens: tokens beyond the prompt that need cache.
        reusable: False when no prefix may be reused (`prompt_logprobs`).
    """
    assert len(tokens) > 0, "an empty prompt is refused on arrival"
    assert room_tokens >= 0, room_tokens
    raw = np.asarray(tokens).astype("<i4", copy=False).tobytes()
    if keys is None:
        keys = chain_keys(raw, block_size, namespace, hash_bytes=hash_bytes)
    assert len(keys) == len(tokens) // block_size, (len(keys), len(tokens), block_size)
    last = len(tokens) - 1
    tail = last - last % block_size
    return Prompt(
        namespace=namespace,
        tokens=np.frombuffer(raw, dtype="<i4"),
        raw=raw,
        keys=keys if isinstance(keys, list) else list(keys),
        block_size=block_size,
        tail=tail,
        reuse_cap=tail if reusable else 0,
        room_tokens=room_tokens,
    )
