"""One stage of an emulated pipeline: its layers, what a wave costs there, and what it can cache.

Pure sums over a cost model and the configuration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from wavepp.config import EngineConfig
from wavepp.control.work import GroupFacts, StageFacts
from wavepp.emulated.cost_model import CostModel, load_cost_model, shard
from wavepp.errors import ConfigError
from wavepp.planner.partition import balance_layers
from wavepp.planner.wave_time import StageCosts
from wavepp.units import StageIndex

Layers = tuple[int, int]

CONTEXT_FOR_COST = 65536  # tokens of context at which layers are balanced over stages
SNAPSHOT_TOKENS = 4096  # cached tokens for which a recurrent group has one snapshot
GIB = 1 << 30
GROUPS = ("attention", "recurrent")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModel:
    """What one stage needs of a cost model. Times are the device's, not yet scaled.

    Attributes:
        costs: of a wave on this stage. head_s: besides, when a wave samples (last stage only).
        carry_bytes: to the next stage, for one token; 0 on the last stage.
    """

    facts: StageFacts
    costs: StageCosts
    head_s: float
    carry_bytes: int
    link_bytes_per_s: float
    link_s: float
    host_bytes_per_s: float
    device_bytes_per_s: float

    def transfer_s(self, tokens: int) -> float:
        """Seconds until a wave's activations are on the next stage."""
        return self.link_s + tokens * self.carry_bytes / self.link_bytes_per_s


def build_stage_model(config: EngineConfig, stage: int) -> StageModel:
    """Stage `stage` of the pipeline that the configuration describes.

    Raises:
        ConfigError: the cost model can't be used, or not with this configuration.
    """
    assert config.cost_model is not None, "the configuration sees to it"
    model = load_cost_model(config.cost_model)
    layers = partition(model, config.pipeline_parallel_size, config.layer_partition)[stage]
    last = layers[1] == len(model.layer_kinds)
    groups, weights = _groups(config, model, layers)
    return StageModel(
        facts=StageFacts(
            stage=StageIndex(stage),
            layers=layers,
            block_size=config.block_size,
            vocab_size=model.vocab_size,
            max_model_len=config.model_len(
                model.max_model_len, f"{model.name} has only {model.max_model_len}"
            ),
            groups=groups,
            weight_bytes=weights,
        ),
        costs=stage_costs(model, layers, config.tensor_parallel_size),
        head_s=model.ends.head_s / config.tensor_parallel_size if last else 0.0,
        carry_bytes=0 if last else model.carry_bytes,
        link_bytes_per_s=model.device.link_bytes_per_s,
        link_s=0.0 if last else model.device.link_s,
        host_bytes_per_s=model.device.host_bytes_per_s,
        device_bytes_per_s=model.device.device_bytes_per_s,
    )


def partition(
    model: CostModel, stages: int, asked: tuple[int, ...] | None = None
) -> tuple[Layers, ...]:
    """[lo, hi) of every stage.

    Args:
        asked: layers per stage; None: the split with the smallest slowest stage, at preferred cuts
            where that costs little.

    Raises:
        ConfigError: more stages than layers, or `asked` does not fit.
    """
    kinds = model.layer_kinds
    if stages > len(kinds):
        raise ConfigError(
            f"pipeline_parallel_size {stages}: {model.name} has only {len(kinds)} layers"
        )
    counts = asked
    if counts is None:
        cuts = model.preferred_cuts
        counts = balance_layers(
            [kind.token_s + kind.context_s * CONTEXT_FOR_COST for kind in kinds],
            stages,
            first_extra=model.ends.embedding_token_s,
            preferred_cuts=None if cuts is None else set(cuts),
        )
    if len(counts) != stages or sum(counts) != len(kinds) or min(counts) < 1:
        raise ConfigError(
            f"layer_partition {','.join(map(str, counts))}: it has to name {stages} stages "
            f"that sum to the {len(kinds)} layers of {model.name}"
        )
    ends = list(accumulate(counts))
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def stage_costs(model: CostModel, layers: Layers, devices: int = 1) -> StageCosts:
    """What a wave costs on layers [lo, hi), each split over so many devices.

    Raises:
        ConfigError: the model says nothing of tensor parallelism.
    """
    kinds = model.layer_kinds[slice(*layers)]
    c0 = sum(kind.wave_s for kind in kinds) / devices
    c1 = sum(kind.token_s for kind in kinds) / devices
    c2 = sum(kind.context_s for kind in kinds) / devices
    if devices > 1:
        tensor = model.tensor_parallel
        if tensor is None:
            raise ConfigError(
                f"tensor_parallel_size {devices}: cost model {model.name} has no tensor_parallel"
            )
        c0 += len(kinds) * tensor.collective_wave_s
        c1 += len(kinds) * tensor.collective_token_s
        c2 *= tensor.context_factor
    if layers[0] == 0:
        c1 += model.ends.embedding_token_s
    return StageCosts(c0=c0, c1=c1, c2=c2)


