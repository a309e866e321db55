"""Cache pools of one stage: how many blocks each group gets, and the tensors that hold them.

The memory is not touched before it is written, so a pool costs what is used of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch import Tensor

from wavepp.config import EngineConfig
from wavepp.errors import ConfigError
from wavepp.kernels.recurrent_plan import RecurrentSlots
from wavepp.models.spec import DtypeName, LayerSpec, ModelSpec
from wavepp.models.stage import TORCH_DTYPES
from wavepp.units import ceil_div

Int32Array = npt.NDArray[np.int32]
LayerPools = tuple[Tensor, ...]  # a pool for each tensor the layer keeps

GIB = 1 << 30
SNAPSHOT_TOKENS = 4096  # cached tokens for which a recurrent group has one snapshot
DEFAULT_POOL_BYTES = 1 << 30  # per stage, when nothing is said and one request fits in it
FREE_MEMORY_SHARE = 0.4  # of free memory that the pools of all stages may take by default


def pool_units(config: EngineConfig, bytes_per_block: int, max_model_len: int) -> int:
    """Blocks of every cache group of a stage; all groups get equally many.

    `num_gpu_blocks_override` decides, else `kv_cache_memory_bytes`, else what is sane: 1 GiB, more
    if one request of `max_model_len` needs it, never beyond this stage's share of free memory.

    Args:
        bytes_per_block: of one block in every group of the stage together.

    Raises:
        ConfigError: kv_cache_memory_bytes is less than one block.
    """
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    if config.kv_cache_memory_bytes is not None:
        units = config.kv_cache_memory_bytes // bytes_per_block
        if units < 1:
            raise ConfigError(
                f"kv_cache_memory_bytes {config.kv_cache_memory_bytes}: one block of "
                f"{config.block_size} tokens needs {bytes_per_block} bytes"
            )
        return units
    return _default_units(bytes_per_block, ceil_div(max_model_len, config.block_size), config)


def _default_units(per_block: int, blocks_for_one: int, config: EngineConfig) -> int:
    wanted = max(DEFAULT_POOL_BYTES, blocks_for_one * per_block)
    share = int(FREE_MEMORY_SHARE * _free_bytes(config) / config.pipeline_parallel_size)
    return max(1, min(wanted, share) // per_block)


def _free_bytes(config: EngineConfig) -> int:
    if config.device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return int(psutil.virtual_memory().available)


def host_pool_units(config: EngineConfig, bytes_per_block: int) -> int:
    """Blocks of every cache group of a stage on the host: its equal share of kv_offloading_size.

    Raises:
        ConfigError: the share is not 0 and less than one block.
    """
    if not config.kv_offloading_size:
        return 0
    share = int(config.kv_offloading_size * GIB) // config.pipeline_parallel_size
    units = share // bytes_per_block
    if units < 1:
        raise ConfigError(
            f"kv_offloading_size {config.kv_offloading_size}: a stage gets {share} bytes, "
            f"one block of {config.block_size} tokens needs {bytes_per_block}"
        )
    return units


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUnits:
    """How much of one cache group a stage has: blocks of B tokens, or snapshots."""

    units: int
    host_units: int
    bytes_per_unit: int


def group_units(
    config: EngineConfig, spec: ModelSpec, layers: tuple[int, int], max_model_len: int
) -> dict[str, GroupUnits]:
    """Units of every cache group of layers [lo, hi), by name.

    Groups that keep blocks have equally many. Recurrent ones have a snapshot for every
    SNAPSHOT_TOKENS tokens of those blocks, on either tier, and no fewer than `max_num_seqs` on the
    device; their share counts when memory is divided. Working slots come on top.

    Raises:
        ConfigError: the memory that is asked for is less than one block.
    """
    lo, hi = layers
    recurrent = {g.name for g in spec.groups_in(lo, hi) if g.kind == "recurrent"}
    sizes = {
        group.name: spec.cache_bytes(group.name, lo, hi)
        * (1 if group.name in recurrent else config.block_size)
        for group in spec.groups_in(lo, hi)
    }
    share = config.block_size / SNAPSHOT_TOKENS  # snapshots a block
    per_block = sum(size * (share if g in recurrent else 1.0) for g, size in sizes.items())
    blocks = pool_units(config, math.ceil(per_block), max_model_len)
    host_blocks = host_pool_units(config, math.ceil(per_block))
    found = {}
    for name, size in sizes.items():
        units, host_units = blocks, host_blocks
        if name in recurrent:
            units = max(config.max_num_seqs, int(blocks * share))
            host_units = math.ceil(host_blocks * share)
        found[name] = GroupUnits(units=units, host_units=host_units, bytes_per_unit=size)
    return found


class CachePools:
    """The tensors of a stage's cache: for each layer its pools, and the same on the host where
    groups have a tier there.

    A pool is [units, B, *shape of a token]. In recurrent groups it is [units + working slots,
    *shape of a state]: snapshots first, then the slots that requests work in.

    Args:
        units, host_units: blocks (or snapshots) of every cache group, by name.
        working_slots: of recurrent groups.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layers: tuple[int, int],
        *,
        units: Mapping[str, int],
        host_units: Mapping[str, int],
        block_size: int,
        device: torch.device,
        working_slots: int = 0,
    ) -> None:
        """
        Raises:
            ConfigError: there is no memory for so much.
        """
        host = torch.device("cpu")
        self._groups = [layer.group for layer in spec.layers[layers[0] : layers[1]]]
        used = spec.groups_in(*layers)
        self._recurrent = {g.name: units[g.name] for g in used if g.kind == "recurrent"}
        self.layers: list[LayerPools] = []
        self._host: list[LayerPools] = []
        for layer in spec.layers[layers[0] : layers[1]]:
            name = layer.group
            block, slots = ((), working_slots) if name in self._recurrent else ((block_size,), 0)
            self.layers.append(_layer_pools(layer, (units[name] + slots, *block), device))
            self._host.append(_layer_pools(layer, (host_units[name], *block), host))

    def offload(self, group: str, device: Int32Array, host: Int32Array) -> None:
        """Copies blocks from the device to the host: ids [k] of each."""
        for ours, theirs in self._of(group):
            _copy(ours, device, theirs, host)

    def bring_back(self, group: str, host: Int32Array, device: Int32Array) -> None:
        """Copies blocks from the host to the device: ids [k] of each."""
        for ours, theirs in self._of(group):
            _copy(theirs, host, ours, device)

    def restore(self, group: str, snapshot: int, slot: int, *, from_host: bool) -> None:
        """Copies a snapshot, on the device or on the host, into a working slot."""
        put = np.array([self._recurrent[group] + slot], dtype=np.int32)
        for ours, theirs in self._of(group):
            _copy(theirs if from_host else ours, np.array([snapshot], dtype=np.int32), ours, put)

    def span_states(
        self, start: int, slot: int | None, snapshots: Sequence[tuple[int, Mapping[str, int]]]
    ) -> dict[str, RecurrentSlots]:
        """What `Span.states` wants: group name -> slots of a span that works in `slot`.

        A span from position 0 starts from nothing, whatever its slot holds.

        Args:
            snapshots: (position, group name -> snapshot to write), ascending.
        """
        states = {}
        for group, units in self._recurrent.items():
            assert slot is not None, "a recurrent group needs a working slot"
            states[group] = RecurrentSlots(
                read_slot=units + slot if start else None,
                write_slot=units + slot,
                snapshots=tuple((position - start, unit[group]) for position, unit in snapshots),
            )
        return states

    def _of(self, group: str) -> Iterator[tuple[LayerPools, LayerPools]]:
        """Device and host pools of the layers of a group."""
        for name, ours, theirs in zip(self._groups, self.layers, self._host, strict=True):
            if name == group:
                yield ours, theirs


def _layer_pools(layer: LayerSpec, shape: tuple[int, ...], device: torch.device) -> LayerPools:
    return tuple(_empty((*shape, *t.shape), t.dtype, device) for t in layer.cache)


def _copy(source: LayerPools, taken: Int32Array, target: LayerPools, put: Int32Array) -> None:
    """Blocks `taken` of the source become blocks `put` of the target."""
    for here, there in zip(source, target, strict=True):
        rows = here.index_select(0, torch.from_numpy(taken).to(here.device))
        index = torch.from_numpy(put).to(there.device, torch.int64)
        there.index_copy_(0, index, rows.to(there.device))


def _empty(shape: tuple[int, ...], dtype: DtypeName, device: torch.device) -> Tensor:
    try:
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=device)
    except (RuntimeError, TypeError):  # too much memory, or more elements than can be counted
        raise ConfigError(
            f"no memory for {shape[0]} cache blocks of shape {list(shape[1:])}: lower block_size, "
            "num_gpu_blocks_override or kv_cache_memory_bytes"
        ) from None
