"""Executors that only tests on Ray need."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from checksum_executor import ChecksumExecutor

from wavepp.actors.ports import Carry, StageExecutor, StageOutput
from wavepp.config import EngineConfig
from wavepp.control.work import StageFacts, StageWork
from wavepp.errors import ConfigError


class SleepsOnce(ChecksumExecutor):
    """Stage 1 takes 12 s for its first wave: longer than Ray's own patience with a graph. Its
    `weight_bytes` tells the patience that this process has, in seconds."""

    slept = False

    @property
    def facts(self) -> StageFacts:
        from ray.dag import DAGContext

        return dataclasses.replace(super().facts, weight_bytes=DAGContext.get_current().get_timeout)

    def forward(self, work: StageWork, carry: Carry | None) -> StageOutput:
        if self._facts.stage == 1 and not self.slept:
            self.slept = True
            time.sleep(12)
        return super().forward(work, carry)


def sleeps_12s_once(config: EngineConfig, stage: int) -> StageExecutor:
    return SleepsOnce(config, stage)


def builds_once(config: EngineConfig, stage: int) -> StageExecutor:
    """Each stage once: `model` is a folder for their marks."""
    try:
        (Path(config.model) / str(stage)).touch(exist_ok=False)
    except FileExistsError:
        raise ConfigError("there is one already") from None
    return ChecksumExecutor(config, stage)
