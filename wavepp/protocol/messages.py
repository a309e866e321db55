"""What the driver and the stages say to each other. Plain data; no behaviour beyond construction.

Owns: the decisions, their numbered log entries, the two messages that carry them (a round, a wave
schedule) and the answers. May not: decide anything, or know how a message travels.

Only the driver decides, and a stage never looks at its own state again after a decision (paper,
section on admission). Decisions form one log per pipeline epoch, numbered 1, 2, ... Both planes
carry what a stage may not have yet, and name the number up to which the log must be applied before
the message is acted on: a wave can't overtake the admission it relies on, and a free never waits
for a wave that may not come.

    driver --RoundMessage(entries, prompts)--> every stage --RoundReply(ack)--> driver
    driver --WaveSchedule(entries, spans)----> every stage, by the data plane; the ack comes back
    with the wave
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wavepp.protocol.votes import (
    NO_COUNTERS,
    NOTHING_ANSWERED,
    NOTHING_ASKED,
    Junction,
    Retry,
    RoundAnswer,
    RoundAsk,
    StageCounters,
)
from wavepp.units import LogNumber, RequestId, StageIndex, WaveNumber

Int32Array = npt.NDArray[np.int32]

NO_WAVE = WaveNumber(0)
"""Before the first wave; as a fence: nothing to wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """The request exists. Its tokens come apart, once, as a PromptRecord in a round."""

    request_id: RequestId
    attempt: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """The attempt is admitted on every stage with [0, endpoint) reused."""

    request_id: RequestId
    attempt: int
    endpoint: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Undo:
    """The attempt ends, the request stays announced: a higher attempt will follow."""

    request_id: RequestId
    attempt: int
    fence_wave: WaveNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """The request ends, wanted by nobody. Legal in every state."""

    request_id: RequestId
    attempt: int
    fence_wave: WaveNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """The request ends, served or failed. What it holds goes once `fence_wave` was executed on the
    stage.
    """

    request_id: RequestId
    attempt: int
    fence_wave: WaveNumber


Ending = Undo | Abort | Free
Decision = Announce | Admit | Retry | Junction | Undo | Abort | Free


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """One decision with its place in the log. Immutable: a number never names two decisions."""

    number: LogNumber
    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRecord:
    """A request's payload, sent to each stage once.

    Attributes:
        announced: the log number of its Announce. A record whose request is no longer known when
            that number was applied has outlived its request and is dropped.
        token_ids: int32 [num_tokens].
        keys: the keys of its full blocks, made once by the driver, joined (`cache.keys.join_keys`).
        max_tokens: tokens to produce; 0: none.
        namespace: prefixes are shared only within one (`cache.keys.encode_namespace`).
        temperature, top_p, seed, logprobs, prompt_logprobs: as in PrefillRequest.
    """

    request_id: RequestId
    announced: LogNumber
    token_ids: Int32Array
    keys: bytes
    max_tokens: int
    namespace: bytes = b""
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAck:
    """How far a stage has applied the log, and the digest of everything it applied.

    `counters` say whether a refused request is worth another try, and whether hints went stale.
    """

    stage: StageIndex
    applied: LogNumber
    digest: int
    counters: StageCounters = NO_COUNTERS


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundMessage:
    """One stage's part of a round.

    Attributes:
        apply_to: the log is applied up to here before anything else in the message is acted on.
        entries: what this stage has not acknowledged, consecutive, ending at `apply_to`.
        prompts: payloads this stage has not got.
        ask: hints and claims, acted on after the log and the payloads.
    """

    epoch: int
    round_number: int
    apply_to: LogNumber
    entries: tuple[LogEntry, ...] = ()
    prompts: tuple[PromptRecord, ...] = ()
    ask: RoundAsk = NOTHING_ASKED


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReply:
    """One stage's answer to a round: everything in it was applied and stored, and asked for."""

    epoch: int
    round_number: int
    ack: StageAck
    answer: RoundAnswer = NOTHING_ANSWERED


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanPlan:
    """Tokens [start, start + length) of one attempt in one wave.

    Attributes:
        final: the span ends at the last known token, so the next token is wanted from it (when any
            is).
        produced: tokens of the span that the announced prompt does not hold (local decoding), in
            order; they are the span's last ones.
    """

    request_id: RequestId
    attempt: int
    start: int
    length: int
    final: bool
    produced: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveSchedule:
    """One numbered wave, the same for every stage. A numbered wave never changes.

    Attributes:
        apply_to: the log is applied up to here before the spans are acted on.
        entries: what some stage may not have, consecutive, ending at `apply_to`.
    """

    epoch: int
    wave: WaveNumber
    spans: tuple[SpanPlan, ...]
    apply_to: LogNumber
    entries: tuple[LogEntry, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of all spans."""
        return sum(span.length for span in self.spans)
