"""A world and a workload out of a seed (swarm): everything that can differ does.

Owns: the distributions. May not: run anything. P, B, M, R, planner, lanes, pools, headroom,
agreement, deferral, host tiers, snapshots and faults all come from the seed, so that small and odd
combinations are met as often as usual ones.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from wavepp.cache.types import GroupSpec, Reservation
from wavepp.planner.factory import PlannerName
from wavepp.protocol.agreement import Agreement
from wavepp.protocol.books import AdmissionMode
from wavepp.protocol.states import Phase
from wavepp.sim.options import VOCABULARY, Faults, Job, StageOptions, WorldOptions

KIND_MIXES = (
    ("attention", "recurrent", "both"),
    ("both",),
    ("attention", "sliding"),
    ("attention", "recurrent", "both", "sliding", "sliding and both"),
)
CANCEL_PHASES = (
    Phase.ARRIVED,
    Phase.ANNOUNCED,
    Phase.READY,
    Phase.DEFERRED,
    Phase.CLAIMING,
    Phase.RETRYING,  # rare, so asked for more often
    Phase.RETRYING,
    Phase.RETRYING,
    Phase.WAITING,
    Phase.ADMITTED,
    Phase.RUNNING,
    Phase.COMPLETING,
)
CALM_AFTER_S = 0.2
"""From the last arrival to the end of all faults."""
SALTS = ("", "", "", "", "", "", "a", "b")


def draw_world(seed: int) -> tuple[WorldOptions, list[Job]]:
    """The options of a seed's world, and its requests."""
    rng = random.Random(f"{seed}/world")
    block = rng.choice((2, 4, 4, 8, 16, 32))
    budget = rng.choice((1, 1, 2, 2, 3, 4, 8)) * block
    pool = rng.choice((8, 12, 16, 24, 48))
    lanes = rng.randint(1, 6)
    kinds = _kinds(rng)
    sizes = _Sizes(block=block, pool=pool, lanes=lanes, scarce=rng.random() < 0.4)
    stages = tuple(_stage(rng, kind, sizes) for kind in kinds)
    if rng.random() < 0.1:
        stages = _shrink(rng, stages)
    jobs = draw_jobs(random.Random(f"{seed}/jobs"), block=block, pool=_smallest(stages, pool))
    last_s = max(job.at_s for job in jobs)
    agreement: Agreement = rng.choice(("set", "stepwise", "stepwise"))
    waves = _waves(random.Random(f"{seed}/waves"), block=block, budget=budget)
    modes = random.Random(f"{seed}/modes")
    admission: AdmissionMode = modes.choice(("wave", "wave", "wave", "serial"))
    reservation: Reservation = modes.choice(("escrow", "escrow", "escrow", "lease", "none"))
    options = WorldOptions(
        stages=stages,
        block_size=block,
        ring_depth=rng.choice((1, 2, len(stages), 2 * len(stages))),
        wave_tokens_max=budget,
        wave_tokens_min=waves.tokens_min,
        planner=waves.planner,
        pipeline_fill=waves.fill,
        progress_deadline_s=waves.deadline_s,
        max_num_seqs=lanes,
        headroom_tokens=rng.choice((0, budget, 2 * len(stages) * budget)),
        admission=admission,
        reservation=reservation,
        agreement=agreement,
        defer_shared_prefix=rng.random() < 0.7,
        defer_max_s=rng.choice((0.001, 0.02, 0.5)),
        enable_prefix_caching=rng.random() < 0.95,
        weak_keys=rng.random() < 0.2,
        round_delay_s=rng.choice((1e-4, 1e-3, 2e-2)),
        wave_delay_s=rng.choice((1e-5, 3e-4)),
        audit_every=rng.choice((11, 30, 80)),
        death_s=rng.uniform(0, last_s + 0.1) if rng.random() < 0.1 else None,
        calm_s=last_s + CALM_AFTER_S,
        faults=_faults(rng),
    )
    crowd = random.Random(f"{seed}/crowd")
    return _crowd(crowd, options) if crowd.random() < 0.15 else (options, jobs)


