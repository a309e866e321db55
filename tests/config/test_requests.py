"""What a request may hold: every bad input gets a sentence that names field and value."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from wavepp.errors import QueueFullError, RequestError
from wavepp.requests import SALT_CHARS_MAX, check_request, make_request


def make(**fields: Any) -> Any:
    return make_request(**{"request_id": "a", "prompt_token_ids": [1, 2], **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_token_ids": []}, "prompt is empty"),
        ({"prompt_token_ids": None}, "prompt_token_ids: "),
        ({"prompt_token_ids": "text"}, "prompt_token_ids: "),
        ({"prompt_token_ids": [1, True]}, r"prompt_token_ids\.1: .*\(got True\)"),
        ({"prompt_token_ids": [1, "2"]}, r"\(got '2'\)"),
        ({"prompt_token_ids": [1.0]}, r"\(got 1\.0\)"),
        ({"prompt_token_ids": [[1]]}, r"\(got \[1\]\)"),
        ({"max_tokns": 1}, "unknown field 'max_tokns'; did you mean 'max_tokens'?"),
        ({"zzz": 1}, "unknown field 'zzz'$"),
        ({"max_tokens": -1}, r"max_tokens: .*\(got -1\)"),
        ({"max_tokens": True}, r"max_tokens: .*\(got True\)"),
        ({"max_tokens": None}, "max_tokens: "),
        ({"temperature": -0.1}, "temperature: "),
        ({"temperature": float("nan")}, "temperature: "),
        ({"temperature": float("inf")}, "temperature: "),
        ({"temperature": "0"}, "temperature: "),
        ({"top_p": 0.0}, "top_p: "),
        ({"top_p": 1.5}, "top_p: "),
        ({"seed": 2**63}, "seed: "),
        ({"stop": ["a", ""]}, r"stop\.1: "),
        ({"stop": ["x"] * 17}, "stop: .*16"),
        ({"stop": 5}, "stop: "),
        ({"stop_token_ids": ["a"]}, r"stop_token_ids\.0: "),
        ({"ignore_eos": 1}, "ignore_eos: "),
        ({"logprobs": 21}, "logprobs: .*20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs: "),
        ({"cache_salt": 5}, r"cache_salt: .*\(got 5\)"),
        ({"cache_salt": "x" * (SALT_CHARS_MAX + 1)}, "cache_salt: .*1024"),
        ({"cache_salt": "\ud800"}, "cache_salt: .*unicode"),
        ({"request_id": ""}, "request_id: "),
        ({"request_id": 7}, "request_id: "),
    ],
)
def test_request_names_what_is_wrong(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make(**fields)


def test_error_keeps_code_and_param_through_pickling() -> None:
    with pytest.raises(RequestError) as caught:
        make(prompt_token_ids=[])
    copy = pickle.loads(pickle.dumps(caught.value))  # noqa: S301
    assert (copy.code, copy.param, str(copy)) == ("empty_prompt", "prompt", str(caught.value))
    full = pickle.loads(pickle.dumps(QueueFullError("full", code="queue_full")))  # noqa: S301
    assert isinstance(full, QueueFullError)
    assert full.code == "queue_full"


def test_long_values_are_cut_in_messages() -> None:
    with pytest.raises(RequestError) as caught:
        make(cache_salt="x" * 100_000)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("tokens", [[3, 4], (3, 4), np.array([3, 4]), range(3, 5)])
def test_tokens_may_come_as_any_sequence(tokens: Any) -> None:
    assert make(prompt_token_ids=tokens).prompt_token_ids == (3, 4)


@pytest.mark.parametrize("max_tokens", [0, 1, 1000])
def test_any_number_of_tokens_may_be_asked_for(max_tokens: int) -> None:
    assert make(max_tokens=max_tokens).max_tokens == max_tokens


def test_one_stop_string_may_stand_by_itself() -> None:
    assert make(stop="end").stop == ("end",)
    assert make(stop=["a", "b"], stop_token_ids=[3]).stop == ("a", "b")


def test_prompt_and_answer_must_fit_together() -> None:
    check_request(make(max_tokens=9), vocab_size=100, max_model_len=10)
    with pytest.raises(RequestError, match="has 2 tokens and max_tokens is 10; max_model_len is"):
        check_request(make(max_tokens=10), vocab_size=100, max_model_len=10)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1] * 11, "the prompt has 11 tokens, max_model_len is 10"),
        ([1, 100], "token id 100 is outside the vocabulary of 100 tokens"),
        ([-1, 5], "token id -1 is outside"),
        ([2**70], "is outside the vocabulary"),
    ],
)
def test_request_is_checked_against_the_model(tokens: list[int], message: str) -> None:
    request = make(prompt_token_ids=tokens)
    with pytest.raises(RequestError, match=message):
        check_request(request, vocab_size=100, max_model_len=10)


def test_request_at_the_limits_is_taken() -> None:
    check_request(make(prompt_token_ids=[0, 99] * 5), vocab_size=100, max_model_len=10)
