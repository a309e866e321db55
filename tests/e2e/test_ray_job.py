"""`ray job submit -- wavepp run-batch ...` on a real cluster of two nodes of one CPU each, so that
two stages of one CPU are on both of them."""

from __future__ import annotations

import json
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e_cluster import RunningCluster, start_cluster
from e2e_commands import (
    make_tiny,
    processes_with,
    read_jsonl,
    run,
    same_answers,
    wait_until,
    write_jsonl,
)

START_TRIES = 2
STAGES = ["-pp", "2", "--num-cpus-per-stage", "1"]
SMALL_WAVES = ["--max-num-batched-tokens", "64", "--dtype", "float32"]
"""Many in flight at once: more than Ray's own channels hold between two nodes."""

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    # Ray's sockets lie below this folder, and a socket's path may have 107 characters.
    folder = tempfile.mkdtemp(prefix="wpp-")
    try:
        started = None
        for _ in range(START_TRIES):
            started = started or start_cluster(folder)
        if started is None:
            pytest.fail(Path(folder, "start.log").read_text())
        try:
            yield started
        finally:
            started.stop()
        assert wait_until(lambda: processes_with(folder) == [], seconds=20), processes_with(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny")


def completions(count: int, **asked: Any) -> list[dict[str, Any]]:
    """Lines of a batch: prompts of 17 tokens and more."""
    return [
        {
            "custom_id": f"line-{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": [3 + j % 500 for j in range(17 + 7 * (i % 12))], **asked},
        }
        for i in range(count)
    ]


def channel_semaphores(cluster: RunningCluster) -> list[str]:
    """Names of semaphores that hold the pid of one of the cluster's processes."""
    started = [psutil.Process(process.pid) for process in cluster.processes]
    pids = [child.pid for each in started for child in each.children(recursive=True)]
    names = [path.name for path in Path("/dev/shm").glob("sem.*")]
    return [name for name in names if any(f"{pid}-" in name for pid in pids)]


def test_batch_runs_as_a_ray_job_on_two_nodes(
    cluster: RunningCluster, model: Path, tmp_path: Path
) -> None:
    lines = completions(12, max_tokens=1, logprobs=2)
    source = write_jsonl(tmp_path / "in.jsonl", lines)
    submit = readme_line("ray job submit")
    submit = submit.replace("submit", f"submit --address {cluster.address}", 1)
    submit = submit.replace(" in.jsonl", f" {source}").replace("out.jsonl", f"{tmp_path}/job.jsonl")
    submit = submit.replace("MODEL_FOLDER -pp 8", shlex.join([str(model), *STAGES, *SMALL_WAVES]))
    done = run(shlex.split(submit), env=cluster.env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "succeeded" in done.stdout
    assert "input tokens" in done.stdout

    batch = ["wavepp", "run-batch", "-i", str(source), "--model", str(model), *STAGES]
    batch += [*SMALL_WAVES, "-o", str(tmp_path / "alone.jsonl"), "--transport", "local"]
    alone = run(batch)
    assert alone.returncode == 0, alone.stderr
    answers = read_jsonl(tmp_path / "job.jsonl")
    assert [line["custom_id"] for line in answers] == [line["custom_id"] for line in lines]
    assert same_answers(answers, read_jsonl(tmp_path / "alone.jsonl"))

    stages = [row for row in cluster.state_of("actors") if row["class_name"] == "StageActor"]
    assert len({row["node_id"] for row in stages}) == len(stages) == 2
    # The job leaves the cluster as it found it, and the next job may come.
    assert cluster.alive("actors", "Actor") == []
    assert cluster.alive("placement_groups") == []
    assert channel_semaphores(cluster) == []


def test_stopped_job_leaves_nothing_running(
    cluster: RunningCluster, model: Path, tmp_path: Path
) -> None:
    lines = completions(3000, max_tokens=100, ignore_eos=True)
    source, target = write_jsonl(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    mark = f"mark-{tmp_path.name}"
    environment = json.dumps({"env_vars": {"WAVEPP_TEST_MARK": mark}})
    job = ["ray", "job", "submit", "--address", cluster.address, "--no-wait"]
    job += ["--submission-id", "stopped", "--runtime-env-json", environment, "--"]
    job += ["wavepp", "run-batch", "-i", str(source), "-o", str(target), "--model", str(model)]
    submitted = run([*job, *STAGES], env=cluster.env)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    assert wait_until(lambda: target.exists() and target.stat().st_size > 0, seconds=120)
    assert channel_semaphores(cluster)  # else nothing would be shown by their absence
    running = cluster.alive("actors", "StageActor")
    assert len({row["node_id"] for row in running}) == 2
    assert len(processes_with(mark)) > 4

    stopped = run(["ray", "job", "stop", "--address", cluster.address, "stopped"], env=cluster.env)
    assert "was stopped" in stopped.stdout, stopped.stdout + stopped.stderr
    assert wait_until(lambda: processes_with(mark) == [], seconds=30), processes_with(mark)
    assert cluster.alive("actors", "Actor") == []
    assert cluster.alive("placement_groups") == []
    assert len(cluster.alive("nodes")) == 2
    assert len(read_jsonl(target)) < len(lines)


def test_job_that_finds_no_room_says_what_it_lacks(
    cluster: RunningCluster, model: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", completions(1))
    job = ["ray", "job", "submit", "--address", cluster.address, "--"]
    job += ["wavepp", "run-batch", "-i", str(source), "-o", str(tmp_path / "out.jsonl")]
    job += ["--model", str(model), "-pp", "3", "--num-cpus-per-stage", "1"]
    done = run([*job, "--wait-for-resources-s", "1"], env=cluster.env)
    assert done.returncode == 1
    assert "failed with exit code 2" in done.stdout
    told = [line for line in done.stdout.splitlines() if line.startswith("wavepp: ")]
    assert told[0] == (
        "wavepp: Ray had no room for 3 stages of 1 CPU and 0 GPU each within wait_for_resources_s "
        "= 1 s; the cluster has 2 CPU and 0 GPU, free are 2 CPU and 0 GPU"
    )
    assert "Traceback" not in done.stdout
    assert cluster.alive("placement_groups") == []


def readme_line(first: str) -> str:
    """The README's command that begins so."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (line,) = [line for line in readme.splitlines() if line.startswith(first)]
    return line
