"""Answers in OpenAI's and vLLM's forms, from results made by hand."""

from __future__ import annotations

import json
import math
from typing import Any

from wavepp.batch.parse import Line, Question, parse_line
from wavepp.batch.responses import Answer, Naming, answer_line, error_line
from wavepp.errors import QueueFullError, RequestError
from wavepp.requests import (
    PositionLogprobs,
    PrefillResult,
    RequestTimings,
    TokenLogprob,
    make_request,
)
from wavepp.tokenizer import Tokenizer

NAMING = Naming(model="m", created=123)


class Letters:
    """A tokenizer whose token 65 is "A" and so on; 0 is special, 1 and 2 look alike."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool, **_: Any) -> str:
        texts = {0: "" if skip_special_tokens else "<end>", 1: "�", 2: "�"}
        return "".join(texts.get(token_id, chr(token_id)) for token_id in ids)


LETTERS = Tokenizer(Letters())


def position(chosen: tuple[int, float, int], *top: tuple[int, float, int]) -> PositionLogprobs:
    def token(facts: tuple[int, float, int]) -> TokenLogprob:
        return TokenLogprob(token_id=facts[0], logprob=facts[1], rank=facts[2])

    return PositionLogprobs(chosen=token(chosen), top=tuple(token(facts) for facts in top))


def result(**fields: Any) -> PrefillResult:
    default = {
        "request_id": "r",
        "token_ids": (65,),
        "finish_reason": "length",
        "num_prompt_tokens": 3,
        "num_cached_tokens": 2,
        "timings": RequestTimings(queued_s=0.0),
    }
    return PrefillResult(**{**default, **fields})


def record(line: bytes) -> dict[str, Any]:
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    loaded: dict[str, Any] = json.loads(line)
    return loaded


def answered(
    question: Question, *results: PrefillResult, tokenizer: Tokenizer | None = LETTERS
) -> dict[str, Any]:
    line = Line(number=4, line_id="id4", custom_id="c", question=question)
    request = make_request(request_id="r", prompt_token_ids=[66, 67, 68])
    answer = Answer(question=question, requests=[request] * len(results), results=results)
    return record(answer_line(line, answer, NAMING, tokenizer))


def question(body: dict[str, Any], url: str = "/v1/completions") -> Question:
    text = json.dumps({"custom_id": "c", "method": "POST", "url": url, "body": body})
    parsed = parse_line(1, text.encode()).question
    assert parsed is not None
    return parsed


def chat(**body: Any) -> Question:
    messages = [{"role": "user", "content": "x"}]
    return question({"messages": messages, **body}, "/v1/chat/completions")


def test_completion_without_extras() -> None:
    assert answered(question({"prompt": ["x", "y"]}), result(), result(token_ids=())) == {
        "id": "id4",
        "custom_id": "c",
        "error": None,
        "response": {
            "status_code": 200,
            "request_id": "id4",
            "body": {
                "id": "cmpl-id4",
                "object": "text_completion",
                "created": 123,
                "model": "m",
                "choices": [
                    {"index": 0, "text": "A", "logprobs": None, "finish_reason": "length"},
                    {"index": 1, "text": "", "logprobs": None, "finish_reason": "length"},
                ],
                "usage": {
                    "prompt_tokens": 6,
                    "completion_tokens": 1,
                    "total_tokens": 7,
                    "prompt_tokens_details": {"cached_tokens": 4},
                },
            },
        },
    }


def choice(record: dict[str, Any]) -> dict[str, Any]:
    only: dict[str, Any] = record["response"]["body"]["choices"][0]
    return only


def test_completion_logprobs() -> None:
    found = result(logprobs=(position((65, -1.0, 2), (90, -0.5, 1), (65, -1.0, 2)),))
    logprobs = choice(answered(question({"prompt": "x", "logprobs": 2}), found))["logprobs"]
    assert logprobs == {
        "text_offset": [0],
        "token_logprobs": [-1.0],
        "tokens": ["A"],
        "top_logprobs": [{"Z": -0.5, "A": -1.0}],
    }


def test_chosen_token_is_named_though_it_is_not_among_the_likeliest() -> None:
    found = result(logprobs=(position((65, -9.0, 7), (90, -0.5, 1)),))
    logprobs = choice(answered(question({"prompt": "x", "logprobs": 1}), found))["logprobs"]
    assert logprobs["top_logprobs"] == [{"Z": -0.5, "A": -9.0}]


def test_of_two_tokens_with_one_text_the_likelier_stays() -> None:
    found = result(token_ids=(2,), logprobs=(position((2, -2.0, 2), (1, -1.0, 1), (2, -2.0, 2)),))
    logprobs = choice(answered(question({"prompt": "x", "logprobs": 2}), found))["logprobs"]
    assert logprobs["top_logprobs"] == [{"�": -1.0}]


def test_tokens_may_be_named_by_id() -> None:
    found = result(token_ids=(2,), logprobs=(position((2, -2.0, 2), (1, -1.0, 1)),))
    expected = {"token_id:1": -1.0, "token_id:2": -2.0}
    body = {"prompt": "x", "logprobs": 1, "return_tokens_as_token_ids": True}
    assert choice(answered(question(body), found))["logprobs"]["top_logprobs"] == [expected]
    bare = choice(answered(question({"prompt": "x", "logprobs": 1}), found, tokenizer=None))
    assert bare["logprobs"]["top_logprobs"] == [expected]
    assert (bare["text"], bare["token_ids"]) == ("", [2])


def test_infinite_logprobs_become_numbers_of_json() -> None:
    found = result(logprobs=(position((65, -math.inf, 9)),))
    logprobs = choice(answered(question({"prompt": "x", "logprobs": 0}), found))["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0]


def test_echo_puts_the_prompt_before_the_answer() -> None:
    found = result(
        logprobs=(position((65, -1.0, 1), (65, -1.0, 1)),),
        prompt_logprobs=(
            None,
            position((67, -3.0, 4), (90, -0.1, 1)),
            position((68, -4.0, 5), (90, -0.2, 1)),
        ),
    )
    body = {"prompt": "x", "logprobs": 1, "echo": True}
    echoed = choice(answered(question(body), found))
    assert echoed == {
        "index": 0,
        "text": "BCDA",
        "finish_reason": "length",
        "logprobs": {
            "text_offset": [0, 1, 2, 3],
            "token_logprobs": [None, -3.0, -4.0, -1.0],
            "tokens": ["B", "C", "D", "A"],
            "top_logprobs": [None, {"Z": -0.1, "C": -3.0}, {"Z": -0.2, "D": -4.0}, {"A": -1.0}],
        },
    }


def test_prompt_logprobs_in_vllm_form() -> None:
    found = result(prompt_logprobs=(None, position((67, -3.0, 4), (90, -0.1, 1))))
    body = {"prompt": "x", "prompt_logprobs": 1}
    assert choice(answered(question(body), found))["prompt_logprobs"] == [
        None,
        {
            "90": {"logprob": -0.1, "rank": 1, "decoded_token": "Z"},
            "67": {"logprob": -3.0, "rank": 4, "decoded_token": "C"},
        },
    ]


def test_chat_with_logprobs() -> None:
    found = result(
        token_ids=(0,),
        finish_reason="stop",
        logprobs=(position((0, -0.5, 1), (0, -0.5, 1), (233, -2.0, 2)),),
        prompt_logprobs=(None,),
    )
    asked = chat(logprobs=True, top_logprobs=2, prompt_logprobs=0, return_token_ids=True)
    body = answered(asked, found)["response"]["body"]
    end = {"token": "<end>", "logprob": -0.5, "bytes": [60, 101, 110, 100, 62]}
    other = {"token": "é", "logprob": -2.0, "bytes": [195, 169]}
    assert body["object"] == "chat.completion"
    assert body["prompt_logprobs"] == [None]
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": ""},
            "logprobs": {"content": [{**end, "top_logprobs": [end, other]}]},
            "finish_reason": "stop",
            "token_ids": [0],
        }
    ]


def test_request_that_failed_while_it_ran_is_a_server_error() -> None:
    failed = result(finish_reason="error", error="stage 1: boom", token_ids=())
    found = answered(question({"prompt": ["x", "y"]}), result(), failed)
    assert found["error"] == {
        "message": "stage 1: boom",
        "type": "server_error",
        "param": None,
        "code": "error",
    }
    assert found["response"]["status_code"] == 500
    aborted = answered(question({"prompt": "x"}), result(finish_reason="abort", token_ids=()))
    assert (aborted["response"]["status_code"], aborted["error"]["code"]) == (499, "abort")


def test_refused_lines_carry_status_and_reason() -> None:
    line = Line(number=1, line_id="i", custom_id="ü\ud800")
    refused = record(error_line(line, RequestError("bad", code="x", param="p")))
    assert refused["custom_id"] == "ü\ud800"
    assert refused["error"] == refused["response"]["body"]["error"]
    assert refused["error"]["param"] == "p"
    assert refused["response"]["status_code"] == 400
    unknown = record(error_line(line, RequestError("bad", code="model_not_found")))
    full = record(error_line(line, QueueFullError("full", code="queue_full")))
    statuses = [unknown["response"]["status_code"], full["response"]["status_code"]]
    assert statuses == [404, 503]


def test_answers_keep_letters_readable() -> None:
    line = Line(number=1, line_id="i", custom_id="naïve")
    assert "naïve".encode() in error_line(line, RequestError("bad"))
