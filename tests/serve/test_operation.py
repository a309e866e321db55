"""Starting, replacing and stopping a server as operators do."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from conftest import ENGINE, free_port

from wavepp import ConfigError

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
from e2e_commands import clean_environment, processes_with, run, wait_until

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]


async def test_no_request_fails_while_the_server_is_replaced(
    serve_address: str, tiny_llama: Path
) -> None:
    from ray import serve

    from wavepp.serve import app_builder

    def deploy(lanes: int) -> None:
        fields = {"model": str(tiny_llama), **ENGINE, "transport": "local", "max_num_seqs": lanes}
        serve.run(app_builder(fields), name="replaced", route_prefix="/replaced")

    await asyncio.to_thread(deploy, 4)
    is_over = asyncio.Event()
    statuses: list[int] = []
    lanes: set[int] = set()

    async def load(client: httpx.AsyncClient, number: int) -> None:
        while not is_over.is_set():
            body = {"prompt": [5 + number] * 200, "max_tokens": 20, "ignore_eos": True}
            is_stream = number % 2 == 0
            answer = await client.post("/v1/completions", json={**body, "stream": is_stream})
            assert not is_stream or answer.text.endswith("data: [DONE]\n\n"), answer.text
            statuses.append(answer.status_code)
            info = (await client.get("/server_info")).json()
            lanes.add(info["config"]["max_num_seqs"])

    async with httpx.AsyncClient(base_url=f"{serve_address}/replaced", timeout=120) as client:
        tasks = [asyncio.create_task(load(client, number)) for number in range(6)]
        await asyncio.to_thread(deploy, 8)
        async with asyncio.timeout(200):
            while 8 not in lanes or len(statuses) < 12:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        is_over.set()
        await asyncio.gather(*tasks)
    await asyncio.to_thread(serve.delete, "replaced")
    assert set(statuses) == {200}
    assert 8 in lanes
    assert len(statuses) >= 12  # each client before and after


def readme_lines(first: str) -> str:
    """The README's bash block that begins with a command."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    (block,) = [block for block in blocks if block.startswith(first)]
    assert len(block.splitlines()) <= 5
    return str(block)


def test_server_lines_of_the_readme_run(smollm2_folder: Path, tmp_path: Path) -> None:
    port = str(free_port())
    lines = readme_lines("wavepp serve").replace("MODEL_FOLDER", str(smollm2_folder))
    script = tmp_path / "readme_server.sh"
    script.write_text("set -m\n" + lines.replace("8000", port))
    mark = str(tmp_path)
    done = run(["bash", str(script)], env=clean_environment(MARK=mark))
    assert done.returncode == 0, done.stderr
    answer = json.loads('{"id"' + done.stdout.rpartition('{"id"')[2])
    assert "Paris" in answer["choices"][0]["text"]
    assert answer["usage"]["completion_tokens"] == 8
    # it may be told to stop before it has itself seen that it answers, and says so
    is_told = done.stderr.rstrip().endswith("wavepp: interrupted")
    assert is_told or f"at http://127.0.0.1:{port}" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert wait_until(lambda: processes_with(mark) == [], seconds=30), processes_with(mark)


@pytest.mark.parametrize("there", ["gcs_server", "ServeController"])
def test_a_server_that_is_told_to_stop_while_it_starts_leaves_nothing(
    tiny_llama: Path, tmp_path: Path, there: str
) -> None:
    """While Ray starts, and while the application does."""
    mark, log = str(tmp_path), tmp_path / "serve.log"
    flags = ["--model", str(tiny_llama), "--transport", "local", "--port", str(free_port())]
    with log.open("w") as output:
        server = subprocess.Popen(
            ["wavepp", "serve", *flags], stderr=output, env=clean_environment(MARK=mark)
        )
    assert wait_until(lambda: any(there in line for line in processes_with(mark)), seconds=100)
    server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=120) == 128 + signal.SIGTERM, log.read_text()
    assert log.read_text().splitlines()[-1] == "wavepp: interrupted"
    assert wait_until(lambda: processes_with(mark) == [], seconds=60), processes_with(mark)


