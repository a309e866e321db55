"""The torch executor by a name that any process can import cheaply.

A pipeline on Ray only tells its stages the name of the factory; torch, which takes seconds to
import, is imported where the factory is called.
"""

from __future__ import annotations

from wavepp.actors.ports import StageExecutor
from wavepp.config import EngineConfig


def torch_executor(config: EngineConfig, stage: int) -> StageExecutor:
    """Builds a TorchExecutor; an ExecutorFactory.

    Raises:
        ConfigError: the checkpoint or configuration can't be used.
    """
    from wavepp.actors.executors import TorchExecutor

    return TorchExecutor(config, stage)
