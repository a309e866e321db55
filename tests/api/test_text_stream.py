"""Text that grows token by token: nothing uncertain is given out, nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavepp.text_stream import TextStream


def of_bytes(token_ids: Sequence[int]) -> str:
    """A tokenizer with a token a byte."""
    return bytes(token_ids).decode("utf-8", errors="replace")


@given(st.text(), st.integers(1, 4))
def test_whole_text_comes_in_pieces_of_whole_characters(text: str, size: int) -> None:
    stream, tokens = TextStream(of_bytes), text.encode()
    pieces = [stream.take(tokens[at : at + size]) for at in range(0, len(tokens), size)]
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == text == stream.text


def test_bytes_of_no_character_come_at_the_end() -> None:
    stream = TextStream(of_bytes)
    assert stream.take([97, 0xC3]) == "a"
    assert stream.finish() == "\ufffd"


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    stream = TextStream(of_bytes, stops)
    given_out = ""
    for token in text.encode():
        given_out += stream.take([token])
        assert not any(stop in given_out for stop in stops)
        if stream.stop is not None:
            break
    given_out += stream.finish()
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert (given_out, stream.stop) == (text, None)
        return
    # It ends with the first token that completes one; of those the one that begins first counts.
    completed = [stop for stop in stops if text[: min(ends)].endswith(stop)]
    longest = max(completed, key=len)
    assert stream.stop == longest
    assert given_out == stream.text == text[: min(ends) - len(longest)]
    assert stream.num_tokens == min(ends)


@pytest.mark.parametrize(("taken", "out"), [("xe", "x"), ("xen", "x"), ("xend", "x")])
def test_what_may_begin_a_stop_string_is_held_back(taken: str, out: str) -> None:
    stream = TextStream(of_bytes, ["end"])
    assert stream.take(taken.encode()) == out
    assert stream.take(b"moar") == ("" if taken == "xend" else taken[1:] + "moar")
