"""The demo's document questions, twice in one engine: the second time most of each is reused."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from wavepp.batch.runner import BatchReport, BatchRun, Tally
from wavepp.config import EngineConfig
from wavepp.engine import Engine
from wavepp.requests import EngineStats

PROMPTS = Path(__file__).parents[2] / "examples" / "prompts.jsonl"


class Silence:
    def update(self, tally: Tally, stats: EngineStats) -> None:
        pass

    def close(self) -> None:
        pass


def document_questions() -> str:
    """Lines of the demo that ask about the handbook."""
    lines = PROMPTS.read_text().splitlines(keepends=True)
    return "".join(line for line in lines if "prompt" in json.loads(line)["body"])


def texts(output: Path) -> list[Any]:
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    return [answer["response"]["body"]["choices"][0]["text"] for answer in answers]


@pytest.mark.timeout(600)
async def test_second_run_of_the_same_questions_is_three_times_faster(
    smollm2_folder: Path, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(document_questions())
    config = EngineConfig(
        model=str(smollm2_folder),
        transport="local",
        pipeline_parallel_size=2,
        max_num_batched_tokens=512,
        threads_per_stage=1,
    )
    reports: list[BatchReport] = []
    cpu_s: list[float] = []  # of this process, which is the whole pipeline: load does not count
    outputs = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    async with Engine(config) as engine:
        for output in outputs:
            started_s = time.process_time()
            run = BatchRun(config, str(source), str(output), resume=False)
            reports.append(await run.run(engine, Silence()))
            cpu_s.append(time.process_time() - started_s)
    first, second = (report.tally for report in reports)
    assert first.input_tokens == second.input_tokens
    assert second.cached_tokens / second.input_tokens > 0.95
    assert first.cached_tokens / first.input_tokens > 0.5  # they wait for one another's prefix
    assert texts(outputs[0]) == texts(outputs[1])
    assert cpu_s[0] > 3 * cpu_s[1], cpu_s
