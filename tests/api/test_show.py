"""Results and snapshots as notebooks and terminals show them."""

from __future__ import annotations

import dataclasses
import io
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from wavepp import LLM
from wavepp.requests import EngineStats, PrefillResult, PrefillResults, RequestTimings

TIMES = RequestTimings(queued_s=10.0, admitted_s=10.002, first_token_s=10.25, done_s=12.5)
RESULT = PrefillResult(
    request_id="a",
    token_ids=(7, 8),
    finish_reason="length",
    num_prompt_tokens=2000,
    num_cached_tokens=1500,
    timings=TIMES,
)


class Cells(HTMLParser):
    """The texts of all cells, row by row; and every tag that is open at the end."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("th", "td"):
            self.rows[-1][-1] += data


def cells(shown: PrefillResult | PrefillResults | EngineStats) -> list[list[str]]:
    parsed = Cells(shown._repr_html_())
    assert parsed.open == []
    return parsed.rows


def drawn(shown: object) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_result_is_shown_fact_by_fact() -> None:
    facts = dict(row for row in cells(RESULT))
    assert facts == {
        "finish reason": "length",
        "prompt tokens": "2,000",
        "of them reused": "1,500 (75.0%)",
        "tokens": "7 8",
        "admitted after": "2.0 ms",
        "first token after": "250.0 ms",
        "done after": "2.50 s",
    }
    text = drawn(RESULT)
    assert "request a" in text
    assert all(name in text and fact in text for name, fact in facts.items())


def test_what_comes_from_outside_is_text_and_no_markup() -> None:
    sly = "</td><script>alert(1)</script> [bold red]x[/bold red]"
    result = dataclasses.replace(RESULT, request_id="<b>", text=sly, error="[/] & <i>")
    facts = dict(row for row in cells(result))
    assert (facts["text"], facts["error"]) == (sly, "[/] & <i>")
    assert "<script>" not in result._repr_html_()
    assert "[bold red]x[/bold red]" in drawn(result)


def test_long_answers_are_cut_and_say_so() -> None:
    result = dataclasses.replace(RESULT, token_ids=tuple(range(40)), text="y" * 1000)
    facts = dict(row for row in cells(result))
    assert facts["tokens"] == "0 1 2 3 4 5 6 7 8 9 10 11 and 28 more"
    assert facts["text"] == "y" * 200 + "..."
    title = cells(PrefillResults([result] * 250))
    assert len(title) == 1 + 100
    assert "250 results, the first 100" in PrefillResults([result] * 250)._repr_html_()


@pytest.fixture(scope="module")
def run(tiny_llama: Path) -> tuple[PrefillResults, EngineStats]:
    prompt = list(range(5, 105))
    with LLM(tiny_llama, pipeline_parallel_size=2, transport="local", block_size=16) as llm:
        llm.prefill([prompt])
        asked = llm.prefill([[*prompt, 9], [*prompt, 11, 12]], logprobs=1, prompt_logprobs=1)
        assert isinstance(asked, PrefillResults)
        return asked, llm.stats()


def test_real_results_are_a_table(run: tuple[PrefillResults, EngineStats]) -> None:
    results, _ = run
    head, *rows = cells(results)
    assert head[:4] == ["request", "finish reason", "prompt tokens", "reused"]
    for result, row in zip(results, rows, strict=True):
        assert row[:3] == [result.request_id, "length", str(result.num_prompt_tokens)]
        assert row[3].startswith(f"{result.num_cached_tokens} (")
        assert row[5] == str(result.token_ids[0])
        assert result.request_id in drawn(results)
        facts = dict(each for each in cells(result))
        assert result.logprobs is not None
        assert facts["log probabilities"] == f"{result.logprobs[0].chosen.logprob:.3f}"
        known = result.num_prompt_tokens - 1
        assert facts["prompt log probabilities"].startswith(f"{known}, sum -")


def test_a_real_snapshot_shows_engine_and_stages(
    run: tuple[PrefillResults, EngineStats],
) -> None:
    _, stats = run
    rows = cells(stats)
    facts = dict(row for row in rows if len(row) == 2)
    share = stats.prefix_hits / stats.prefix_queries
    assert facts["requests"] == "0 running, 0 waiting, 3 finished"
    assert facts["reused on every stage"] == f"{stats.prefix_hits} ({share:.1%})"
    assert facts["waves"] == f"{stats.waves}, 0 of {stats.ring_depth} in flight"
    stages = [row for row in rows if len(row) > 2][1:]
    assert [row[0] for row in stages] == ["0", "1"]
    for row, stage in zip(stages, stats.stages, strict=True):
        assert row[1] == f"{stage.layers[0]}-{stage.layers[1] - 1}"
        assert row[5:] == ["0", f"{stage.blocks_cached}", f"{stage.blocks_total:,}", "0"]
        assert "no_wave" in row[4]
        assert stage._repr_html_().count("<tr>") == 2
    text = drawn(stats)
    assert "engine" in text
    assert "stages" in text
    assert all(fact in text for fact in facts.values())
