"""What only Ray can show: placement, rings deeper than Ray's defaults, deaths, idleness."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from checksum_executor import assert_served, checksum, checksum_20ms, refuses_to_build
from leftovers import actor_processes, assert_nothing_new, leftovers, stage_pids
from pipelines import STANDARD, assert_nothing_left, eventually, random_prompts, request, running
from ray_executors import sleeps_12s_once

from wavepp.errors import ConfigError, EngineDeadError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]

TWO_STAGES: dict[str, Any] = {**STANDARD, "pipeline_parallel_size": 2}


@pytest.fixture(autouse=True)
def no_actor_is_left() -> Iterator[None]:
    before = leftovers()
    yield
    assert_nothing_new(before)
    assert ray.is_initialized()


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@pytest.mark.alone
async def test_idle_pipeline_sleeps_and_wakes(tmp_path: Path) -> None:
    """Four stages over 20 s; then the next request. Before it, chunks overlap on the stages."""
    trace = tmp_path / "trace.jsonl"
    async with running("ray", checksum_20ms, **STANDARD, trace=str(trace)) as pipeline:
        assert_served(await pipeline.submit(request([5] * 128)), [5] * 128, 4)
        pids = await stage_pids(pipeline)
        known = {process.pid for process in actor_processes("DriverActor")}
        processes = [psutil.Process(pid) for pid in (*pids, *known)]
        assert len(processes) >= 5
        await asyncio.sleep(2)
        before = [cpu_seconds(process) for process in processes]
        started = time.monotonic()
        await asyncio.sleep(20)
        seconds = time.monotonic() - started
        shares = [
            (cpu_seconds(process) - start) / seconds
            for process, start in zip(processes, before, strict=True)
        ]
        assert max(shares) <= 0.06, shares
        waits = []
        for _ in range(5):
            timings = (await pipeline.submit(request([6]))).timings
            assert timings.first_wave_s is not None
            assert timings.done_s is not None
            waits.append(timings.done_s - timings.queued_s - 4 * 0.02)
            await asyncio.sleep(1)
        assert min(waits) < 0.1, waits
        await assert_nothing_left(pipeline)
    check_overlap(trace)


def check_overlap(trace: Path) -> None:
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    reports = {
        (record["value"]["wave"], record["value"]["report"]["ack"]["stage"]): (
            record["value"]["report"]
        )
        for record in records
        if record["kind"] == "wave"
    }
    for wave, following in pairwise(range(1, 9)):
        assert reports[following, 0]["forward_from_s"] < reports[wave, 3]["done_s"]
    assert reports[8, 0]["done_s"] < reports[6, 3]["done_s"]


async def test_ring_may_be_deeper_than_rays_default() -> None:
    options = {**STANDARD, "pipeline_parallel_size": 6, "num_gpu_blocks_override": 100}
    async with running("ray", checksum_20ms, **options) as pipeline:
        tasks = [asyncio.create_task(pipeline.submit(request([5] * 300))) for _ in range(2)]

        async def is_full() -> bool:
            return (await pipeline.stats()).ring_occupancy == 12

        await eventually(is_full)
        for task in tasks:
            assert_served(await task, [5] * 300, 6)


@pytest.mark.parametrize("partition", [(1, 3), (3, 1)])
async def test_answers_do_not_depend_on_the_partition(partition: tuple[int, ...]) -> None:
    prompts = random_prompts(5, 12)
    async with running("ray", checksum, **TWO_STAGES, layer_partition=partition) as pipeline:
        results = await asyncio.gather(*(pipeline.submit(request(p)) for p in prompts))
        await assert_nothing_left(pipeline)
    for result, prompt in zip(results, prompts, strict=True):
        assert_served(result, prompt, 4)


async def test_long_prompts_go_through_the_object_store() -> None:
    options = {
        **TWO_STAGES,
        "block_size": 64,
        "max_num_batched_tokens": 4096,
        "num_gpu_blocks_override": 400,
    }
    prompts = [[7 + seed] * 20_000 for seed in range(3)]
    async with running("ray", checksum, **options) as pipeline:
        results = await asyncio.gather(*(pipeline.submit(request(p)) for p in prompts))
        await assert_nothing_left(pipeline)
    for result, prompt in zip(results, prompts, strict=True):
        assert_served(result, prompt, 2)


async def test_a_stage_may_take_longer_than_rays_default() -> None:
    async with running("ray", sleeps_12s_once, **TWO_STAGES) as pipeline:
        started = time.monotonic()
        assert_served(await pipeline.submit(request([5] * 40)), [5] * 40, 2)
        assert time.monotonic() - started > 12


async def test_workers_have_patience_with_graphs() -> None:
    from wavepp.actors.ray.launch import RayPipeline

    pipeline = RayPipeline(config(TWO_STAGES), sleeps_12s_once)
    facts = await pipeline.start()
    await pipeline.close()
    assert [stage.weight_bytes for stage in facts] == [10_000_000] * 2


def config(options: dict[str, Any]) -> Any:
    from pipelines import config_of

    return config_of(transport="ray", **options)


async def test_stages_die_with_their_driver_in_any_epoch() -> None:
    before = {process.pid for process in actor_processes("DriverActor")}
    async with running("ray", checksum, **TWO_STAGES) as pipeline:
        os.kill((await stage_pids(pipeline))[1], signal.SIGKILL)

        async def is_replaced() -> bool:
            return (await pipeline.stats()).stage_restarts == 1

        await eventually(is_replaced, limit_s=60.0)
        stages = [psutil.Process(pid) for pid in await stage_pids(pipeline)]
        (driver,) = [p for p in actor_processes("DriverActor") if p.pid not in before]
        driver.kill()
        with pytest.raises(EngineDeadError, match="the driver died"):
            await pipeline.submit(request([5]))
        gone, alive = psutil.wait_procs(stages, timeout=15)
        assert (len(gone), alive) == (2, [])


async def test_missing_resources_are_a_config_error_with_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"no room for 2 stages of 100 CPU .* the cluster has 8 CPU"
    ):
        async with running(
            "ray", checksum, **TWO_STAGES, num_cpus_per_stage=100, wait_for_resources_s=0.5
        ):
            pytest.fail("started")


async def test_refused_configuration_is_one_sentence() -> None:
    with pytest.raises(ConfigError) as refused:
        async with running("ray", refuses_to_build, **TWO_STAGES):
            pytest.fail("started")
    assert str(refused.value) == "block_size 4 is not to the liking of stage 1"


async def test_cancelled_start_leaves_nothing() -> None:
    from wavepp.actors.ray.launch import RayPipeline

    groups, free = created_groups(), ray.available_resources()["CPU"]
    pipeline = RayPipeline(config(TWO_STAGES), checksum)
    start = asyncio.create_task(pipeline.start())
    await asyncio.sleep(1.0)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert created_groups() == groups

    async def is_free() -> bool:
        return bool(ray.available_resources()["CPU"] == free)

    await eventually(is_free)


def created_groups() -> set[str]:
    table = ray.util.placement_group_table()
    return {name for name, group in table.items() if group["state"] != "REMOVED"}


async def test_serial_admission_without_reservations_gives_right_answers() -> None:
    options = {**STANDARD, "admission": "serial", "reservation": "none"}
    prompts = random_prompts(11, 12)
    async with running("ray", checksum, **options) as pipeline:
        results = await asyncio.gather(*(pipeline.submit(request(p)) for p in prompts))
        await assert_nothing_left(pipeline)
    for result, prompt in zip(results, prompts, strict=True):
        assert_served(result, prompt, 4)