def _groups(
    config: EngineConfig, model: CostModel, layers: Layers
) -> tuple[tuple[GroupFacts, ...], int]:
    """Cache groups of a stage with their pools, and the bytes of its weights, on one device.

    Groups that keep blocks have equally many. A recurrent one has a snapshot for every
    SNAPSHOT_TOKENS tokens of those blocks and no fewer than `max_num_seqs`, besides the working
    slots, which are taken off the memory.
    """
    devices, kinds = config.tensor_parallel_size, model.layer_kinds[slice(*layers)]
    weights = _weight_bytes(model, layers) // devices
    sizes = {
        name: sum(shard(kind.cache_bytes, devices, kind.cache_shards) for kind in of)
        * (config.block_size if name == "attention" else 1)
        for name in GROUPS
        if (of := [kind for kind in kinds if kind.cache == name])
    }
    state = sizes.get("recurrent", 0)
    snapshots = config.block_size / SNAPSHOT_TOKENS  # a block
    per_block = sizes.get("attention", 0) + math.ceil(state * snapshots)
    free = int(model.device.memory_bytes * model.device.memory_share) - weights
    blocks = _blocks(config, model, per_block, free - state * config.max_num_seqs)
    host_blocks = _host_blocks(config, per_block)
    groups = []
    for name, size in sizes.items():
        units, host_units = blocks, host_blocks
        if name == "recurrent":
            units = max(config.max_num_seqs, int(blocks * snapshots))
            host_units = int(host_blocks * snapshots)
        groups.append(
            GroupFacts(
                name=name,
                kind="recurrent" if name == "recurrent" else "attention",
                units=units,
                bytes_per_unit=size,
                host_units=host_units,
            )
        )
    return tuple(groups), weights


def _blocks(config: EngineConfig, model: CostModel, per_block: int, free: int) -> int:
    """Blocks of the pools: as asked for, else what the device has room for beside the weights."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    asked = config.kv_cache_memory_bytes
    blocks = (free if asked is None else asked) // per_block
    if blocks < 1:
        named = f"{model.name}: memory left for the cache" if asked is None else "kv_cache_memory"
        raise ConfigError(
            f"{named}: {free if asked is None else asked} bytes, one block of "
            f"{config.block_size} tokens needs {per_block}; use more stages or fewer lanes"
        )
    return blocks


def _host_blocks(config: EngineConfig, per_block: int) -> int:
    if not config.kv_offloading_size:
        return 0
    share = int(config.kv_offloading_size * GIB) // config.pipeline_parallel_size
    if share < per_block:
        raise ConfigError(
            f"kv_offloading_size {config.kv_offloading_size}: a stage gets {share} bytes, "
            f"one block of {config.block_size} tokens needs {per_block}"
        )
    return share // per_block


def _weight_bytes(model: CostModel, layers: Layers) -> int:
    lo, hi = layers
    held = sum(kind.weight_bytes for kind in model.layer_kinds[lo:hi])
    held += model.ends.embedding_bytes if lo == 0 else 0
    return held + (model.ends.head_bytes if hi == len(model.layer_kinds) else 0)
