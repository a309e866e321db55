"""Request traces: what is read, what becomes of it, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from wavepp.bench.trace_file import TraceLine, read_trace_file, sample_trace, trace_asks
from wavepp.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "examples" / "trace.jsonl"


def line(timestamp_ms: float, length: int, *blocks: int) -> TraceLine:
    return TraceLine(timestamp_ms=timestamp_ms, input_length=length, hash_ids=blocks)


def test_equal_blocks_are_equal_tokens_and_make_the_expected_prefix() -> None:
    lines = [line(1000, 1100, 5, 6, 7), line(1500, 1536, 5, 6, 9), line(3000, 400, 5)]
    first, second, third = trace_asks(lines, vocab_size=99, block_size=64, seed=1, scale=2.0)
    assert [len(ask.tokens) for ask in (first, second, third)] == [1100, 1536, 400]
    assert np.array_equal(first.tokens[:1024], second.tokens[:1024])
    assert not np.array_equal(first.tokens[1024:], second.tokens[1024:1100])
    assert [ask.expected for ask in (first, second, third)] == [0, 1024, 384]
    assert [ask.at_s for ask in (first, second, third)] == [0.0, 0.25, 1.0]


def test_lines_are_read_in_order_of_arrival_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    records = [(30, 10, [1]), (10, 600, [2, 3]), (20, 5, [4])]
    path.write_text(
        "".join(
            json.dumps({"timestamp": t, "input_length": n, "output_length": 9, "hash_ids": b})
            + "\n"
            for t, n, b in records
        )
    )
    assert [found.timestamp_ms for found in read_trace_file(path)] == [10, 20, 30]
    assert [found.hash_ids for found in read_trace_file(path, 2)] == [(2, 3), (1,)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no request"),
        ("{\n", "line 1 is no request"),
        ('{"timestamp": 1, "input_length": 3}\n', "line 1 is no request"),
        ('{"timestamp": 1, "input_length": 513, "hash_ids": [4]}\n', "1 blocks of 512 tokens for"),
        ('{"timestamp": 1, "input_length": 0, "hash_ids": []}\n', "input_length 0"),
    ],
)
def test_bad_files_are_refused_by_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"trace .*trace\.jsonl") as caught:
        read_trace_file(path)
    assert said in str(caught.value)


def test_example_is_what_its_generator_makes() -> None:
    assert EXAMPLE.read_text() == "".join(f"{text}\n" for text in sample_trace(300, 7))
    lines = read_trace_file(EXAMPLE)
    made = trace_asks(lines, vocab_size=1000, block_size=64, seed=0, scale=1.0)
    assert len(made) == 300
    shared = sum(ask.expected for ask in made) / sum(len(ask.tokens) for ask in made)
    assert 0.5 < shared < 0.9
