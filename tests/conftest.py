"""What every test stands on: no hub, no GPU-only packages, one thread, one Ray a session."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault(
    "RAY_worker_niceness", "0"
)  # the stages are what is tested, not a background job
# transformers binds fla wherever it is importable, and then fails without a GPU driver.
sys.modules["fla"] = None  # type: ignore[assignment]

import pytest
import torch

from wavepp.models import smollm2

torch.set_num_threads(1)
# A shell's background job ignores SIGINT, and so would all commands that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The real checkpoint, SmolLM2-135M-Instruct in float32. Tests never download it."""
    folder = smollm2.cache_folder() / smollm2.FOLDER_NAME
    if not smollm2.is_complete(folder):
        pytest.fail(f"{folder} is missing: scripts/test makes it (python -m wavepp.models.smollm2)")
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama with a tokenizer and a chat template."""
    from wavepp.models.tiny import make_tiny

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    make_tiny("llama", folder)
    return folder


@pytest.fixture(scope="session")
def ray_session() -> Iterator[Any]:
    """One Ray for all tests of this run that want one; two tries, as a busy machine may need them.

    Stages ask for fractions of a CPU, so that eight of them fit two cores.
    """
    import wavepp.actors.ray  # sets what Ray reads when it is imported

    assert wavepp.actors.ray.GRAPH_ENV
    import ray

    options: dict[str, Any] = {"num_cpus": 8, "include_dashboard": False, "log_to_driver": False}
    try:
        ray.init(address="local", **options)
    except Exception:
        ray.shutdown()
        ray.init(address="local", **options)
    yield ray
    ray.shutdown()
    for folder in Path(tempfile.gettempdir(), "ray").glob(f"session_*_{os.getpid()}"):
        shutil.rmtree(folder, ignore_errors=True)
