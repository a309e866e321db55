"""What a batch makes of requests and pipelines that fail while they run."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from wavepp.actors.factories import torch_executor
from wavepp.actors.local import LocalPipeline
from wavepp.actors.ports import Carry, StageExecutor, StageOutput
from wavepp.batch.runner import BatchRun, Tally
from wavepp.cache.types import Effect
from wavepp.config import EngineConfig
from wavepp.control.work import StageFacts, StageWork
from wavepp.engine import Engine
from wavepp.errors import EngineDeadError
from wavepp.models.loader import INDEX_NAME
from wavepp.requests import EngineStats

POISON, SLEEP = 400, 401
released = threading.Event()


class Silence:
    def update(self, tally: Tally, stats: EngineStats) -> None:
        pass

    def close(self) -> None:
        pass


class FragileExecutor:
    """The real executor, but one token breaks it and another makes it sleep until released."""

    def __init__(self, inner: StageExecutor) -> None:
        self._inner = inner

    @property
    def facts(self) -> StageFacts:
        return self._inner.facts

    def materialize(self, effects: Sequence[Effect]) -> None:
        self._inner.materialize(effects)

    def forward(self, work: StageWork, carry: Carry | None) -> StageOutput:
        tokens = [token for span in work.spans for token in span.token_ids]
        if POISON in tokens:
            raise ValueError("poison")
        if SLEEP in tokens:
            assert released.wait(60)
        return self._inner.forward(work, carry)

    def close(self) -> None:
        self._inner.close()


def fragile_executor(config: EngineConfig, stage: int) -> StageExecutor:
    inner = torch_executor(config, stage)
    return FragileExecutor(inner) if stage == 1 else inner


def config(folder: Path, watchdog_s: float = 60.0) -> EngineConfig:
    return EngineConfig(
        model=folder,
        transport="local",
        pipeline_parallel_size=2,
        threads_per_stage=1,
        max_num_seqs=1,
        watchdog_s=watchdog_s,
    )


def write(path: Path, last_tokens: list[int]) -> Path:
    path.write_text("".join(json.dumps({"prompt": [5, 6, last]}) + "\n" for last in last_tokens))
    return path


async def test_request_that_breaks_a_stage_is_a_server_error_of_its_own(
    tiny_llama: Path, tmp_path: Path
) -> None:
    source, target = write(tmp_path / "in", [7, POISON, 8, 9]), tmp_path / "out"
    made = config(tiny_llama)
    async with Engine(made, backend=LocalPipeline(made, fragile_executor)) as engine:
        report = await BatchRun(made, str(source), str(target)).run(engine, Silence())
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [a["response"]["status_code"] for a in answers] == [200, 500, 200, 200]
    assert "poison" in answers[1]["error"]["message"]
    assert answers[1]["error"]["type"] == "server_error"
    assert (report.tally.answered, report.tally.errors) == (4, 1)


async def test_pipeline_that_dies_leaves_whole_lines_to_resume(
    tiny_llama: Path, tmp_path: Path
) -> None:
    source, target = write(tmp_path / "in", [7, 8, SLEEP, 9, 10]), tmp_path / "out"
    made = config(tiny_llama, watchdog_s=0.4)
    engine = Engine(made, backend=LocalPipeline(made, fragile_executor))
    await engine.start()
    try:
        with pytest.raises(EngineDeadError, match="no progress"):
            await BatchRun(made, str(source), str(target)).run(engine, Silence())
    finally:
        released.set()
        await engine.close()
    kept = target.read_bytes()
    assert kept.count(b"\n") == 2
    assert kept.endswith(b"\n")
    async with Engine(config(tiny_llama)) as healthy:
        run = BatchRun(healthy.config, str(source), str(target), resume=True)
        assert (await run.run(healthy, Silence())).tally.done == 5
    assert target.read_bytes().startswith(kept)
    assert target.read_bytes().count(b"\n") == 5


def with_a_token_of_nans(folder: Path, copy: Path) -> Path:
    """The same checkpoint, but what follows token POISON is not a number."""
    shutil.copytree(folder, copy)
    name = "model.embed_tokens.weight"
    file = copy / json.loads((copy / INDEX_NAME).read_text())["weight_map"][name]
    tensors = load_file(file)
    tensors[name][POISON] = float("nan")
    save_file(tensors, file)
    return copy


@pytest.mark.parametrize(
    "asked", [{}, {"logprobs": 2}, {"prompt_logprobs": 1, "max_tokens": 0}, {"temperature": 1.0}]
)
async def test_numbers_that_are_not_finite_are_an_error_of_that_line_alone(
    tiny_llama: Path, tmp_path: Path, asked: dict[str, Any]
) -> None:
    model = with_a_token_of_nans(tiny_llama, tmp_path / "model")
    prompts = [[5] * 20, [5, POISON] * 20, [6] * 40, [7, POISON, 8], [9]]
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("".join(json.dumps({"prompt": p, **asked}) + "\n" for p in prompts))
    made = config(model).model_copy(
        update={"max_num_seqs": 8, "block_size": 16, "max_num_batched_tokens": 16}
    )
    async with Engine(made) as engine:
        await BatchRun(made, str(source), str(target)).run(engine, Silence())
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [a["response"]["status_code"] for a in answers] == [200, 500, 200, 500, 200]
    assert all("not finite" in answers[at]["error"]["message"] for at in (1, 3))
