"""Keys: chained, alike in every process, namespaces that can't be confused."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from wavepp.cache.keys import ROOT, chain_keys, encode_namespace, make_prompt


def raw(ids: list[int]) -> bytes:
    return np.array(ids, dtype="<i4").tobytes()


def test_keys_are_chained_over_full_blocks_only() -> None:
    root = xxhash.xxh3_128_digest(ROOT)
    first = xxhash.xxh3_128_digest(root + raw([1, 2]))
    second = xxhash.xxh3_128_digest(first + raw([3, 4]))
    assert chain_keys(raw([1, 2, 3, 4, 5]), 2) == [first, second]


def test_a_prompt_shorter_than_a_block_has_no_key() -> None:
    assert chain_keys(raw([1, 2, 3]), 4) == []


def test_a_key_names_its_whole_prefix() -> None:
    one = chain_keys(raw([1, 2, 9, 9]), 2)
    other = chain_keys(raw([1, 3, 9, 9]), 2)
    assert one[0] != other[0]
    assert one[1] != other[1]


@pytest.mark.parametrize("hash_seed", ["0", "1", "4711"])
def test_keys_are_alike_in_every_process(hash_seed: str) -> None:
    script = (
        "from wavepp.cache.keys import *;"
        "p = make_prompt(range(8), 4, namespace=encode_namespace('salt', 'adapter'));"
        "import sys; sys.stdout.write(b''.join(p.keys).hex())"
    )
    printed = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    here = make_prompt(range(8), 4, namespace=encode_namespace("salt", "adapter"))
    assert printed == b"".join(here.keys).hex()


def test_namespaces_are_unambiguous() -> None:
    assert encode_namespace("ab", "c") != encode_namespace("a", "bc")
    assert encode_namespace("a", "", "b") != encode_namespace("a", "b")
    assert encode_namespace("a") != encode_namespace("b")


def test_no_salt_is_the_empty_salt() -> None:
    assert encode_namespace(None) == encode_namespace("") == encode_namespace() == b""
    assert encode_namespace("s", "") == encode_namespace("s")


@given(st.lists(st.text(max_size=3), max_size=3), st.lists(st.text(max_size=3), max_size=3))
def test_namespaces_differ_when_their_parts_differ(one: list[str], other: list[str]) -> None:
    def trimmed(parts: list[str]) -> list[str]:
        while parts and not parts[-1]:
            parts = parts[:-1]
        return parts

    same = encode_namespace(*one) == encode_namespace(*other)
    assert same == (trimmed(one) == trimmed(other))


def test_salts_give_other_keys() -> None:
    ids = list(range(8))
    keys = {salt: tuple(chain_keys(raw(ids), 4, encode_namespace(salt))) for salt in ("a", "b", "")}
    assert len({key for chain in keys.values() for key in chain}) == 6


def test_a_prompt_owns_its_tokens() -> None:
    shared = np.arange(8, dtype=np.int64)
    prompt = make_prompt(shared, 4)
    shared[:] = 0
    assert prompt.tokens.tolist() == list(range(8))
    assert not prompt.tokens.flags.writeable


@pytest.mark.parametrize(
    ("count", "tail", "blocks"), [(1, 0, 1), (4, 0, 1), (5, 4, 2), (8, 4, 2), (9, 8, 3)]
)
def test_a_prompt_leaves_a_token_to_compute(count: int, tail: int, blocks: int) -> None:
    prompt = make_prompt([1] * count, 4)
    assert (prompt.tail, prompt.reuse_cap, prompt.blocks_total) == (tail, tail, blocks)
    unusable = make_prompt([1] * count, 4, reusable=False)
    assert (unusable.tail, unusable.reuse_cap) == (tail, 0)


def test_room_for_decoding_counts_as_blocks() -> None:
    assert make_prompt([1] * 8, 4, room_tokens=1).blocks_total == 3
