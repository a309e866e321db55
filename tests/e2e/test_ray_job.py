"""`ray job submit -- wavepp run-batch ...` on a real cluster with its dashboard.

The cluster has ports, a folder and a token of its own, and is ended by its own process (`ray stop`
would end every Ray on the machine).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from e2e_commands import (
    BIN,
    clean_environment,
    make_tiny,
    processes_with,
    read_jsonl,
    run,
    same_answers,
    wait_until,
    write_jsonl,
)

START_TRIES = 2
START_S = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCluster:
    """A head node: how to reach it, and the process that holds it up."""

    address: str
    env: dict[str, str]
    folder: str
    process: subprocess.Popen[bytes]

    def stop(self) -> None:
        """What Ctrl-C does to `ray start --block`."""
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in opened:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in opened]


def start_cluster(folder: str) -> RunningCluster | None:
    """Starts a head node; None if it is not up in time."""
    env = clean_environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    port, dashboard, agent, client = free_ports(4)
    command = [str(BIN / "ray"), "start", "--head", "--block", "--disable-usage-stats"]
    command += ["--num-cpus=2", f"--temp-dir={folder}", f"--port={port}"]
    command += ["--include-dashboard=true", "--dashboard-host=127.0.0.1"]
    command += [f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"]
    command += [f"--ray-client-server-port={client}"]
    with open(os.path.join(folder, "start.log"), "wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{dashboard}"
    cluster = RunningCluster(address=address, env=env, folder=folder, process=process)
    listing = [str(BIN / "ray"), "job", "list", "--address", address]

    def answers() -> bool:
        return process.poll() is not None or run(listing, env=env).returncode == 0

    if wait_until(answers, seconds=START_S) and process.poll() is None:
        return cluster
    cluster.stop()
    return None


@pytest.fixture
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
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def readme_line(first: str) -> str:
    """The README's command that begins so."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (line,) = [line for line in readme.splitlines() if line.startswith(first)]
    return line


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_batch_runs_as_a_ray_job(cluster: RunningCluster, tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "tiny")
    lines = [
        {
            "custom_id": f"line-{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": list(range(3, 20 + 7 * i)), "max_tokens": 1, "logprobs": 2},
        }
        for i in range(12)
    ]
    source = write_jsonl(tmp_path / "in.jsonl", lines)
    flags = ["--model", str(model), "-pp", "2", "--dtype", "float32"]
    batch = ["wavepp", "run-batch", "-i", str(source), *flags]

    submit = readme_line("ray job submit")
    submit = submit.replace("submit", f"submit --address {cluster.address}", 1)
    submit = submit.replace(" in.jsonl", f" {source}").replace("out.jsonl", f"{tmp_path}/job.jsonl")
    submit = submit.replace("MODEL_FOLDER -pp 8", f"{model} -pp 2 --dtype float32")
    done = run(shlex.split(submit), env=cluster.env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "succeeded" in done.stdout
    assert "input tokens" in done.stdout

    alone = run([*batch, "-o", str(tmp_path / "alone.jsonl"), "--transport", "local"])
    assert alone.returncode == 0, alone.stderr
    answers = read_jsonl(tmp_path / "job.jsonl")
    assert [line["custom_id"] for line in answers] == [line["custom_id"] for line in lines]
    assert same_answers(answers, read_jsonl(tmp_path / "alone.jsonl"))

    # The job leaves the cluster as it found it: no actor lives, and the next job may come.
    states = ["ray", "list", "actors", "--address", cluster.address, "--format", "json"]
    listed = run([*states, "--filter", "state=ALIVE"], env=cluster.env)
    assert listed.returncode == 0, listed.stderr
    assert "StageActor" not in listed.stdout, listed.stdout

    cluster.stop()
    assert wait_until(lambda: processes_with(cluster.folder) == [], seconds=20), processes_with(
        cluster.folder
    )