def _crowd(rng: random.Random, options: WorldOptions) -> tuple[WorldOptions, list[Job]]:
    """Bursts of requests that share one document in pools that are full: what a hint promised and
    a retry needs, somebody else holds."""
    block = options.block_size
    pool = _smallest(options.stages, 12)
    document = _tokens(rng, max(pool // 2, 1) * block)
    now = 0.0
    jobs: list[Job] = []
    for index in range(rng.randint(20, 60)):
        if rng.random() < 0.3:
            now += rng.expovariate(1.0) * 1e-2
        shared = document[: rng.randint(0, len(document))]
        tokens = (shared + _tokens(rng, rng.randint(1, 2 * block)))[: pool * block]
        jobs.append(Job(name=f"r{index}", at_s=now, tokens=tokens))
    crowded = replace(
        options,
        max_num_seqs=8,
        headroom_tokens=0,
        weak_keys=True,
        defer_shared_prefix=False,
        calm_s=now + CALM_AFTER_S,
    )
    return crowded, jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waves:
    """Planner, b_min, F, and how long work may be held back."""

    planner: PlannerName
    tokens_min: int
    fill: int
    deadline_s: float


def _waves(rng: random.Random, *, block: int, budget: int) -> _Waves:
    planner: PlannerName = rng.choice(("greedy", "static", "mpu", "mpu", "balanced"))
    half = max(block, budget // 2 // block * block)
    return _Waves(
        planner=planner,
        tokens_min=rng.choice((half, half, block, budget)),
        fill=rng.choice((1, 2, 2, 3)),
        deadline_s=rng.choice((0.0, 0.002, 0.05, 0.5)),
    )


def _smallest(stages: tuple[StageOptions, ...], pool: int) -> int:
    """Blocks that every stage says it has."""
    paged = [
        stage.told.get(group.name, group.units)
        for stage in stages
        for group in stage.groups
        if group.paged
    ]
    return min(paged, default=pool)


def _kinds(rng: random.Random) -> list[str]:
    count = rng.choice((1, 2, 2, 3, 3, 4, 5))
    if rng.random() < 0.3:
        return ["attention"] * count
    choice = rng.choice(KIND_MIXES)
    return [rng.choice(choice) for _ in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """B, blocks a stage has on average, lanes; `scarce`: snapshots are few, and differ by stage."""

    block: int
    pool: int
    lanes: int
    scarce: bool


def _stage(rng: random.Random, kind: str, sizes: _Sizes) -> StageOptions:
    """One stage; its pools are its own."""
    groups: list[GroupSpec] = []
    block, pool, lanes, scarce = sizes.block, sizes.pool, sizes.lanes, sizes.scarce

    def blocks() -> int:
        return max(3, pool + rng.randint(-pool // 4, pool // 4))

    host = rng.choice((0, 0, 0, 2, pool))
    if kind in ("attention", "both", "sliding and both"):
        groups.append(GroupSpec(name="attn", kind="attention", units=blocks(), host_units=host))
    if kind in ("sliding", "sliding and both"):
        window = rng.choice((1, block, 2 * block + 1, 4 * block))
        groups.append(GroupSpec(name="local", kind="sliding", units=blocks(), window=window))
    if kind in ("recurrent", "both", "sliding and both"):
        few, many = (1, 2, lanes), (2 * lanes + pool, 4 * lanes + 2 * pool)
        units = rng.choice(few if scarce else many)
        groups.append(
            GroupSpec(
                name="state", kind="recurrent", units=units, host_units=rng.choice((0, 0, 1, 4))
            )
        )
    return StageOptions(
        groups=tuple(groups),
        seconds_per_token=rng.choice((1e-5, 5e-5, 2e-4)),
        snapshot_interval=rng.choice((None, 2 * block, 4 * block) if scarce else (block,)),
        max_snapshots_per_path=rng.choice((1, 2, 4) if scarce else (8, 64)),
    )


def _shrink(rng: random.Random, stages: tuple[StageOptions, ...]) -> tuple[StageOptions, ...]:
    """A fault: one stage has less than it says."""
    at = rng.randrange(len(stages))
    stage = stages[at]
    paged = [group for group in stage.groups if group.paged]
    if not paged:
        return stages
    group = rng.choice(paged)
    told = {group.name: group.units + rng.randint(1, group.units)}
    lying = StageOptions(
        groups=stage.groups,
        told=told,
        seconds_per_token=stage.seconds_per_token,
        snapshot_interval=stage.snapshot_interval,
        max_snapshots_per_path=stage.max_snapshots_per_path,
    )
    return (*stages[:at], lying, *stages[at + 1 :])


def _faults(rng: random.Random) -> Faults:
    """Each kind of fault is on in about half of the worlds."""

    def rate(*choices: float) -> float:
        return rng.choice((0.0, *choices))

    return Faults(
        tail=rate(0.01, 0.05),
        slow=rate(0.02, 0.1),
        error=rate(0.0, 0.02, 0.1, 0.2),
        guilty=rng.choice((0.2, 0.6)),
        reset=rate(0.0, 0.01, 0.05),
        storm=rate(0.3, 0.9, 1.0),
        late=rate(0.1, 0.3),
        interleave=rng.choice((0.0, 0.05, 0.3)),
    )


def draw_jobs(rng: random.Random, *, block: int, pool: int) -> list[Job]:
    """Requests in families that share prefixes, in bursts with silences between.

    Args:
        pool: blocks that every stage has.
    """
    longest = rng.choice((pool // 4, pool // 2, pool - 2)) * block
    documents = [_Document(rng, longest, block) for _ in range(rng.choice((1, 1, 2, 3)))]
    cancels = rng.choice((0.0, 0.2, 0.8))
    gap_s = rng.choice((1e-3, 1e-2, 0.1))
    jobs: list[Job] = []
    now = 0.0
    count = rng.randint(6, 32) if rng.random() < 0.95 else rng.randint(60, 120)
    for index in range(count):
        if rng.random() < 0.5:
            now += rng.expovariate(1.0) * gap_s * rng.choice((1, 1, 10))
        max_tokens = rng.choice((0, 1, 1, 1, 1, 3, block + 2))
        tokens = _prompt(rng, documents, jobs, block)[: pool * block - max(max_tokens - 1, 0)]
        if rng.random() < 0.02:
            tokens = _tokens(rng, (pool + pool // 2) * block)  # larger than the smallest pool
        jobs.append(
            Job(
                name=f"r{index}",
                at_s=now,
                tokens=tokens,
                salt=rng.choice(SALTS),
                max_tokens=max_tokens,
                scores=rng.random() < 0.03,
                cancel_s=now + rng.expovariate(20.0) if rng.random() < cancels / 2 else None,
                cancel_in=rng.choice(CANCEL_PHASES) if rng.random() < cancels / 2 else None,
            )
        )
    return jobs


class _Document:
    """Tokens that many prompts begin with, up to one of a few places."""

    def __init__(self, rng: random.Random, longest: int, block: int) -> None:
        self.tokens = _tokens(rng, max(longest, block))
        self.ends = [rng.randint(1, len(self.tokens)) for _ in range(rng.randint(1, 4))]

    def cut(self, rng: random.Random) -> tuple[int, ...]:
        """A beginning: up to one of the places, or anywhere."""
        end = rng.choice(self.ends) if rng.random() < 0.7 else rng.randint(0, len(self.tokens))
        return self.tokens[:end]


def _prompt(
    rng: random.Random, documents: list[_Document], jobs: list[Job], block: int
) -> tuple[int, ...]:
    """A document cut somewhere and a question of its own; an old prompt again, or grown longer."""
    if jobs and rng.random() < 0.35:
        old = rng.choice(jobs).tokens
        return old if rng.random() < 0.5 else old + _tokens(rng, rng.randint(1, 2 * block))
    return rng.choice(documents).cut(rng) + _tokens(rng, rng.randint(1, 2 * block))


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCABULARY) for _ in range(count))
