"""Reading one line: what is asked, and how each mistake is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavepp.batch.parse import LINE_BYTES_MAX, Line, Question, line_id, parse_line

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def parse(value: Any) -> Line:
    return parse_line(1, value if isinstance(value, bytes) else json.dumps(value).encode())


def asked(value: Any) -> Question:
    line = parse(value)
    assert line.error is None, line.error
    assert line.question is not None
    return line.question


def openai(body: Any, url: str = COMPLETIONS, **more: Any) -> dict[str, Any]:
    return {"custom_id": "c", "method": "POST", "url": url, "body": body, **more}


def test_plain_text_line() -> None:
    assert asked({"prompt": "hi"}) == Question(options={}, prompts=("hi",), return_token_ids=True)


def test_plain_token_line_with_options() -> None:
    question = asked(
        {"prompt_token_ids": [1, 2], "max_tokens": 0, "cache_salt": "s", "return_token_ids": False}
    )
    options: Any = {"max_tokens": 0, "cache_salt": "s"}
    assert question == Question(options=options, prompts=((1, 2),))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        ([1, 2], ((1, 2),)),
        (["a", "b"], ("a", "b")),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_completion_takes_every_form_of_prompt(prompt: Any, expected: Any) -> None:
    assert asked(openai({"prompt": prompt})).prompts == expected


def test_completion_with_vllm_fields() -> None:
    body = {
        "model": "m",
        "prompt": "a",
        "max_tokens": 1,
        "temperature": 0,
        "top_p": 0.5,
        "seed": 3,
        "logprobs": 2,
        "prompt_logprobs": 4,
        "echo": True,
        "user": "u",
        "add_special_tokens": False,
        "return_tokens_as_token_ids": True,
    }
    options: Any = {
        "max_tokens": 1,
        "temperature": 0.0,
        "top_p": 0.5,
        "seed": 3,
        "logprobs": 2,
        "prompt_logprobs": 4,
    }
    assert asked(openai(body)) == Question(
        options=options,
        model="m",
        logprobs=2,
        prompt_logprobs=4,
        prompts=("a",),
        add_special_tokens=False,
        echo=True,
        tokens_as_ids=True,
    )


def test_echo_with_logprobs_asks_the_engine_for_those_of_the_prompt() -> None:
    question = asked(openai({"prompt": "a", "logprobs": 2, "echo": True}))
    assert question.options.get("prompt_logprobs") == 2
    assert question.prompt_logprobs is None


def test_chat_with_logprobs_and_template_options() -> None:
    body = {
        "messages": HELLO,
        "logprobs": True,
        "top_logprobs": 3,
        "max_completion_tokens": 1,
        "chat_template_kwargs": {"enable_thinking": False},
        "tools": [{"type": "function"}],
        "continue_final_message": True,
    }
    question = asked(openai(body, CHAT))
    assert question.options == {"max_tokens": 1, "logprobs": 3}
    assert question.logprobs == 3
    assert question.chat is not None
    assert question.chat.messages == HELLO
    assert question.chat.template_options == {
        "enable_thinking": False,
        "add_generation_prompt": False,
        "continue_final_message": True,
        "tools": [{"type": "function"}],
    }


def test_chat_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    question = asked(openai({"messages": [{"role": "user", "content": parts}]}, CHAT))
    assert question.chat is not None
    assert question.chat.messages == [{"role": "user", "content": "a\nb"}]


def test_fields_that_ask_for_nothing_are_taken() -> None:
    body = {"prompt": "a", "n": 1, "stream": False, "stop": None, "top_k": -1, "logit_bias": {}}
    assert asked(openai(body)).prompts == ("a",)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"oops", "not JSON: Expecting value"),
        (b'{"prompt": "a"', "not JSON: "),
        (b'{"prompt": "\xff"}', "not UTF-8 at byte 12"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN is not a JSON number"),
        (b"[" * 100_000, "not JSON: "),
        (b'{"prompt": [' + b"1" * 5000 + b"]}", "not JSON: "),
        ([1], "expected a JSON object"),
        ("text", "expected a JSON object"),
        ({}, "give one of prompt and prompt_token_ids"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "give one of"),
        ({"promt": "a"}, "unknown field 'promt'; did you mean 'prompt'"),
        ({"prompt": "a", "max_tokns": 1}, "did you mean 'max_tokens'"),
        ({"prompt": {}}, "prompt: expected text, token ids"),
        ({"prompt": 5}, r"prompt: .*\(got 5\)"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [[]]}, "prompt is empty"),
        ({"prompt": [1, "a"]}, r"prompt\[1\]: expected a token id \(got 'a'\)"),
        ({"prompt": ["a", 1]}, r"prompt\[0\]: expected a token id"),
        ({"prompt": [True]}, r"prompt\[0\]: .*\(got True\)"),
        ({"prompt": [1.5]}, r"\(got 1\.5\)"),
        ({"prompt_token_ids": "a"}, "prompt_token_ids: expected token ids"),
        ({"prompt_token_ids": []}, "prompt_token_ids is empty"),
        ({"prompt": "a", "max_tokens": "1"}, r"max_tokens: .*\(got '1'\)"),
        ({"prompt": "a", "max_tokens": True}, r"max_tokens: .*\(got True\)"),
        ({"prompt": "a", "cache_salt": 1}, "cache_salt: "),
        ({"prompt": "a", "n": 2}, "n: 2 is not supported"),
        ({"prompt": "a", "n": True}, "n: True is not supported"),
        ({"prompt": "a", "stream": True}, "stream: True is not supported"),
        ({"prompt": "a", "stop": 5}, r"stop: .*\(got 5\)"),
        ({"prompt": "a", "custom_id": 5}, "custom_id: "),
        ({"custom_id": "c", "method": "POST", "url": COMPLETIONS}, "body is required"),
        ({"custom_id": "c", "body": {"prompt": "a"}}, "url is required"),
        ({"url": COMPLETIONS, "body": {"prompt": "a"}}, "custom_id is required"),
        (openai({"prompt": "a"}, method="GET"), "method: 'GET' is not POST"),
        (openai({"prompt": "a"}, "/v1/completion"), "did you mean '/v1/completions'"),
        (openai({"prompt": "a"}, "/v1/embeddings"), "url: '/v1/embeddings' is not one of"),
        (openai([1]), "body: "),
        (openai({"prompt": "a"}, costum_id="x"), "unknown field 'costum_id'"),
        (openai({}), "prompt is required"),
        (openai({"messages": HELLO}), "unknown field 'messages'"),
        (openai({"messages": []}, CHAT), "messages: "),
        (openai({"messages": ["hi"]}, CHAT), r"messages\.0: "),
        (openai({"messages": [{"content": "hi"}]}, CHAT), r"messages\[0\]\.role"),
        (openai({"messages": [{"role": "user", "content": 3}]}, CHAT), r"messages\[0\]\.content"),
        (
            openai({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, CHAT),
            "only text parts",
        ),
        (openai({"messages": HELLO, "top_logprobs": 2}, CHAT), "needs logprobs: true"),
        (openai({"messages": HELLO, "logprobs": 2}, CHAT), "logprobs: "),
    ],
)
def test_mistakes_are_named(line: Any, message: str) -> None:
    parsed = parse(line)
    assert parsed.question is None
    assert parsed.error is not None
    with pytest.raises(type(parsed.error), match=message):
        raise parsed.error
    if isinstance(line, dict) and isinstance(line.get("custom_id"), str):
        assert parsed.custom_id == line["custom_id"]


def test_line_that_is_too_long_is_named() -> None:
    error = parse(b'"' + b"x" * LINE_BYTES_MAX + b'"').error
    assert error is not None
    assert error.code == "line_too_long"


def test_line_id_is_made_of_place_and_content() -> None:
    ids = {line_id(1, b"a"), line_id(2, b"a"), line_id(1, b"b")}
    assert len(ids) == 3
    assert line_id(1, b"a") == line_id(1, b"a")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
field_names = st.sampled_from(
    ["custom_id", "method", "url", "body", "prompt", "messages", "prompt_token_ids", "logprobs"]
)


@given(st.dictionaries(field_names | st.text(max_size=3), json_values, max_size=5))
def test_any_object_is_a_question_or_an_error(value: dict[str, Any]) -> None:
    line = parse(value)
    assert (line.question is None) != (line.error is None)


@given(st.dictionaries(field_names | st.text(max_size=3), json_values, max_size=5))
def test_any_body_is_a_question_or_an_error(body: dict[str, Any]) -> None:
    for url in (COMPLETIONS, CHAT):
        line = parse(openai(body, url))
        assert (line.question is None) != (line.error is None)


@given(st.binary())
def test_any_bytes_are_a_question_or_an_error(raw: bytes) -> None:
    line = parse(raw)
    assert (line.question is None) != (line.error is None)
