"""The seams of the runtime: what StageCore and DriverCore need from outside, as protocols.

`actors/local.py` implements the planes over in-process queues, `actors/ray/` over Ray;
`actors/executors.py` implements the executor with torch. Nothing here imports Ray or torch: a carry
is opaque.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from wavepp.cache.types import Effect
from wavepp.config import EngineConfig
from wavepp.control.work import ErrorRecord, SpanOutput, StageFacts, StageWork
from wavepp.errors import EngineDeadError
from wavepp.protocol.messages import RoundMessage, RoundReply, StageAck, WaveSchedule
from wavepp.requests import EngineStats, PrefillRequest, PrefillResult, Produced, StageStats
from wavepp.units import RequestId, StageIndex, WaveNumber

Carry = Mapping[str, Any]
"""Name -> tensor [T, ...], as the model's spec declares at this boundary: one row a token, in the
order of the spans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTimes:
    """What a device did with one wave, in seconds on its node's monotonic clock: copies from
    `from_s`, computes from `computing_s` to `done_s`, is held by its sending until `sent_s`."""

    from_s: float
    computing_s: float
    done_s: float
    sent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutput:
    """What one stage made of one wave: a carry, or on the last stage the spans' outputs.

    `device`: when that was, if the executor knows better than who called it.
    """

    carry: Carry | None = None
    outputs: tuple[SpanOutput, ...] = ()
    device: DeviceTimes | None = None


class StageExecutor(Protocol):
    """Computes spans on one stage. Called by one thread at a time; never sees the protocol.

    An executor raises only when the wave as a whole can't be computed; the caller turns that into
    error records.
    """

    @property
    def facts(self) -> StageFacts:
        """Topology and capacity of this stage; constant."""
        ...

    def materialize(self, effects: Sequence[Effect]) -> None:
        """Copies cache content between tiers and into working slots, in this order. Called before
        the wave whose `StageWork.effects` these are, also when none of its spans is computed.

        What it raises is fatal: the cache would not hold what it is said to.
        """
        ...

    def forward(self, work: StageWork, carry: Carry | None) -> StageOutput:
        """Computes one wave; finished when it returns. `carry` is None on the first stage only."""
        ...

    def close(self) -> None:
        """Gives back what the executor holds. The executor is not used again."""
        ...


ExecutorFactory = Callable[[EngineConfig, int], StageExecutor]
"""Builds the executor of stage i. Must be importable: it crosses processes by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """What a stage says of one wave beside its result: how far it has applied the log, and when it
    did what, in seconds on its node's monotonic clock.

        previous wave sent .. prepare_from_s   no wave
        prepare_from_s .. prepared_s           materialize
        prepared_s .. forward_from_s           waiting for the activation
        forward_from_s .. done_s               busy
        done_s .. next wave                    sending, where it holds the stage

    Where the executor knows the device's times, the last two are the device's, which may not wait
    for what comes before them here.
    """

    ack: StageAck
    prepare_from_s: float
    prepared_s: float
    forward_from_s: float
    done_s: float

    @property
    def stage(self) -> StageIndex:
        """Whose report."""
        return self.ack.stage

    @property
    def busy_s(self) -> float:
        """How long the stage computed the wave."""
        return self.done_s - self.forward_from_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """What travels down the pipeline for one wave: activations, and beside them all that went
    wrong.

    Attributes:
        carry: for the next stage; None when no span is left to compute, and from the last stage.
        carried: the requests whose spans the carry holds, in schedule order.
        errors: one a failed span, by the first stage that failed it. A span that is carried none
            the less (it failed after an upstream stage had computed it) is computed, and ignored;
            where it has no place on a stage, its rows are dropped.
        reports: one per stage passed.
        fatal: a stage broke down and can't go on; the pipeline stops.
    """

    wave: WaveNumber
    epoch: int = 1
    carry: Carry | None = None
    carried: tuple[RequestId, ...] = ()
    outputs: tuple[SpanOutput, ...] = ()
    errors: tuple[ErrorRecord, ...] = ()
    reports: tuple[StageReport, ...] = ()
    fatal: str | None = None


class StageDiedError(EngineDeadError):
    """A stage's process is gone. Where nobody replaces it the pipeline has stopped for good."""


class StagesPlane(Protocol):
    """The driver's way to the stages' mailboxes; works whatever the data plane is doing.

    Where a stage that is asked has died, StageDiedError is raised.
    """

    async def round(self, messages: Sequence[RoundMessage]) -> tuple[RoundReply, ...]:
        """Sends message i to stage i; returns all replies."""
        ...

    async def stats(self) -> tuple[StageStats, ...]:
        """One snapshot a stage."""
        ...

    async def reset(self, stage: int | None) -> bool:
        """Drops what one stage (None: every stage) caches and no request uses. True: all of it."""
        ...

    async def stacks(self) -> str:
        """What every stage's threads are doing, as text, as far as stages answer."""
        ...

    async def wait_death(self) -> str:
        """Returns only when a stage died: which one, and why."""
        ...

    async def end_stalled(self, launched: WaveNumber) -> str | None:
        """Ends the process of the stage that holds up the others, and says which. None: nobody can
        tell which it is, or it has no process of its own. `launched`: the latest wave."""
        ...


class DataPlane(Protocol):
    """The driver's way to run waves. Used by one task for each method. Where a stage has died,
    StageDiedError is raised."""

    async def launch(self, schedule: WaveSchedule) -> None:
        """Starts a wave; called in wave order, with at most R waves out."""
        ...

    async def collect(self) -> Parcel:
        """The last stage's parcel of the next wave, in wave order, without its carry."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEpoch:
    """What a driver goes on with when stages were replaced; nothing is cached on any stage.

    Attributes:
        replaced: how many stages are new.
    """

    facts: tuple[StageFacts, ...]
    stages: StagesPlane
    data: DataPlane
    replaced: int


Replace = Callable[[int], Awaitable[NewEpoch]]
"""Replaces the stages that died and joins all stages anew, for the epoch of this number; raises
EngineDeadError when it can't be done. The planes of the epoch before are not used any more."""


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

    async def submit(self, request: PrefillRequest, *, stream: bool = False) -> PrefillResult:
        """Runs one request to its end. Cancelling the awaiting task aborts it.

        Args:
            stream: keep what it produces for `more`.

        Raises:
            RequestError: refused on arrival; nothing was queued.
            QueueFullError: the queue limits are reached.
            EngineDeadError: the pipeline stopped for good.
        """
        ...

    async def more(self, request_id: str, known: int) -> tuple[Produced, ...]:
        """Waits until a streamed request has produced more than `known` tokens; returns what
        follows those. Empty: the request has ended, and its submit says how."""
        ...

    async def abort(self, request_id: str) -> bool:
        """Aborts a request in any state; its submit then says "abort". False: unknown id."""
        ...

    async def stats(self) -> EngineStats:
        """One snapshot."""
        ...

    async def reset_prefix_cache(self, stage: int | None = None) -> bool:
        """Drops cached prefixes on one stage (None: on all) that no request uses. False: some are
        in use and stay."""
        ...

    async def check_health(self) -> None:
        """Returns when the pipeline lives and makes progress.

        Raises:
            EngineDeadError: it does not, and why.
        """
        ...

    async def close(self) -> None:
        """Aborts what is left, stops every stage, gives everything back. Safe to call twice."""
        ...
