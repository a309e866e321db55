"""A stage of a batch's pipeline is killed under way: the batch ends with all its answers."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from wavepp.batch.runner import BatchRun, Tally
from wavepp.config import EngineConfig
from wavepp.engine import Engine
from wavepp.requests import EngineStats

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

LINES = 80
SHARED = list(range(5, 37))


class Watcher:
    """Tells nobody; kills a stage once, if it may, when the first lines are answered."""

    def __init__(self, *, kills: bool) -> None:
        self._kills = kills
        self.killed: int | None = None

    def update(self, tally: Tally, stats: EngineStats) -> None:
        if self._kills and self.killed is None and 1 <= tally.answered < LINES:
            self.killed = stats.stages[1].pid
            os.kill(self.killed, signal.SIGKILL)

    def close(self) -> None:
        pass


def config(folder: Path, transport: str) -> EngineConfig:
    return EngineConfig(
        model=folder,
        transport=transport,
        pipeline_parallel_size=2,
        threads_per_stage=1,
        block_size=16,
        max_num_batched_tokens=32,
        max_num_seqs=4,
    )


def answers(path: Path) -> list[tuple[Any, ...]]:
    """What each line was answered: ids and times aside."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    bodies = [(line["custom_id"], line["response"]["body"]) for line in lines]
    return [
        (name, body["choices"], body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"])
        for name, body in bodies
    ]


async def test_a_batch_goes_on_when_a_stage_is_killed(
    ray_session: Any, tiny_llama: Path, tmp_path: Path
) -> None:
    source = tmp_path / "in"
    prompts = [[*SHARED[: 8 * (n % 5)], *range(40 + n, 80 + n)] for n in range(LINES)]
    source.write_text(
        "".join(
            json.dumps({"custom_id": f"l{n}", "prompt": prompt, "max_tokens": 1 + n % 20}) + "\n"
            for n, prompt in enumerate(prompts)
        )
    )
    disturbed, calm = config(tiny_llama, "ray"), config(tiny_llama, "local")
    killer = Watcher(kills=True)
    async with Engine(disturbed) as engine:
        report = await BatchRun(disturbed, str(source), str(tmp_path / "out")).run(engine, killer)
        assert report.after is not None
        assert killer.killed is not None
        assert report.after.stage_restarts == 1
        assert killer.killed not in [stage.pid for stage in report.after.stages]
    assert (report.tally.answered, report.tally.errors) == (LINES, 0)
    async with Engine(calm) as engine:
        await BatchRun(calm, str(source), str(tmp_path / "calm")).run(engine, Watcher(kills=False))
    assert answers(tmp_path / "out") == answers(tmp_path / "calm")
