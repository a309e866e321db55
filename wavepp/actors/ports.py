"""The seams of the runtime: what StageCore and DriverCore need from outside, as protocols.

`actors/local.py` implements the planes over in-process queues, `actors/ray/` over Ray;
`actors/executors.py` implements the executor with torch. Nothing here imports Ray or torch: a carry
is opaque.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from wavepp.config import EngineConfig
from wavepp.control.work import SpanOutput, StageFacts, StageWork
from wavepp.requests import EngineStats, PrefillRequest, PrefillResult

Carry = Mapping[str, Any]  # name -> tensor, as the model's spec declares at this boundary


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutput:
    """What one stage made of one wave: a carry, or on the last stage the spans' outputs."""

    carry: Carry | None = None
    outputs: tuple[SpanOutput, ...] = ()


class StageExecutor(Protocol):
    """Computes spans on one stage. Called by one thread at a time; never sees the protocol.

    An executor raises only when the wave as a whole can't be computed; the caller turns that into
    error records.
    """

    @property
    def facts(self) -> StageFacts:
        """Topology and capacity of this stage; constant."""
        ...

    def forward(self, work: StageWork, carry: Carry | None) -> StageOutput:
        """Computes one wave; finished when it returns. `carry` is None on the first stage only."""
        ...

    def close(self) -> None:
        """Gives back what the executor holds. The executor is not used again."""
        ...


ExecutorFactory = Callable[[EngineConfig, int], StageExecutor]
"""Builds the executor of stage i. Must be importable: it crosses processes by name."""


class EngineBackend(Protocol):
    """A running pipeline as its front ends see it; one implementation a transport.

    `actors.local.LocalPipeline` and `actors.ray.launch.RayPipeline` are built from (config,
    executor_factory).
    """

    async def start(self) -> tuple[StageFacts, ...]:
        """Builds all stages and waits until they are ready.

        Raises:
            ConfigError: the configuration or checkpoint can't be used, or resources did not
                come in time.
        """
        ...

    async def submit(self, request: PrefillRequest) -> PrefillResult:
        """Runs one request to its end. Cancelling the awaiting task aborts it.

        Raises:
            RequestError: refused on arrival (S11); nothing was queued.
            QueueFullError: the queue limits are reached.
            EngineDeadError: the pipeline stopped for good.
        """
        ...

    async def abort(self, request_id: str) -> bool:
        """Aborts a request in any state; its submit then says "abort". False: unknown id."""
        ...

    async def stats(self) -> EngineStats:
        """One snapshot."""
        ...

    async def close(self) -> None:
        """Aborts what is left, stops every stage, gives everything back. Safe to call twice."""
        ...
