"""Cache pools of one stage: how many blocks each group gets, and the tensors that hold them.

The memory is not touched before it is written, so a pool costs what is used of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import psutil
import torch
from torch import Tensor

from wavepp.config import EngineConfig
from wavepp.errors import ConfigError
from wavepp.models.spec import DtypeName, ModelSpec
from wavepp.models.stage import TORCH_DTYPES
from wavepp.units import ceil_div

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


class CachePools:
    """The tensors of a stage's cache: for each layer its pools, [units, B, *shape of a token].

    `units` has the blocks of every cache group.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layers: tuple[int, int],
        units: Mapping[str, int],
        block_size: int,
        device: torch.device,
    ) -> None:
        """
        Raises:
            ConfigError: there is no memory for so much.
        """
        self.layers: list[tuple[Tensor, Tensor]] = []
        for layer in spec.layers[layers[0] : layers[1]]:
            key, value = (
                _empty((units[layer.group], block_size, *tensor.shape), tensor.dtype, device)
                for tensor in layer.cache
            )
            self.layers.append((key, value))


def _empty(shape: tuple[int, ...], dtype: DtypeName, device: torch.device) -> Tensor:
    try:
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=device)
    except (RuntimeError, TypeError):  # too much memory, or more elements than can be counted
        raise ConfigError(
            f"no memory for {shape[0]} cache blocks of {shape[1]} tokens: lower block_size, "
            "num_gpu_blocks_override or kv_cache_memory_bytes"
        ) from None
