"""What DriverControl is told (facts, past tense) and what it orders (effects, imperatives). Plain
data.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wavepp.control.work import ErrorRecord, Sampling, SpanOutput
from wavepp.protocol.messages import RoundMessage, RoundReply, StageAck, WaveSchedule
from wavepp.requests import PrefillResult, Produced
from wavepp.units import WaveNumber

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrival:
    """A request as it came in, before anything about it was checked.

    Attributes:
        user_id: unique among live requests; the name the user knows.
        token_ids: int64 [n]; wide enough to hold what is to be refused.
        stop_token_ids: end the answer, besides the model's own unless `ignore_eos`.
        stream: tell each token as it is produced.
    """

    user_id: str
    token_ids: Int64Array
    max_tokens: int
    sampling: Sampling
    namespace: str = ""
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    stream: bool = False

    def is_end(self, token_id: int, eos_token_ids: frozenset[int]) -> bool:
        """The answer ends with this token."""
        is_eos = token_id in eos_token_ids and not self.ignore_eos
        return is_eos or token_id in self.stop_token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A request that `DriverControl.refusal` has nothing against."""

    arrival: Arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequested:
    """Somebody no longer wants this request; unknown ids are ignored."""

    user_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundAnswered:
    """Every stage answered the round in flight."""

    replies: tuple[RoundReply, ...]

    @property
    def epoch(self) -> int:
        """The round's."""
        return max(reply.epoch for reply in self.replies)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveCompleted:
    """A wave went through every stage.

    Attributes:
        outputs: of the last stage, for the spans that did not fail.
        errors: one record per span that some stage could not run.
        acks: one per stage, as of the end of this wave there.
        stage_seconds: how long each stage computed it, first stage first; empty: nobody knows.
        epoch: the wave's.
    """

    wave: WaveNumber
    outputs: tuple[SpanOutput, ...]
    errors: tuple[ErrorRecord, ...]
    acks: tuple[StageAck, ...]
    stage_seconds: tuple[float, ...] = ()
    epoch: int = 1


@dataclass(frozen=True, slots=True)
class TimerFired:
    """`DriverControl.next_timer` has passed."""


Fact = Arrived | AbortRequested | RoundAnswered | WaveCompleted | TimerFired


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRound:
    """Send each stage its message; answer with RoundAnswered. At most one round is out."""

    messages: tuple[RoundMessage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchWave:
    """Put the wave into the data plane, in the order of effects; answer with WaveCompleted.

    `budget`: tokens the planner allowed it, for whoever looks on.
    """

    schedule: WaveSchedule
    budget: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TellProduced:
    """Give a caller that streams one token; more will follow."""

    user_id: str
    produced: Produced


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Give the caller the result. The request is no longer live."""

    user_id: str
    result: PrefillResult


Effect = SendRound | LaunchWave | TellProduced | Finish
