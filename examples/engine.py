"""An engine in a program of your own: requests side by side, one given up, a look at the stages.

python examples/engine.py MODEL_FOLDER
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

from wavepp import Engine, EngineConfig

PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "Monday, Tuesday, Wednesday,",
]


async def main(model: str) -> None:
    """Runs the prompts at once on two stages in this process."""
    config = EngineConfig(model=model, pipeline_parallel_size=2, transport="local")
    async with Engine(config) as engine:
        results = await asyncio.gather(*(engine.prefill(text, logprobs=2) for text in PROMPTS))
        for text, result in zip(PROMPTS, results, strict=True):
            assert engine.tokenizer is not None
            print(f"{text}{engine.tokenizer.decode(result.token_ids)}")

        # Cancelling the task that waits is how a request is given up; others don't notice.
        unwanted = asyncio.create_task(engine.prefill("never mind " * 200))
        await asyncio.sleep(0.01)
        unwanted.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await unwanted

        stats = await engine.stats()
        for stage in stats.stages:
            first, end = stage.layers
            print(f"stage {stage.stage}: layers {first}-{end - 1}, {stage.waves} waves")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
