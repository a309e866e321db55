"""Cache pools of one stage: how many blocks each group gets, and the tensors that hold them.

The memory is not touched before it is written, so a pool costs what is used of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch import Tensor

from wavepp.config import EngineConfig
from wavepp.errors import ConfigError
from wavepp.models.spec import DtypeName, LayerSpec, ModelSpec
from wavepp.models.stage import TORCH_DTYPES
from wavepp.units import ceil_div

Int32Array = npt.NDArray[np.int32]
LayerPools = tuple[Tensor, ...]  # one for each tensor a layer keeps

GIB = 1 << 30
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


class CachePools:
    """The tensors of a stage's cache: for each layer its pools, and the same on the host where
    groups have a tier there.

    A pool is [units, B, *shape of a token], or [units, *shape of a state] in recurrent groups.

    Args:
        units, host_units: blocks (or state slots) of every cache group, by name.
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
    ) -> None:
        """
        Raises:
            ConfigError: there is no memory for so much.
        """
        host = torch.device("cpu")
        self._groups = [layer.group for layer in spec.layers[layers[0] : layers[1]]]
        self.layers: list[LayerPools] = []
        self._host: list[LayerPools] = []
        recurrent = {group.name for group in spec.groups if group.kind == "recurrent"}
        for layer in spec.layers[layers[0] : layers[1]]:
            name = layer.group
            block = () if name in recurrent else (block_size,)
            self.layers.append(_layer_pools(layer, (units[name], *block), device))
            self._host.append(_layer_pools(layer, (host_units[name], *block), host))

    def offload(self, group: str, device: Int32Array, host: Int32Array) -> None:
        """Copies blocks from the device to the host: ids [k] of each."""
        for name, ours, theirs in zip(self._groups, self.layers, self._host, strict=True):
            if name == group:
                _copy(ours, device, theirs, host)

    def bring_back(self, group: str, host: Int32Array, device: Int32Array) -> None:
        """Copies blocks from the host to the device: ids [k] of each."""
        for name, ours, theirs in zip(self._groups, self.layers, self._host, strict=True):
            if name == group:
                _copy(theirs, host, ours, device)


def _layer_pools(layer: LayerSpec, unit: tuple[int, ...], device: torch.device) -> LayerPools:
    return tuple(_empty((*unit, *tensor.shape), tensor.dtype, device) for tensor in layer.cache)


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
            f"no memory for {shape[0]} cache blocks of {shape[1]} tokens: lower block_size, "
            "num_gpu_blocks_override or kv_cache_memory_bytes"
        ) from None
