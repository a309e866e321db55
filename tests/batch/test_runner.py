"""Whole batches on a real engine: order, errors, and taking a killed run up again."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from wavepp.batch.runner import BatchReport, BatchRun, SeenIds, Tally
from wavepp.config import EngineConfig
from wavepp.engine import Engine
from wavepp.errors import ConfigError
from wavepp.requests import EngineStats

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class Silence:
    """Progress that only counts how often it was told."""

    def __init__(self) -> None:
        self.updates = 0

    def update(self, tally: Tally, stats: EngineStats) -> None:
        self.updates += 1

    def close(self) -> None:
        pass


class Batch:
    """One input file, one output file, and runs over them."""

    def __init__(self, folder: Path, model: Path, **options: Any) -> None:
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        base = {"model": model, "transport": "local", "threads_per_stage": 1}
        self.config = EngineConfig(**{**base, **options})

    def ask(self, lines: Sequence[Any]) -> None:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        self.input.write_text("".join(text + "\n" for text in texts))

    def plan(self, *, resume: bool = False) -> BatchRun:
        return BatchRun(self.config, str(self.input), str(self.output), resume=resume)

    async def run(self, engine: Engine, *, resume: bool = False) -> BatchReport:
        return await self.plan(resume=resume).run(engine, Silence())

    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]


@pytest.fixture
def batch(tmp_path: Path, tiny_llama: Path) -> Batch:
    return Batch(tmp_path, tiny_llama, pipeline_parallel_size=2, max_num_batched_tokens=64)


def openai(number: int, body: dict[str, Any], url: str = COMPLETIONS) -> dict[str, Any]:
    return {"custom_id": f"c{number}", "method": "POST", "url": url, "body": body}


MIXED: list[Any] = [
    {"prompt": "The quick brown fox", "logprobs": 2},
    openai(1, {"prompt": ["one", "two"], "prompt_logprobs": 1}),
    openai(2, {"messages": [{"role": "user", "content": "Hi"}]}, CHAT),
    "not json",
    openai(3, {"prompt": [5, 6, 7], "max_tokens": 0}),
    openai(1, {"prompt": "same id"}),
    {"prompt_token_ids": list(range(5, 400))},
    openai(4, {"prompt": "ü" * 50, "model": "tiny-llama"}),
]


async def test_answers_come_in_the_order_of_the_lines(batch: Batch) -> None:
    rng = random.Random(5)
    batch.ask([openai(n, {"prompt": [5] * rng.randint(1, 300)}) for n in range(150)])
    async with Engine(batch.config) as engine:
        report = await batch.run(engine)
    assert [a["custom_id"] for a in batch.answers()] == [f"c{n}" for n in range(150)]
    assert (report.tally.answered, report.tally.errors, report.tally.total) == (150, 0, 150)
    usages = [a["response"]["body"]["usage"]["prompt_tokens"] for a in batch.answers()]
    assert report.tally.input_tokens == sum(usages)
    assert report.before is not None
    assert report.after is not None
    assert report.after.prompt_tokens - report.before.prompt_tokens == sum(usages)


async def test_one_bad_line_in_a_thousand_costs_one_answer(batch: Batch) -> None:
    lines: list[Any] = [openai(n, {"prompt": [5 + n % 300, 6]}) for n in range(1000)]
    lines[617] = '{"custom_id": "c617", "method": "POST", "url": "/v1/completions", "body": {'
    batch.ask(lines)
    async with Engine(batch.config) as engine:
        await batch.run(engine)
    answers = batch.answers()
    assert len(answers) == 1000
    assert [n for n, answer in enumerate(answers) if answer["error"] is not None] == [617]
    assert answers[617]["error"]["code"] == "bad_json"


BAD_LINES: list[tuple[Any, str, int]] = [
    ({"prompt": ""}, "empty_prompt", 400),
    ({"prompt": ["fine", ""]}, "empty_prompt", 400),
    ({"prompt": [511, 512]}, "bad_token", 400),
    ({"prompt": [5] * 4097}, "prompt_too_long", 400),
    ({"prompt": "a", "cache_salt": "s" * 1025}, "invalid_request", 400),
    ({"prompt": "a", "logprobs": 100}, "invalid_request", 400),
    ({"prompt": "a", "max_tokens": 5000}, "context_length_exceeded", 400),
    ({"prompt": "a", "model": "other"}, "model_not_found", 404),
    ({"prompt": "a\ud800"}, "bad_text", 400),
    (openai(1, {"messages": [{"role": "user", "content": None}]}, CHAT), "chat_template", 400),
]


async def test_every_bad_line_is_answered_and_hurts_no_other(batch: Batch) -> None:
    lines = [line for bad, _, _ in BAD_LINES for line in (bad, {"prompt": "good"})]
    batch.ask(lines)
    async with Engine(batch.config) as engine:
        await batch.run(engine)
    answers = batch.answers()
    found = [(a["error"]["code"], a["response"]["status_code"]) for a in answers[::2]]
    assert found == [(code, status) for _, code, status in BAD_LINES]
    assert all(answer["error"] is None for answer in answers[1::2])


def check_same(first: bytes, second: bytes) -> None:
    """Equal but for the last digits of log probabilities, which depend on how waves were packed."""

    def parts(output: bytes) -> tuple[list[Any], list[float]]:
        floats: list[float] = []

        def take(text: str) -> None:
            floats.append(float(text))

        return [json.loads(line, parse_float=take) for line in output.splitlines()], floats

    (lines, logprobs), (other_lines, other_logprobs) = parts(first), parts(second)
    assert lines == other_lines
    assert logprobs == pytest.approx(other_logprobs, abs=2e-3)


async def test_output_cut_at_any_place_is_taken_up_to_the_same_file(
    tmp_path: Path, tiny_llama: Path
) -> None:
    """Without reuse, for usage says how much of a prompt was found in the cache."""
    options = {"pipeline_parallel_size": 2, "max_num_batched_tokens": 64}
    batch = Batch(tmp_path, tiny_llama, **options, enable_prefix_caching=False)
    batch.ask(MIXED)
    async with Engine(batch.config) as engine:
        await batch.run(engine)
        whole = batch.output.read_bytes()
        ends = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
        rng = random.Random(1)
        places = {0, 1, *ends, *(end - 1 for end in ends), *(end + 1 for end in ends)}
        places |= {rng.randrange(len(whole)) for _ in range(25)}
        for place in sorted(places & set(range(len(whole) + 1))):
            batch.output.write_bytes(whole[:place])
            plan = batch.plan(resume=True)
            assert plan.tally.kept == sum(end <= place for end in ends)
            if plan.is_finished():
                assert place == len(whole)
                plan.finish_without_engine()
            else:
                await plan.run(engine, Silence())
            again, kept = batch.output.read_bytes(), max([0, *(e for e in ends if e <= place)])
            assert again[:kept] == whole[:kept], place
            check_same(again, whole)


async def test_batch_taken_up_with_reuse_gives_the_same_answers(batch: Batch) -> None:
    """A warm cache changes the cached tokens in usage, and no answer."""
    batch.ask([{"prompt": f"{'the same long start ' * 20}{end}"} for end in range(8)])
    async with Engine(batch.config) as engine:
        await batch.run(engine)
        whole = batch.output.read_bytes()
        expected = batch.answers()
        kept = whole[: whole.index(b"\n", len(whole) // 2) + 1]
        batch.output.write_bytes(whole[: len(kept) + 100])
        report = await batch.run(engine, resume=True)
    assert batch.output.read_bytes().startswith(kept)
    assert 0 < report.tally.cached_tokens < report.tally.input_tokens
    for answer, other in zip(batch.answers(), expected, strict=True):
        bodies = (answer["response"]["body"], other["response"]["body"])
        assert bodies[0]["choices"] == bodies[1]["choices"]
        assert answer["custom_id"] == other["custom_id"]


async def test_torn_line_after_the_last_answer_is_dropped_without_an_engine(batch: Batch) -> None:
    batch.ask(MIXED)
    async with Engine(batch.config) as engine:
        await batch.run(engine)
    whole = batch.output.read_bytes()
    batch.output.write_bytes(whole + b'{"id": "torn')
    plan = batch.plan(resume=True)
    assert plan.is_finished()
    report = plan.finish_without_engine()
    assert (report.tally.kept, report.tally.answered) == (len(MIXED), 0)
    assert report.tally.errors == 2
    assert batch.output.read_bytes() == whole


async def test_kept_lines_stay_byte_for_byte(batch: Batch) -> None:
    batch.ask([{"prompt": "a"}, {"prompt": "b"}])
    async with Engine(batch.config) as engine:
        await batch.run(engine)
        first, second = batch.output.read_bytes().splitlines(keepends=True)
        spaced = first.replace(b'"custom_id"', b'  "custom_id"')
        batch.output.write_bytes(spaced)
        await batch.run(engine, resume=True)
    assert batch.output.read_bytes() == spaced + second


async def test_id_that_came_before_the_cut_is_still_a_duplicate(batch: Batch) -> None:
    batch.ask(MIXED)
    async with Engine(batch.config) as engine:
        await batch.run(engine)
        lines = batch.output.read_bytes().splitlines(keepends=True)
        batch.output.write_bytes(b"".join(lines[:4]))
        await batch.run(engine, resume=True)
    codes = [answer["error"] and answer["error"]["code"] for answer in batch.answers()]
    assert codes == [None, None, None, "bad_json", None, "duplicate_custom_id", None, None]


async def test_output_of_another_input_is_not_taken_up(batch: Batch, tiny_llama: Path) -> None:
    batch.ask([{"prompt": "a"}, {"prompt": "b"}])
    async with Engine(batch.config) as engine:
        await batch.run(engine)
    whole = batch.output.read_bytes()
    batch.ask([{"prompt": "a"}, {"prompt": "changed"}])
    with pytest.raises(ConfigError, match="line 2: not the answer to line 2 of the input"):
        batch.plan(resume=True)
    batch.ask([{"prompt": "a"}])
    with pytest.raises(ConfigError, match="more lines than"):
        batch.plan(resume=True)
    batch.ask([{"prompt": "a"}, {"prompt": "b"}])
    batch.config = EngineConfig(model=tiny_llama, served_model_name="other", transport="local")
    with pytest.raises(ConfigError, match=r"holds answers of model .*, not 'other'"):
        batch.plan(resume=True)
    assert batch.output.read_bytes() == whole


@pytest.mark.parametrize("junk", [b"words\n", b"[1]\n", b'{"id": 5}\n', b"\xff\n", b"\n"])
def test_output_that_run_batch_never_wrote_is_left_alone(batch: Batch, junk: bytes) -> None:
    batch.ask([{"prompt": "a"}])
    batch.output.write_bytes(junk)
    with pytest.raises(ConfigError, match="line 1: not an answer of run-batch"):
        batch.plan(resume=True)
    assert batch.output.read_bytes() == junk


def test_files_that_exclude_each_other_are_refused(batch: Batch) -> None:
    batch.ask([{"prompt": "a"}])
    with pytest.raises(ConfigError, match="is the input file"):
        BatchRun(batch.config, str(batch.input), str(batch.input))
    with pytest.raises(ConfigError, match="needs an output file"):
        BatchRun(batch.config, str(batch.input), "-", resume=True)


def test_planning_a_run_does_not_touch_the_output(batch: Batch) -> None:
    batch.ask([{"prompt": "a"}])
    batch.output.write_text("precious")
    batch.plan()
    assert batch.output.read_text() == "precious"


async def test_empty_input_makes_an_empty_output(batch: Batch) -> None:
    batch.ask(["", "   "])
    batch.output.write_text("old")
    plan = batch.plan()
    assert plan.is_finished()
    assert plan.finish_without_engine().tally == Tally(total=0)
    assert batch.output.read_bytes() == b""


async def test_window_bounds_what_is_in_flight(batch: Batch, tiny_llama: Path) -> None:
    batch.config = EngineConfig(
        model=tiny_llama, transport="local", max_num_queued_reqs=3, max_num_seqs=2
    )
    batch.ask([{"prompt": [5] * 20} for _ in range(60)])
    most = 0
    async with Engine(batch.config) as engine:
        assert engine.window == 3

        class Watcher(Silence):
            def update(self, tally: Tally, stats: EngineStats) -> None:
                nonlocal most
                most = max(most, stats.requests_waiting + stats.requests_running)

        await batch.plan().run(engine, Watcher())
    assert all(answer["error"] is None for answer in batch.answers())
    assert most <= 5


async def test_cancelled_run_leaves_whole_lines(batch: Batch) -> None:
    batch.ask([{"prompt": [5] * 100} for _ in range(200)])
    async with Engine(batch.config) as engine:
        running = asyncio.create_task(batch.run(engine))
        while not batch.output.exists() or batch.output.stat().st_size < 2000:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        done = batch.output.read_bytes()
        assert done.endswith(b"\n")
        assert 0 < done.count(b"\n") < 200
        await batch.run(engine, resume=True)
    assert batch.output.read_bytes().startswith(done)
    assert len(batch.answers()) == 200


def test_seen_ids_tell_the_second_from_the_first() -> None:
    seen = SeenIds()
    assert [seen.add(text) for text in ("a", "b", "a", "", "", "\ud800")] == [
        True,
        True,
        False,
        True,
        False,
        True,
    ]


@pytest.mark.parametrize("way", ["{name}", "../{folder}/{name}", "link"])
@pytest.mark.parametrize(("file", "name"), [("input", "in.jsonl"), ("output", "out.jsonl")])
def test_trace_overwrites_no_file_of_the_batch(
    tmp_path: Path, tiny_llama: Path, file: str, name: str, way: str
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / name)
    trace = tmp_path / way.format(name=name, folder=tmp_path.name)
    batch = Batch(tmp_path, tiny_llama, trace=trace)
    batch.ask([{"prompt": "a"}])
    before = batch.input.read_bytes()
    with pytest.raises(ConfigError, match=f"trace .*: is the {file} file"):
        batch.plan()
    assert batch.input.read_bytes() == before
    assert not batch.output.exists()
