"""The configuration as numbers, and what follows from it and a stage's facts.

Owns: plain data. May not: read a configuration; the actors do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wavepp.cache.types import CacheConfig, GroupSpec, Reservation
from wavepp.control.work import StageFacts
from wavepp.planner.factory import PROGRESS_DEADLINE_S, PlannerName
from wavepp.planner.wave_time import StageCosts
from wavepp.protocol.agreement import Agreement
from wavepp.protocol.books import AdmissionMode


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverOptions:
    """The configuration as numbers; names as in EngineConfig.

    Attributes:
        ring_depth: R. wave_tokens_max: M. wave_tokens_min: b_min; None: M. pipeline_fill: F.
        stage_costs: what planner `balanced` starts from, one a stage; None: all is measured.
        headroom_tokens: 2PM, what admission leaves free on every stage.
        epoch: pipelines begin with 1; each stage that is replaced begins another.
    """

    ring_depth: int
    wave_tokens_max: int
    max_num_seqs: int
    wave_tokens_min: int | None = None
    planner: PlannerName = "mpu"
    stage_costs: Sequence[StageCosts] | None = None
    pipeline_fill: int = 2
    progress_deadline_s: float = PROGRESS_DEADLINE_S
    max_model_len: int | None = None
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    headroom_tokens: int = 0
    admission: AdmissionMode = "wave"
    reservation: Reservation = "escrow"
    agreement: Agreement = "set"
    defer_shared_prefix: bool = True
    defer_max_s: float = 1.0
    max_request_retries: int = 3
    epoch: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """The part of the configuration that a stage caches by; names as in CacheConfig."""

    slots: int
    headroom_tokens: int = 0
    snapshot_interval: int | None = None
    max_snapshots_per_path: int = 16
    enable_prefix_caching: bool = True
    reservation: Reservation = "escrow"


def cache_groups(facts: StageFacts) -> tuple[GroupSpec, ...]:
    """A stage's windows as its cache takes them."""
    return tuple(
        GroupSpec(
            name=group.name,
            kind=group.kind,
            units=group.units,
            host_units=group.host_units,
            window=group.window,
        )
        for group in facts.groups
    )


def cache_config(facts: StageFacts, options: CacheOptions) -> CacheConfig:
    """What a stage's cache is built from.

    Raises:
        ConfigError: a value the cache can't work with.
    """
    return CacheConfig(
        block_size=facts.block_size,
        groups=cache_groups(facts),
        slots=options.slots,
        headroom_tokens=options.headroom_tokens,
        snapshot_interval=options.snapshot_interval,
        max_snapshots_per_path=options.max_snapshots_per_path,
        enable_prefix_caching=options.enable_prefix_caching,
        reservation=options.reservation,
    )
