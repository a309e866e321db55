"""A cost model measured on this machine: real stages, timed at several wave sizes and contexts.

Owns: what is timed, and the file that comes of it. The whole model is one stage here; what is found
is shared out evenly over its layers.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

from wavepp.actors.factories import torch_executor
from wavepp.actors.ports import StageExecutor
from wavepp.bench.throughput import check_place
from wavepp.config import EngineConfig
from wavepp.console import open_console
from wavepp.control.work import SpanWork, StageFacts, StageWork
from wavepp.emulated.cost_model import CostModel
from wavepp.errors import ConfigError
from wavepp.models.config import read_model_spec
from wavepp.models.spec import DTYPE_BYTES
from wavepp.planner.wave_time import StageCosts, WaveLoad, fit_stage, span_context
from wavepp.units import RequestId, WaveNumber, ceil_div

SIZES = 4  # wave sizes: M, M/2, M/4, M/8
CONTEXT_WAVES = (0, 2, 8)  # how many waves of M tokens stand before the timed one
REPEATS = 3
COPY_BYTES = 1 << 26
SPECIAL_TOKENS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One timed wave: median seconds of some runs."""

    start: int
    length: int
    seconds: float

    @property
    def load(self) -> WaveLoad:
        """What its time depends on."""
        return WaveLoad(tokens=self.length, context=span_context(self.start, self.length))


def write_profile(config: EngineConfig, file: Path) -> EngineConfig:
    """Times this machine, writes the cost model, and returns the configuration that uses it.

    Raises:
        ConfigError: the model can't be loaded, the file can't be written, or the device is
            emulated.
    """
    if config.device == "emulated":
        raise ConfigError("profile: an emulated device has nothing to measure")
    check_place(file)
    if "." not in file.name:
        raise ConfigError(f"profile {file}: give the file a suffix, such as {file}.yaml")
    alone = config.model_copy(
        update={
            "pipeline_parallel_size": 1,
            "layer_partition": None,
            "threads_per_stage": config.threads_per_stage or _threads(config),
            "num_gpu_blocks_override": _blocks_needed(config),
        }
    )
    executor = torch_executor(alone, 0)
    try:
        facts = executor.facts
        samples = _measure(executor, alone)
        head_s = _head_seconds(executor, alone)
    finally:
        executor.close()
    costs = fit_stage((sample.load, sample.seconds) for sample in samples)
    document = profile_document(file.stem, config, facts, costs, (samples, head_s))
    spec = read_model_spec(config.model, config.dtype)
    document["carry_bytes"] = spec.hidden_size * DTYPE_BYTES[spec.dtype]
    CostModel.model_validate(document)
    try:
        file.write_text(yaml.safe_dump(document, sort_keys=False, width=96), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"profile {file}: {error.strerror}") from None
    _tell(samples, costs)
    return _emulated(config, file)


