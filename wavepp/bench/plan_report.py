"""What a pipeline would be: layers by stage, pools, wave budgets, each with its reason. Pure.

Owns: the sentences of `wavepp plan`. What the stages are is given by `commands/plan.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wavepp.config import EngineConfig
from wavepp.planner.budget import budget_ladder
from wavepp.planner.wave_time import StageCosts, WaveLoad, span_context
from wavepp.units import align_up

CONSTANT_SHARE = 0.05  # of a full wave that its constant may be
CONSTANT_SHARE_MIN_WAVE = 0.15  # of the smallest wave
LENGTHS = (4096, 32768, 131072)  # prompts for which a throughput is predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage.

    Attributes:
        work: its share of a wave's time, in any unit that all stages share.
        pool_tokens: tokens its pools keep. device_bytes: of weights and pools together.
        costs: seconds of a wave; None: nothing was measured.
    """

    layers: tuple[int, int]
    work: float
    weight_bytes: int
    cache_bytes: int
    pool_tokens: int
    costs: StageCosts | None = None

    @property
    def device_bytes(self) -> int:
        """Weights and pools."""
        return self.weight_bytes + self.cache_bytes


def reasons(config: EngineConfig, stages: Sequence[StagePlan], max_model_len: int) -> list[str]:
    """Sentences about partition, budgets and pools, in the order in which one decides."""
    said = [_partition(config, stages), *_waves(config, stages), *_pools(config, stages)]
    smallest = min(stage.pool_tokens for stage in stages)
    if smallest < max_model_len:
        said.append(
            f"Prompts longer than {smallest:,} tokens are refused though the model takes "
            f"{max_model_len:,}: give more memory, more stages, or --max-model-len {smallest}."
        )
    slowest = _slowest(stages)
    if slowest is not None:
        said += [_throughput(config, slowest, n) for n in LENGTHS if n <= max_model_len]
    return said


def _partition(config: EngineConfig, stages: Sequence[StagePlan]) -> str:
    counts = ",".join(str(hi - lo) for lo, hi in (stage.layers for stage in stages))
    most = max(range(len(stages)), key=lambda n: stages[n].work)
    mean = sum(stage.work for stage in stages) / len(stages)
    why = "as asked" if config.layer_partition is not None else "the smallest slowest stage"
    return (
        f"--layer-partition {counts}: {why}. Stage {most} has the most work, "
        f"{stages[most].work / mean - 1:.0%} above the mean: others idle for that long at best."
    )


def _waves(config: EngineConfig, stages: Sequence[StagePlan]) -> list[str]:
    most, least = config.max_num_batched_tokens, config.wave_tokens_min
    size, block = config.pipeline_parallel_size, config.block_size
    wanted = config.ring_waves + (config.pipeline_fill - 1) * size
    if most % block or least % block:
        budgets = f"{most} (no multiple of block_size {block}: planner greedy only)"
    else:
        ladder = budget_ladder(wave_tokens_max=most, wave_tokens_min=least, block_size=block)
        budgets = ", ".join(f"{budget:,}" for budget in ladder)
    said = [
        f"Wave budgets {budgets} tokens: the largest that leaves {wanted} waves to be planned "
        f"(R = {config.ring_waves} in the ring, {config.pipeline_fill - 1} more fill of {size})."
    ]
    slowest = _slowest(stages)
    if slowest is not None:
        said.append(_advice(config, slowest))
    return said


def _advice(config: EngineConfig, slowest: StageCosts) -> str:
    """How much of a wave is its constant, and the sizes at which that is little."""
    most, block = config.max_num_batched_tokens, config.block_size
    full_s = slowest.seconds(WaveLoad(tokens=most, context=span_context(0, most)))
    said = (
        f"A full wave takes {full_s * 1e3:.1f} ms on the slowest stage, {slowest.c0 / full_s:.0%} "
        "of it whatever its size."
    )
    if not slowest.c0 or not slowest.c1:
        return said
    sizes = [
        align_up(int(slowest.c0 * (1 - share) / (share * slowest.c1)) + 1, block)
        for share in (CONSTANT_SHARE, CONSTANT_SHARE_MIN_WAVE)
    ]
    return (
        f"{said} That is {CONSTANT_SHARE:.0%} at --max-num-batched-tokens {sizes[0]} and "
        f"{CONSTANT_SHARE_MIN_WAVE:.0%} at --min-wave-tokens {sizes[1]}."
    )


def _pools(config: EngineConfig, stages: Sequence[StagePlan]) -> list[str]:
    least = min(range(len(stages)), key=lambda n: stages[n].pool_tokens)
    tokens = stages[least].pool_tokens
    headroom = min(config.headroom_tokens, tokens // 4)
    return [
        f"Stage {least} keeps the fewest tokens, {tokens:,}; admission leaves {headroom:,} of them "
        f"free (the least of 2PM and a quarter), so {tokens - headroom:,} can be held at once, by "
        f"at most {config.max_num_seqs} requests."
    ]


def _throughput(config: EngineConfig, slowest: StageCosts, length: int) -> str:
    most = config.max_num_batched_tokens
    starts = range(0, length, most)
    seconds = sum(
        slowest.seconds(WaveLoad(tokens=size, context=span_context(start, size)))
        for start in starts
        for size in (min(most, length - start),)
    )
    chunks, size = len(starts), config.pipeline_parallel_size
    idle = (size - 1) / (chunks + size - 1)
    return (
        f"Cold prompts of {length:,} tokens: {length / seconds:,.0f} input tokens/s when there are "
        f"always enough of them; one alone leaves {idle:.0%} of the stages idle ({chunks} chunks)."
    )


def _slowest(stages: Sequence[StagePlan]) -> StageCosts | None:
    known = [(stage.work, n) for n, stage in enumerate(stages) if stage.costs is not None]
    return stages[max(known)[1]].costs if len(known) == len(stages) else None
