"""LLM: the synchronous front end, in scripts, notebooks and at exit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from wavepp import LLM, ConfigError, EngineDeadError, RequestError


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    with LLM(model=tiny_llama, transport="local", max_model_len=200, threads_per_stage=1) as llm:
        yield llm


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts: list[Any] = [[5] * n for n in range(30, 0, -1)] + ["some text"]
    results = llm.prefill(prompts)
    counts = [result.num_prompt_tokens for result in results]
    assert counts[:30] == list(range(30, 0, -1))
    assert results[30].token_ids == llm.prefill("some text")[0].token_ids


def test_one_prompt_may_stand_by_itself(llm: LLM) -> None:
    assert [r.num_prompt_tokens for r in llm.prefill([5, 6, 7])] == [3]
    assert len(llm.prefill("text")) == 1
    assert llm.prefill([]) == []


def test_generate_goes_on_after_the_first_token(llm: LLM) -> None:
    first = llm.prefill([5, 6])[0].token_ids
    assert llm.generate([[5, 6]], max_tokens=1)[0].token_ids == first
    longer = llm.generate([5, 6], ignore_eos=True)[0].token_ids
    assert len(longer) == 16
    assert longer[:1] == first
    assert llm.generate([5, 6], max_tokens=5, ignore_eos=True)[0].token_ids == longer[:5]


def test_an_answer_of_several_tokens_has_its_text(llm: LLM) -> None:
    for options in ({}, {"stop": "a stop string that never comes"}):
        answer = llm.generate([5, 6], ignore_eos=True, **options)[0]
        assert answer.text == llm.decode(answer.token_ids)
    assert llm.prefill([5, 6])[0].text is None


@pytest.mark.parametrize("tokens", [[-1], [99999], "ab", [2.5], [None]])
def test_what_are_no_token_ids_can_not_be_decoded(llm: LLM, tokens: Any) -> None:
    with pytest.raises(RequestError, match="token"):
        llm.decode(tokens)


@pytest.mark.parametrize("stage", ["0", 1.5, 7, -1])
def test_a_stage_that_is_none_can_not_be_reset(llm: LLM, stage: Any) -> None:
    with pytest.raises(RequestError, match="the pipeline has stages 0 to"):
        llm.reset_prefix_cache(stage=stage)


def test_chat_lays_messages_out_by_the_template(llm: LLM) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    one = llm.chat(hello)
    two = llm.chat([hello, hello])
    assert [r.token_ids for r in two] == [one[0].token_ids] * 2
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    assert llm.chat(parts)[0].token_ids == one[0].token_ids
    with pytest.raises(RequestError, match="messages is empty"):
        llm.chat([])
    with pytest.raises(RequestError, match=r"messages\[0\].content: expected text or text parts"):
        llm.chat([{"role": "user", "content": 3}])
    with pytest.raises(RequestError, match="only text parts are supported"):
        llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}])


def test_cache_can_be_reset(llm: LLM) -> None:
    prompt = [9, *range(100, 250)]
    hits = [llm.prefill(prompt)[0].num_cached_tokens for _ in range(2)]
    assert llm.reset_prefix_cache() is True
    hits.append(llm.prefill(prompt)[0].num_cached_tokens)
    assert hits == [0, 128, 0]


def test_decode_gives_text_back(llm: LLM) -> None:
    ids = llm.prefill("The quick brown fox", prompt_logprobs=0)[0].prompt_logprobs
    assert ids is not None
    assert llm.decode([p.chosen.token_id for p in ids if p]).endswith("quick brown fox")


def test_one_bad_prompt_stops_all_before_any_runs(llm: LLM) -> None:
    before = llm.stats().requests_finished
    with pytest.raises(RequestError, match="outside the vocabulary"):
        llm.prefill([[5], [9999]])
    with pytest.raises(RequestError, match="prompts: expected text, token ids or a list"):
        llm.prefill(7)  # type: ignore[arg-type]
    assert llm.stats().requests_finished == before


async def test_llm_works_inside_a_running_loop(llm: LLM) -> None:
    assert llm.prefill([5, 6])[0].finish_reason == "length"


def test_closed_llm_says_so(tiny_llama: Path) -> None:
    llm = LLM(model=str(tiny_llama), transport="local")
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.prefill([5])


def test_failed_start_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="is not a folder"):
        LLM(model=tmp_path / "none", transport="local")
    with pytest.raises(ConfigError, match="did you mean 'seed'"):
        LLM(model=tmp_path, sed=1)
    assert set(threading.enumerate()) <= before


def test_llm_nobody_can_reach_is_closed(tiny_llama: Path) -> None:
    before = threading.active_count()
    llm = LLM(model=tiny_llama, transport="local", pipeline_parallel_size=2)
    assert threading.active_count() > before
    del llm
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def run_script(folder: Path, body: str, **options: Any) -> subprocess.Popen[str]:
    """A script of its own that has an `llm`; warnings are errors there too."""
    given = {"model": str(folder), "transport": "local", **options}
    code = f"from wavepp import LLM\nllm = LLM(**{given!r})\n{textwrap.dedent(body)}"
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )


def test_llm_left_open_ends_cleanly_with_the_interpreter(tiny_llama: Path) -> None:
    with run_script(tiny_llama, "print(len(llm.prefill(['a', 'b'])))") as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "2\n", "")


def test_interrupt_aborts_and_leaves_the_llm_usable(tiny_llama: Path) -> None:
    body = """
    print("ready", flush=True)
    try:
        llm.prefill([[5] * 4000] * 200)
        print("finished")
    except KeyboardInterrupt:
        print("interrupted")
    print(len(llm.prefill([[5, 6]])))
    stats = llm.stats()
    print(stats.requests_waiting + stats.requests_running)
    llm.close()
    """
    with run_script(tiny_llama, body, max_num_batched_tokens=16, block_size=16) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert out == "interrupted\n1\n0\n"


def test_llm_that_is_collected_in_its_own_thread_is_closed(tiny_llama: Path) -> None:
    process = run_script(
        tiny_llama,
        """
        import asyncio, gc, threading, time
        loop = llm._loop._loop
        llm.itself = llm
        del llm
        async def collect():
            gc.collect()
        asyncio.run_coroutine_threadsafe(collect(), loop).result(60)
        deadline = time.monotonic() + 30
        while threading.active_count() > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        print([thread.name for thread in threading.enumerate()])
        """,
    )
    out, err = process.communicate(timeout=120)
    assert (out, err, process.returncode) == ("['MainThread']\n", "", 0)


@pytest.mark.parametrize(
    "prompts",
    [
        np.array([5, 6, 7]),
        list(np.array([5, 6, 7])),
        [list(np.array([5, 6, 7]))],
        [np.array([5, 6, 7], dtype=np.uint16)],
        [tuple(torch.tensor([5, 6, 7]))],
        [torch.tensor([5, 6, 7])],
        [range(5, 8)],
    ],
)
def test_token_ids_come_as_numbers_of_any_library(llm: LLM, prompts: Any) -> None:
    (expected,), (got,) = llm.prefill([[5, 6, 7]]), llm.prefill(prompts)
    assert got.token_ids == expected.token_ids
    assert got.num_prompt_tokens == 3


@pytest.mark.parametrize("token", [1.0, np.float32(1), True, np.True_, np.array([1, 2]), "1", None])
def test_token_ids_that_are_no_whole_numbers_are_refused(llm: LLM, token: Any) -> None:
    with pytest.raises(RequestError):
        llm.prefill([[5, token]])
