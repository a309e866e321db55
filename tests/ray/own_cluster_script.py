"""A program with an engine on a Ray of its own; test_leftovers.py runs it in several ways."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "actors"))

from checksum_executor import assert_served, checksum, checksum_100ms, crashes_on_build
from pipelines import STANDARD, config_of, request

from wavepp.actors.ray.launch import RayPipeline

OPTIONS = {**STANDARD, "pipeline_parallel_size": 3, "transport": "ray"}


async def main(mode: str) -> None:
    factory = {"failed-start": crashes_on_build, "interrupted": checksum_100ms}.get(mode, checksum)
    pipeline = RayPipeline(config_of(**OPTIONS), factory)
    await pipeline.start()
    print("started", flush=True)  # noqa: T201  # read by the test
    if mode == "unclosed":
        await pipeline.submit(request([5]))
        return
    try:
        if mode == "interrupted":
            work = [pipeline.submit(request([5] * 150)) for _ in range(50)]
            await asyncio.gather(*work)
        assert_served(await pipeline.submit(request([5] * 30)), [5] * 30, 3)
        if mode == "exception":
            raise ValueError("the program's own trouble")
    finally:
        await pipeline.close()
    print("done", flush=True)  # noqa: T201  # read by the test


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
