"""Plain transformers beside the engine: one forward a prompt, in a process of its own.

`python -m wavepp.bench.baseline MODEL DTYPE THREADS` reads JSON lists of token ids, one a line,
and answers each with the seconds its forward took. It computes only while it is asked to.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Self

from wavepp.config import EngineConfig
from wavepp.errors import ConfigError

STREAM_LIMIT = 1 << 26


class TransformersBaseline:
    """The other process, as seen from this one."""

    def __init__(self, config: EngineConfig, threads: int) -> None:
        self.threads = threads
        self._config = config
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        arguments = [self._config.model, self._config.dtype, str(self.threads)]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "wavepp.bench.baseline",
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1"},
            limit=STREAM_LIMIT,
        )
        await self._answer()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.communicate()

    async def seconds(self, prompts: Sequence[Sequence[int]]) -> float:
        """How long the forwards of these prompts took, one after the other.

        Raises:
            ConfigError: transformers can't run this checkpoint.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        total_s = 0.0
        for prompt in prompts:
            self._process.stdin.write(json.dumps(list(prompt)).encode() + b"\n")
            await self._process.stdin.drain()
            total_s += await self._answer()
        return total_s

    async def _answer(self) -> float:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise ConfigError("the transformers baseline stopped; its error is above")
        return float(json.loads(line)["seconds"])


def main(model: str, dtype: str, threads: int) -> None:
    """The other process: loads the model, says so, then answers until its input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print must not mix with the answers
    sys.modules["fla"] = None  # type: ignore[assignment]  # its kernels need a GPU even to refuse
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(threads)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype="auto" if dtype == "auto" else getattr(torch, dtype), local_files_only=True
    )
    loaded.eval()
    with torch.inference_mode():
        loaded(torch.zeros((1, 16), dtype=torch.long), use_cache=True, logits_to_keep=1)
        _say(answers, 0.0)
        for line in sys.stdin:
            tokens = torch.tensor([json.loads(line)])
            began = time.perf_counter()
            loaded(tokens, use_cache=True, logits_to_keep=1)
            _say(answers, time.perf_counter() - began)


def _say(answers: Any, seconds: float) -> None:
    answers.write(json.dumps({"seconds": seconds}) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
