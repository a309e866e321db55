"""What the two halves of the leader share: options, queue, lanes, live records, counters.

Owns no rule. `LeaderMachine` takes facts, `RoundComposer` composes rounds; both are handed one
`Books`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from wavepp.protocol.admission import AdmissionGate, WaitingQueue
from wavepp.protocol.agreement import Agreement
from wavepp.protocol.record import Record
from wavepp.protocol.states import Edge, Phase
from wavepp.protocol.votes import NO_COUNTERS, StageCounters
from wavepp.units import RequestId

ANNOUNCED_PER_LANE = 4
"""Requests announced ahead of admission, per lane: bounds what stages hold for waiting ones."""


AdmissionMode = Literal["wave", "serial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderOptions:
    """The configuration as numbers.

    Attributes:
        lanes_max: `max_num_seqs`.
        oversized_over: tokens a request may hold beside the headroom (`Capacity`); None: no limit.
        defer_max_s: longest wait of one request for others' prefixes, all together.
        admission: serial: one request at a time, by walks of the trees; a baseline.
    """

    num_stages: int
    block_size: int
    lanes_max: int
    admission: AdmissionMode = "wave"
    agreement: Agreement = "set"
    oversized_over: int | None = None
    defer_shared_prefix: bool = True
    defer_max_s: float = 1.0

    @property
    def window(self) -> int:
        """Requests at the front of the queue that are announced and looked at."""
        return ANNOUNCED_PER_LANE * self.lanes_max


@dataclass(slots=True)
class Tally:
    """What happened since the start. Tokens are summed over admissions."""

    hints: int = 0
    claims: int = 0
    admitted: int = 0
    retries: int = 0
    mismatches: int = 0
    no_room: int = 0
    not_tried: int = 0
    refused: int = 0
    deferred: int = 0
    answers_ignored: int = 0
    rolled_back: int = 0
    candidate_tokens: int = 0
    endpoint_tokens: int = 0


@dataclass(slots=True, eq=False)
class Books:
    """The leader's state.

    Attributes:
        records: live requests.
        counters: the latest heard of each stage.
        edges: moves of the lifecycle table taken, counted.
        rounds: rounds composed so far.
    """

    options: LeaderOptions
    gate: AdmissionGate = field(init=False)
    counters: list[StageCounters] = field(init=False)
    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    records: dict[RequestId, Record] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    edges: Counter[Edge] = field(default_factory=Counter)
    rounds: int = 0

    def __post_init__(self) -> None:
        self.gate = AdmissionGate(lanes_max=self.options.lanes_max)
        self.counters = [NO_COUNTERS] * self.options.num_stages

    def near(self) -> tuple[Record, ...]:
        """The requests at the front of the queue that are looked at. In serial admission: up to the
        first that is not deferred."""
        front = self.waiting.first(self.options.window)
        if self.options.admission == "wave":
            return front
        deferred = itertools.takewhile(lambda record: record.phase is Phase.DEFERRED, front)
        return front[: sum(1 for _ in deferred) + 1]
