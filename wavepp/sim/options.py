"""What a simulated world is made of: plain data. `draw.py` makes it from a seed, tests by hand.

Owns: the shapes. May not: decide anything. Legend: P stages, M most tokens in a wave, B tokens in a
cache block, R waves in the ring.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from wavepp.cache.types import GroupSpec, Reservation
from wavepp.planner.factory import PROGRESS_DEADLINE_S, PlannerName
from wavepp.planner.wave_time import StageCosts
from wavepp.protocol.agreement import Agreement
from wavepp.protocol.books import AdmissionMode
from wavepp.protocol.states import Phase

VOCABULARY = 5000

Tokens = tuple[int, ...] | npt.NDArray[np.int32]

WAVE_SECONDS = 2e-4
"""Of a wave on a stage, beside its tokens, where nothing else is said."""


QUICK = StageCosts(c0=WAVE_SECONDS, c1=1e-4, c2=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """One stage.

    Attributes:
        told: group -> units that the driver is told, where that is not the truth (a fault: memory
            that went away after the start).
        costs: seconds of a wave on this stage. head_s: besides, when a wave samples.
        link_s, link_token_s: until a wave's activations are on the next stage, besides the
            message's own delay.
        snapshot_interval, max_snapshots_per_path: as in CacheOptions; stages may differ.
    """

    groups: tuple[GroupSpec, ...]
    told: Mapping[str, int] = field(default_factory=dict)
    costs: StageCosts = QUICK
    head_s: float = 0.0
    link_s: float = 0.0
    link_token_s: float = 0.0
    snapshot_interval: int | None = None
    max_snapshots_per_path: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How often what goes wrong; probabilities, 0: never.

    Attributes:
        tail: of a message, to take `TAIL` times as long. slow: of a wave on a stage, to take
            `SLOW` times as long. error: of a wave on a stage, to fail; `guilty` of those name the
            request at fault. reset: of a round on a stage, to be followed by the loss of all idle
            content. storm: of a round with claims or Retry decisions, to find that much was evicted
            since the hints or votes. late: of an answer, to be told again much later.
            interleave: of a lock's release, to let the stage's other thread run then and there.
    """

    tail: float = 0.0
    slow: float = 0.0
    error: float = 0.0
    guilty: float = 0.0
    reset: float = 0.0
    storm: float = 0.0
    late: float = 0.0
    interleave: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldOptions:
    """The pipeline. Names as in EngineConfig; `wave_tokens_max` is M, `ring_depth` is R.

    Attributes:
        stage_costs: what `balanced` starts from, one a stage; None: it measures all.
        round_delay_s, wave_delay_s: mean time of a message of a round, of the data plane.
        weak_keys: block keys of 8 bits: hints and deferrals are often wrong, state never.
        audit_every: lock holds between two full recounts of a stage's cache.
        death_s: when a stage's process dies; None: never.
        calm_s: when faults end and everything left must be served.
    """

    stages: tuple[StageOptions, ...]
    block_size: int = 4
    ring_depth: int = 4
    wave_tokens_max: int = 16
    wave_tokens_min: int | None = None
    planner: PlannerName = "mpu"
    stage_costs: tuple[StageCosts, ...] | None = None
    pipeline_fill: int = 2
    progress_deadline_s: float = PROGRESS_DEADLINE_S
    max_num_seqs: int = 4
    headroom_tokens: int = 0
    admission: AdmissionMode = "wave"
    reservation: Reservation = "escrow"
    agreement: Agreement = "set"
    defer_shared_prefix: bool = True
    defer_max_s: float = 0.05
    enable_prefix_caching: bool = True
    weak_keys: bool = False
    round_delay_s: float = 1e-3
    wave_delay_s: float = 3e-4
    audit_every: int = 1
    death_s: float | None = None
    calm_s: float = 0.0
    faults: Faults = Faults()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request of the workload.

    Attributes:
        salt: prefixes are shared within one only.
        scores: asks for prompt_logprobs, so nothing may be reused.
        cancel_s: give up at this time. cancel_in: give up as soon as it is in this phase.
    """

    name: str
    at_s: float
    tokens: Tokens
    salt: str = ""
    max_tokens: int = 1
    scores: bool = False
    cancel_s: float | None = None
    cancel_in: Phase | None = None
