"""Made prompts: deterministic, of the shape that was asked for."""

from __future__ import annotations

import pytest

from wavepp.bench.workloads import Shape, WorkloadName, parse_workloads, prefixes, prompts
from wavepp.errors import ConfigError

SHAPE = Shape(prompt_len=100, vocab_size=512, block_size=16, reuse_frac=0.9, num_prefixes=3)


@pytest.mark.parametrize("name", ["cold", "reuse", "mixed"])
def test_prompts_are_the_same_for_the_same_seed_and_run(name: WorkloadName) -> None:
    first, again = (prompts(name, SHAPE, 7, run=2) for _ in range(2))
    other_run = prompts(name, SHAPE, 7, run=3)
    other_seed = prompts(
        name,
        Shape(prompt_len=100, vocab_size=512, block_size=16, num_prefixes=3, seed=1),
        7,
        run=2,
    )
    assert first == again
    assert all(a != b for a, b in zip(first, other_run, strict=True))
    assert all(a != b for a, b in zip(first, other_seed, strict=True))
    assert {len(prompt) for prompt in first} == {100}
    assert all(3 <= token < 512 for prompt in first for token in prompt)


def test_cold_prompts_share_nothing() -> None:
    made = prompts("cold", SHAPE, 20, run=0) + prompts("cold", SHAPE, 20, run=1)
    assert len({tuple(prompt[:16]) for prompt in made}) == 40


def test_reuse_prompts_begin_with_a_shared_prefix_of_whole_blocks() -> None:
    shared = prefixes(SHAPE)
    assert {len(prefix) for prefix in shared} == {80}
    made = prompts("reuse", SHAPE, 6, run=0)
    assert [prompt[:80] for prompt in made] == [shared[n % 3] for n in range(6)]
    assert len({tuple(prompt[80:]) for prompt in made}) == 6


def test_mixed_prompts_alternate() -> None:
    shared = prefixes(SHAPE)
    made = prompts("mixed", SHAPE, 6, run=0)
    assert [prompt[:80] in shared for prompt in made] == [False, True] * 3


@pytest.mark.parametrize(
    ("length", "share", "expected"), [(64, 1.0, 48), (65, 1.0, 64), (10, 0.9, 0), (100, 0.0, 0)]
)
def test_prefix_leaves_a_token_to_compute(length: int, share: float, expected: int) -> None:
    shape = Shape(prompt_len=length, vocab_size=512, block_size=16, reuse_frac=share)
    assert shape.prefix_len == expected


def test_unknown_workload_names_the_nearest() -> None:
    assert parse_workloads("cold, mixed") == ("cold", "mixed")
    with pytest.raises(ConfigError, match=r"'reuze' is not one of .*did you mean 'reuse'"):
        parse_workloads("cold,reuze")
    with pytest.raises(ConfigError, match="too small"):
        Shape(prompt_len=4, vocab_size=3, block_size=2)