def both_run(port: int) -> bool:
    """Whether two requests are admitted."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    return "\nwavepp:num_requests_running 2.0\n" in text


def test_requests_in_flight_finish_when_the_server_is_told_to_stop(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Both a stream and a whole answer, seconds long, that were begun before SIGTERM."""
    port, mark, log = free_port(), str(tmp_path), tmp_path / "serve.log"
    flags = ["--model", str(tiny_llama), "--transport", "local", "--port", str(port)]
    flags += ["--threads-per-stage", "1", "--shutdown-timeout-s", "200"]  # others may be busy
    with log.open("w") as output:
        server = subprocess.Popen(
            ["wavepp", "serve", *flags], stderr=output, env=clean_environment(MARK=mark)
        )
    try:
        assert wait_until(lambda: "serving " in log.read_text(), seconds=200), log.read_text()
        body = {"prompt": [5, 6, 7], "max_tokens": 700, "ignore_eos": True, "temperature": 0.0}
        url = f"http://127.0.0.1:{port}/v1/completions"
        with ThreadPoolExecutor() as pool, httpx.Client(timeout=120) as client:
            whole = pool.submit(client.post, url, json=body)
            with client.stream("POST", url, json={**body, "stream": True}) as answer:
                chunks = answer.iter_lines()
                first = next(chunks)
                assert wait_until(partial(both_run, port), seconds=60)
                server.send_signal(signal.SIGTERM)
                rest = [line for line in chunks if line]
            assert first.startswith("data: {")
            assert rest[-1] == "data: [DONE]"
            assert whole.result().json()["usage"]["completion_tokens"] == 700
        assert server.wait(timeout=120) == 0
    finally:
        server.kill()
        server.wait()
    assert "Traceback" not in log.read_text()
    assert wait_until(lambda: processes_with(mark) == [], seconds=30), processes_with(mark)


def test_an_address_where_no_ray_is_is_one_line(tiny_llama: Path) -> None:
    prompts = str(ROOT / "examples" / "prompts.jsonl")
    flags = ["-i", prompts, "-o", "-", "--model", str(tiny_llama), "--wait-for-resources-s", "1"]
    for address, said in (("garbage", "HOST:PORT"), (f"127.0.0.1:{free_port()}", "not answer")):
        done = run(["wavepp", "run-batch", *flags], env=clean_environment(RAY_ADDRESS=address))
        assert done.returncode == 2, done.stderr
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_bad_options_are_one_line(tiny_llama: Path) -> None:
    flags = ["--model", str(tiny_llama), "--port", str(free_port())]
    unknown = run(["wavepp", "serve", *flags, "--max-body-mib", "-1"])
    assert unknown.returncode == 2
    assert "max_body_mib" in unknown.stderr.splitlines()[-1]
    assert "Traceback" not in unknown.stderr


def test_what_a_replica_finds_wrong_is_told_in_its_words(
    serve_address: str, tiny_llama: Path
) -> None:
    from ray import serve

    from wavepp.serve import app_builder
    from wavepp.serve.running import deploy

    assert serve_address
    fields = {"model": str(tiny_llama), "transport": "local", "layer_partition": [99]}
    with pytest.raises(ConfigError, match="layer_partition") as caught:
        deploy(app_builder(fields), name="bad", route="/bad")
    assert len(str(caught.value).splitlines()) == 1
    serve.delete("bad")


def test_the_shipped_serve_file_is_one(tiny_llama: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    from wavepp.serve import app_builder

    text = (ROOT / "examples" / "serve.yaml").read_text()
    loaded = yaml.safe_load(text.replace("MODEL_FOLDER", str(tiny_llama)))
    (application,) = ServeDeploySchema.model_validate(loaded).applications
    assert application.import_path == "wavepp.serve:app_builder"
    app_builder(application.args)
    with pytest.raises(ConfigError, match="is not a folder"):
        app_builder({**application.args, "model": "/nowhere"})


def test_bench_serve_prints_and_writes_what_it_measured(server: str, tmp_path: Path) -> None:
    out = tmp_path / "load.json"
    flags = ["--base-url", server, "--num-prompts", "12", "--max-concurrency", "4"]
    flags += ["--random-input-len", "60", "--random-prefix-len", "64", "--random-output-len", "3"]
    done = run(["wavepp", "bench", "serve", *flags, "--ignore-eos", "--json", str(out)])
    assert done.returncode == 0, done.stderr
    assert re.search(r"^Successful requests: +12 *$", done.stdout, re.M)
    for label in ("Request throughput", "Mean TTFT", "Median E2EL", "P99 ITL", "Mean TPOT"):
        assert label in done.stdout
    told: dict[str, Any] = json.loads(out.read_text())
    assert (told["completed"], told["failed"]) == (12, 0)
    assert told["total_input_tokens"] == 12 * 124
    assert told["total_output_tokens"] == 36
    assert 0 < told["total_cached_tokens"] <= 11 * 64
    assert 0 < told["mean_ttft_ms"] <= told["mean_e2el_ms"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hello"}\nplain text\n')
    more = ["--base-url", server, "--dataset-path", str(prompts), "--num-prompts", "4"]
    again = run(["wavepp", "bench", "serve", *more, "--request-rate", "50"])
    assert re.search(r"^Successful requests: +4 *$", again.stdout, re.M), again.stderr
    nobody = run(["wavepp", "bench", "serve", "--base-url", f"http://127.0.0.1:{free_port()}"])
    assert nobody.returncode == 2
    assert "Traceback" not in nobody.stderr