def profile_document(
    name: str,
    config: EngineConfig,
    facts: StageFacts,
    costs: StageCosts,
    measured: tuple[list[Sample], float],
) -> dict[str, Any]:
    """The cost model of a measured stage, as YAML's plain data.

    Args:
        measured: the samples, and seconds of the head for one sampled token.
    """
    samples, head_s = measured
    layers = facts.layers[1] - facts.layers[0]
    copy_rate = _copy_rate()
    cache = sum(group.bytes_per_unit for group in facts.groups) // facts.block_size
    worst = max(abs(costs.seconds(s.load) / s.seconds - 1) for s in samples)
    return {
        "name": name,
        "about": (
            f"Measured by `wavepp plan --profile`: {len(samples)} waves of {config.model_name} on "
            f"{config.device}, medians of {REPEATS} runs; largest residual {worst:.0%}. Seconds "
            "are shared out evenly over the layers. Links: copies in memory, as measured."
        ),
        "sources": [f"this machine, {time.strftime('%Y-%m-%d', time.gmtime())}"],
        "vocab_size": facts.vocab_size,
        "max_model_len": facts.max_model_len,
        "carry_bytes": 0,
        "kinds": {
            "measured": {
                "cache": "attention",
                "cache_bytes": max(cache // layers, 1),
                "weight_bytes": facts.weight_bytes // layers,
                "wave_s": costs.c0 / layers,
                "token_s": costs.c1 / layers,
                "context_s": costs.c2 / layers,
            }
        },
        "layers": [{"times": layers, "kinds": ["measured"]}],
        "ends": {"head_s": head_s},
        "device": {
            "memory_bytes": int(psutil.virtual_memory().total),
            "memory_share": 0.4,
            "device_bytes_per_s": copy_rate,
            "host_bytes_per_s": copy_rate,
            "link_bytes_per_s": copy_rate,
        },
    }


def _measure(executor: StageExecutor, config: EngineConfig) -> list[Sample]:
    samples = []
    for start, length in _places(config, executor.facts):
        seconds = _seconds(functools.partial(_run, executor, start, length, sample=False))
        samples.append(Sample(start=start, length=length, seconds=seconds))
    return samples


def _places(config: EngineConfig, facts: StageFacts) -> Iterator[tuple[int, int]]:
    """(start, length) of the waves to time."""
    most = min(config.max_num_batched_tokens, facts.max_model_len)
    for waves in CONTEXT_WAVES:
        for halvings in range(SIZES):
            start, length = waves * most, max(most >> halvings, 1)
            if start + length <= facts.max_model_len:
                yield start, length


def _head_seconds(executor: StageExecutor, config: EngineConfig) -> float:
    length = min(config.block_size, executor.facts.max_model_len)
    with_head = _seconds(lambda: _run(executor, 0, length, sample=True))
    return max(with_head - _seconds(lambda: _run(executor, 0, length, sample=False)), 0.0)


def _seconds(action: Callable[[], None]) -> float:
    """Median of some runs, after one that warms up."""
    action()
    taken = []
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        action()
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken)


def _run(executor: StageExecutor, start: int, length: int, *, sample: bool) -> None:
    """One wave of one span, over the first blocks of the pools."""
    facts = executor.facts
    blocks = ceil_div(start + length, facts.block_size)
    table = np.arange(blocks, dtype=np.int32)
    rng = np.random.default_rng(start + length)
    tokens = rng.integers(min(SPECIAL_TOKENS, facts.vocab_size - 1), facts.vocab_size, size=length)
    span = SpanWork(
        request_id=RequestId("profile"),
        start=start,
        length=length,
        token_ids=tokens.astype(np.int32),
        block_tables={group.name: table for group in facts.groups},
        sample=sample,
    )
    executor.forward(StageWork(wave=WaveNumber(1), spans=(span,)), None)


def _blocks_needed(config: EngineConfig) -> int:
    tokens = (CONTEXT_WAVES[-1] + 1) * config.max_num_batched_tokens
    return ceil_div(tokens, config.block_size)


def _threads(config: EngineConfig) -> int:
    """What one of the stages would get on this machine."""
    return max(1, len(os.sched_getaffinity(0)) // config.pipeline_parallel_size)


def _copy_rate() -> float:
    source = np.ones(COPY_BYTES, dtype=np.uint8)
    target = np.empty_like(source)
    return COPY_BYTES / _seconds(lambda: np.copyto(target, source))


def _emulated(config: EngineConfig, file: Path) -> EngineConfig:
    """The same pipeline on emulated devices with what was measured."""
    options = config.model_dump(exclude_unset=True)
    return EngineConfig(**{**options, "device": "emulated", "cost_model": str(file)})


def _tell(samples: list[Sample], costs: StageCosts) -> None:
    console = open_console(stderr=True)
    for sample in samples:
        off = costs.seconds(sample.load) / sample.seconds - 1
        console.print(
            f"{sample.length:6} tokens behind {sample.start:6}: {sample.seconds * 1e3:9.2f} ms, "
            f"model {off:+.1%}",
            highlight=False,
        )
