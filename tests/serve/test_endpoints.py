"""Every endpoint: what it takes, what it answers, and what it says to what it can't take."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
from pathlib import Path
from typing import Any

import httpx
import pytest

from wavepp import ConfigError, EngineConfig
from wavepp.requests import EngineStats, StageStats
from wavepp.serve.metrics import Metrics
from wavepp.serve.options import ServeOptions, read_arguments

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
HELLO = [{"role": "user", "content": "Hello"}]


def sse(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which must end as it should."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_completions_answer_as_batches_do(endpoints: Any) -> None:
    asked = {
        "model": "tiny",
        "prompt": ["Once upon a time", "Hello"],
        "max_tokens": 4,
        "ignore_eos": True,
        "logprobs": 2,
        "echo": True,
        "prompt_logprobs": 1,
        "return_token_ids": True,
    }
    async with endpoints() as client:
        response = await client.post(COMPLETIONS, json=asked, headers={"X-Request-Id": "mine"})
        body = response.json()
        direct = await client.service.engine.prefill("Hello", max_tokens=4, ignore_eos=True)
    assert response.status_code == 200, body
    assert (body["id"], response.headers["x-request-id"]) == ("cmpl-mine", "mine")
    assert (body["object"], body["model"]) == ("text_completion", "tiny")
    first, second = body["choices"]
    assert first["text"].startswith("Once upon a time")
    assert second["token_ids"] == list(direct.token_ids)
    assert second["finish_reason"] == "length"
    assert len(second["logprobs"]["tokens"]) == direct.num_prompt_tokens + 4
    assert second["prompt_logprobs"][0] is None
    assert body["usage"]["completion_tokens"] == 8
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_chats_answer_with_a_message(endpoints: Any) -> None:
    asked = {"messages": HELLO, "max_completion_tokens": 3, "logprobs": True, "top_logprobs": 2}
    async with endpoints() as client:
        body = (await client.post(CHAT, json={**asked, "ignore_eos": True})).json()
        stopped = (await client.post(CHAT, json={**asked, "stop": ["absent"]})).json()
    (choice,) = body["choices"]
    assert body["object"] == "chat.completion"
    assert choice["message"]["role"] == "assistant"
    assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [2, 2, 2]
    assert stopped["choices"][0]["message"]["content"] == choice["message"]["content"]


async def test_tokens_in_tokens_out(endpoints: Any) -> None:
    sampling = {"max_tokens": 5, "ignore_eos": True, "logprobs": 1, "prompt_logprobs": 0}
    asked = {"token_ids": [5, 6, 7], "sampling_params": sampling, "request_id": "g"}
    async with endpoints() as client:
        body = (await client.post(GENERATE, json=asked)).json()
        events = sse(await client.post(GENERATE, json={**asked, "stream": True}))
        direct = await client.service.engine.prefill([5, 6, 7], max_tokens=5, ignore_eos=True)
        bad = await client.post(GENERATE, json={**asked, "sampling_params": {"max_tokn": 1}})
    (choice,) = body["choices"]
    assert body["request_id"] == "g"
    assert choice["token_ids"] == list(direct.token_ids)
    assert len(choice["logprobs"]["content"]) == 5
    assert choice["logprobs"]["content"][0]["token"] == f"token_id:{direct.token_ids[0]}"
    assert [position is None for position in body["prompt_logprobs"]] == [True, False, False]
    streamed = [token for each in events for token in each["choices"][0]["token_ids"]]
    assert streamed == list(direct.token_ids)
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert (bad.status_code, "did you mean 'max_tokens'" in bad.text) == (400, True)


async def test_streams_of_completions_add_up(endpoints: Any) -> None:
    asked = {
        "prompt": ["Once upon a time", "Hello"],
        "max_tokens": 6,
        "ignore_eos": True,
        "logprobs": 1,
    }
    streamed = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    async with endpoints() as client:
        body = (await client.post(COMPLETIONS, json=asked)).json()
        events = sse(await client.post(COMPLETIONS, json=streamed))
        echoed = sse(
            await client.post(COMPLETIONS, json={"prompt": "Hello", "echo": True, "stream": True})
        )
    *chunks, last = events
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12
    for whole in body["choices"]:
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == whole["index"]]
        assert "".join(choice["text"] for choice in own) == whole["text"]
        for name in ("tokens", "text_offset", "token_logprobs"):
            parts = [item for choice in own for item in choice["logprobs"][name]]
            assert (
                parts == pytest.approx(whole["logprobs"][name]) or parts == whole["logprobs"][name]
            )
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]
    assert echoed[0]["choices"][0]["text"].startswith("Hello")


async def test_streams_of_chats_add_up(endpoints: Any) -> None:
    asked = {"messages": HELLO, "max_tokens": 6, "ignore_eos": True}
    async with endpoints() as client:
        body = (await client.post(CHAT, json=asked)).json()
        events = sse(await client.post(CHAT, json={**asked, "stream": True}))
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0]["role"] == "assistant"
    assert all("role" not in delta for delta in deltas[1:])
    text = "".join(delta["content"] for delta in deltas)
    assert text == body["choices"][0]["message"]["content"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


BAD: list[tuple[str, Any, int, str]] = [
    (COMPLETIONS, b"{", 400, "bad_json"),
    (COMPLETIONS, b"[1]", 400, "bad_json"),
    (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', 400, "bad_json"),
    (COMPLETIONS, b"\xff", 400, "bad_json"),
    (COMPLETIONS, {}, 400, "invalid_request"),
    (COMPLETIONS, {"prompt": ""}, 400, "empty_prompt"),
    (COMPLETIONS, {"prompt": [512]}, 400, "bad_token"),
    (COMPLETIONS, {"prompt": "a", "max_tokns": 1}, 400, "invalid_request"),
    (COMPLETIONS, {"prompt": "a", "n": 2}, 400, "unsupported"),
    (COMPLETIONS, {"prompt": "a", "model": "other"}, 404, "model_not_found"),
    (COMPLETIONS, {"prompt": "a", "cache_salt": "s" * 1025}, 400, "invalid_request"),
    (COMPLETIONS, {"prompt": [5] * 4097}, 400, "prompt_too_long"),
    (COMPLETIONS, {"prompt": [5], "max_tokens": 5000}, 400, "context_length_exceeded"),
    (
        COMPLETIONS,
        {"prompt": [5], "max_tokens": 5000, "stream": True},
        400,
        "context_length_exceeded",
    ),
    (COMPLETIONS, {"prompt": "a", "stream": 1}, 400, "invalid_request"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {}}, 400, "invalid_request"),
    (COMPLETIONS, {"prompt": "a", "stream": True, "echo": True, "logprobs": 1}, 400, "unsupported"),
    (CHAT, {"messages": []}, 400, "invalid_request"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, 400, "invalid_request"),
    (GENERATE, {"token_ids": "a"}, 400, "invalid_request"),
    (GENERATE, {"token_ids": [5], "priority": 3}, 400, "unsupported"),
    ("/tokenize", {}, 400, "invalid_request"),
    ("/tokenize", {"prompt": "a", "x": 1}, 400, "invalid_request"),
    ("/detokenize", {"tokens": [-1]}, 400, "bad_token"),
    ("/abort_requests", {"request_ids": 5}, 400, "invalid_request"),
    ("/nowhere", {}, 404, "http_error"),
    ("/health", {}, 405, "http_error"),
]


async def test_every_bad_request_gets_an_error_object(endpoints: Any) -> None:
    async with endpoints() as client:
        for path, body, status, code in BAD:
            sent = {"content": body} if isinstance(body, bytes) else {"json": body}
            response = await client.post(path, **sent)
            found = (response.status_code, response.json()["error"]["code"])
            assert found == (status, code), (path, body, response.text)
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        good = await client.post(COMPLETIONS, json={"prompt": "a"})
        stats = await client.service.engine.stats()
    assert good.status_code == 200
    assert stats.requests_finished == 1


async def test_bodies_may_be_so_large_and_no_larger(endpoints: Any) -> None:
    async with endpoints(max_body_mib=0.001) as client:
        assert (await client.post("/tokenize", json={"prompt": "a" * 900})).status_code == 200
        told = await client.post("/tokenize", json={"prompt": "a" * 1100})

        async def pieces() -> Any:
            for _ in range(20):
                yield b" " * 100

        untold = await client.post("/tokenize", content=pieces())
    assert [told.status_code, untold.status_code] == [413, 413]
    assert told.json()["error"]["code"] == "body_too_large"


async def test_only_those_with_the_key_come_in(endpoints: Any) -> None:
    async with endpoints(api_key="secret") as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            refused = await client.get("/v1/models", headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        let_in = await client.get("/v1/models", headers={"Authorization": "Bearer secret"})
        assert let_in.status_code == 200
        for path in ("/health", "/ready", "/ping", "/version", "/metrics"):
            assert (await client.get(path)).status_code == 200


async def test_a_full_queue_says_when_to_come_again(endpoints: Any) -> None:
    async with endpoints(
        max_num_seqs=1, max_num_queued_reqs=1, max_num_batched_tokens=16
    ) as client:
        long = {"prompt": [5] * 2000, "cache_salt": "x"}
        calls = [client.post(COMPLETIONS, json={**long, "stream": n % 2 == 0}) for n in range(12)]
        answers = await asyncio.gather(*calls)
        metrics = (await client.get("/metrics")).text
    refused = [answer for answer in answers if answer.status_code == 503]
    assert 0 < len(refused) < 12
    assert {answer.status_code for answer in answers} == {200, 503}
    for answer in refused:
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "queue_full"
    label = '{model_name="tiny",reason="queue_full"}'
    assert f"wavepp:admission_rejections_total{label} {len(refused)}.0" in metrics


async def test_operators_are_answered(endpoints: Any) -> None:
    async with endpoints() as client:
        (model,) = (await client.get("/v1/models")).json()["data"]
        info = (await client.get("/server_info")).json()
        load = (await client.get("/load")).json()
        version = (await client.get("/version")).json()
        tokens = (
            await client.post("/tokenize", json={"prompt": "Hi", "return_token_strs": True})
        ).json()
        chat = (await client.post("/tokenize", json={"messages": HELLO})).json()
        text = (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
        asked = {"prompt": [5] * 100}
        await client.post(COMPLETIONS, json=asked)
        again = (await client.post(COMPLETIONS, json=asked)).json()
        reset = (await client.post("/reset_prefix_cache")).json()
        fresh = (await client.post(COMPLETIONS, json=asked)).json()
    assert (model["id"], model["max_model_len"]) == ("tiny", 4096)
    assert [stage["stage"] for stage in info["stages"]] == [0, 1]
    assert info["config"]["block_size"] == 16
    assert load == {"server_load": 0}
    assert set(version) == {"version"}
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert chat["count"] > tokens["count"]
    assert text == {"prompt": "Hi"}
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    assert reset == {"reset": True}
    assert fresh["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_answers_can_be_aborted_by_name(endpoints: Any) -> None:
    async with endpoints(max_num_batched_tokens=16) as client:
        asked = {"prompt": [5] * 3000, "max_tokens": 500, "ignore_eos": True}
        names = {"X-Request-Id": "long"}
        call = asyncio.create_task(client.post(COMPLETIONS, json=asked, headers=names))
        while (await client.get("/load")).json() == {"server_load": 0}:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        told = await client.post("/abort_requests", json={"request_ids": ["cmpl-long", "other"]})
        response = await call
    assert told.json() == {"aborted": ["cmpl-long"]}
    assert response.status_code == 499
    assert response.json()["error"]["code"] == "abort"


async def test_metrics_are_the_sum_of_the_answers(endpoints: Any) -> None:
    async with endpoints() as client:
        bodies = []
        for _ in range(2):
            asked = {"prompt": [[5] * 100, [6] * 40], "max_tokens": 3, "ignore_eos": True}
            bodies.append((await client.post(COMPLETIONS, json=asked)).json())
        text = (await client.get("/metrics")).text
    usage = [body["usage"] for body in bodies]
    cached = sum(each["prompt_tokens_details"]["cached_tokens"] for each in usage)
    assert cached == 96 + 32

    def value(name: str) -> float:
        (line,) = [each for each in text.splitlines() if each.startswith(f"wavepp:{name}")]
        return float(line.rsplit(" ", 1)[1])

    assert value("prompt_tokens_total") == sum(each["prompt_tokens"] for each in usage)
    assert value("generation_tokens_total") == sum(each["completion_tokens"] for each in usage)
    assert value("prompt_tokens_cached_by_source_total") == cached
    assert value("prefix_cache_hits_total") == cached
    assert value('request_success_total{finished_reason="length"') == 4
    for name in ("time_to_first_token", "hint", "admission", "request_queue_time"):
        assert value(f"{name}_seconds_count") == 4
    assert value("e2e_request_latency_seconds_count") == 4
    assert value("num_requests_running") == value("leases") == 0
    assert value('kv_cache_usage_perc{stage="1"}') == 0
    waves = value("waves_total")
    assert 0 < waves == value("iteration_tokens_total_count")
    assert value('iteration_tokens_total_bucket{le="1.0"}') < waves  # decoding goes two by two
    assert value('iteration_tokens_total_bucket{le="64.0"}') == waves  # 64 are M
    assert value("iteration_tokens_total_sum") == value("computed_tokens_total")
    assert 0 < value("wave_budget_tokens") <= 64
    assert value('escrow_failures_total{reason="no_room"}') == 0
    assert value("endpoint_lowered_tokens_total") == 0


def test_snapshots_are_told_of_stages_that_have_some() -> None:
    counted = {"layers": (0, 1), "busy_s": 0.0}
    stages = (
        StageStats(stage=0, snapshots_total=8, snapshots_filled=2, **counted),
        StageStats(stage=1, **counted),
    )
    names = ("requests_waiting", "requests_running", "requests_finished", "prompt_tokens")
    names += ("cached_tokens", "computed_tokens", "waves", "ring_depth", "ring_occupancy", "wall_s")
    stats = EngineStats(**dict.fromkeys(names, 0), stages=stages)
    text = Metrics(EngineConfig(model="m")).text(stats).decode()
    told = [line for line in text.splitlines() if line.startswith("wavepp:snapshot_usage_perc")]
    assert told == ['wavepp:snapshot_usage_perc{stage="0"} 0.25']


async def test_the_dashboard_asks_for_metrics_that_there_are(endpoints: Any) -> None:
    async with endpoints() as client:
        await client.post(COMPLETIONS, json={"prompt": "Hello"})
        await client.post(COMPLETIONS, json={"prompt": ""})
        text = (await client.get("/metrics")).text
    folder = Path(__file__).parents[2] / "examples"
    dashboard = json.loads((folder / "grafana.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"wavepp:\w+", target["expr"])
    }
    told = set(re.findall(r"^wavepp:\w+", text, re.M))
    assert len(asked) > 15
    assert asked <= told
    made = runpy.run_path(str(folder / "make_dashboard.py"))["render"]()
    assert json.loads(made) == dashboard


async def test_a_dead_engine_is_told_at_once(endpoints: Any) -> None:
    async with endpoints() as client:
        assert (await client.get("/health")).status_code == 200
        await client.service.engine.close()
        await client.service.health.look()
        for path in ("/health", "/ready", "/ping"):
            assert (await client.get(path)).status_code == 503
        response = await client.post(COMPLETIONS, json={"prompt": [5]})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_dead"


async def test_the_openapi_document_names_all_bodies(endpoints: Any) -> None:
    async with endpoints() as client:
        document = (await client.get("/openapi.json")).json()
    posts = {path: item["post"] for path, item in document["paths"].items() if "post" in item}
    with_body = {path for path, post in posts.items() if "requestBody" in post}
    assert with_body == set(posts) - {"/reset_prefix_cache"}
    assert "422" not in json.dumps(document)
    body = posts[COMPLETIONS]["requestBody"]["content"]["application/json"]["schema"]
    assert {"prompt", "max_tokens", "stream", "cache_salt"} <= set(body["properties"])


def test_arguments_come_typed_or_as_text(tiny_llama: Path) -> None:
    typed = {"model": str(tiny_llama), "pipeline_parallel_size": 2, "max_body_mib": 1.5}
    text = {
        "model": str(tiny_llama),
        "pipeline-parallel-size": "2",
        "max-body-mib": "1.5",
        "layer-partition": "3,5",
    }
    config, options = read_arguments(text)
    assert config.layer_partition == (3, 5)
    assert options == ServeOptions(max_body_mib=1.5)
    assert read_arguments(typed)[0] == config.model_copy(update={"layer_partition": None})
    with pytest.raises(ConfigError, match="'api_kee'; did you mean 'api_key'"):
        read_arguments({**typed, "api_kee": "x"})
    with pytest.raises(ConfigError, match="num_replicas"):
        read_arguments({**typed, "num_replicas": 0})
