"""`wavepp bench families`: one forward of each family's layers beside transformers' own.

Random checkpoints of one size (hidden 512, eight layers), the same tokens, one process, in turn.
There is no engine in between: what is compared is the work of the layers.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from rich import box
from rich.table import Table

from wavepp.config import EngineConfig
from wavepp.console import open_console
from wavepp.errors import ConfigError
from wavepp.kernels.select import select_ops
from wavepp.kernels.wave import Span, Wave, build_wave
from wavepp.models.cache_pools import CachePools, group_units
from wavepp.models.config import read_model_spec
from wavepp.models.loader import CheckpointReader
from wavepp.models.stage import StageModel
from wavepp.models.tiny import TINY_FAMILIES, make_tiny

BLOCK_SIZE = 64
CPU = torch.device("cpu")
WARM_UPS = 1

_EXPERTS = {"moe_intermediate_size": 256, "num_experts_per_tok": 4}
_MLA = {
    "head_dim": 32,
    "num_key_value_heads": 8,
    "q_lora_rank": 192,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
_INDEXER = {"index_topk": 256, "index_head_dim": 64}
_DELTA = {
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
_COMMON = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
SIZES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": {**_EXPERTS, "num_experts": 32},
    "glm4_moe": {**_EXPERTS, "n_routed_experts": 32},
    "minimax_m2": {
        "intermediate_size": 256,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "rotary_dim": 32,
    },
    "deepseek_v3": {**_EXPERTS, **_MLA, "n_routed_experts": 32},
    "deepseek_v32": {**_EXPERTS, **_MLA, **_INDEXER, "n_routed_experts": 32},
    "glm_moe_dsa": {**_EXPERTS, **_MLA, **_INDEXER, "n_routed_experts": 32},
    "gemma3_text": {"sliding_window": 256},
    "kimi_linear": {
        **_MLA,
        "q_lora_rank": None,
        "moe_intermediate_size": 256,
        "num_experts": 32,
        "num_experts_per_token": 4,
        "linear_attn_config": {
            **TINY_FAMILIES["kimi_linear"]["linear_attn_config"],
            "head_dim": 64,
            "num_heads": 8,
        },
    },
    "qwen3_next": {
        **_EXPERTS,
        **_DELTA,
        "num_experts": 32,
        "shared_expert_intermediate_size": 256,
    },
    "qwen3_5_text": {**_DELTA},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyResult:
    """Medians of one family, in tokens a second."""

    family: str
    tokens: int
    threads: int
    wavepp_tokens_per_s: float
    transformers_tokens_per_s: float
    cpu_ratio: float

    @property
    def ratio(self) -> float:
        """How much faster WavePP's layers are, by the clock; `cpu_ratio`: by CPU time, which other
        work on the machine disturbs less."""
        return self.wavepp_tokens_per_s / self.transformers_tokens_per_s


def run(
    families: Sequence[str], *, tokens: int, repeats: int, threads: int, json_file: Path | None
) -> None:
    """Measures families (none named: all there are) and prints a table.

    Raises:
        ConfigError: an unknown family.
    """
    unknown = set(families) - set(SIZES)
    if unknown:
        raise ConfigError(f"family {sorted(unknown)[0]!r} is not known; known: {', '.join(SIZES)}")
    results = []
    for family in families or SIZES:
        with tempfile.TemporaryDirectory(prefix="wavepp-bench-") as folder:
            path = make_tiny(family, folder, overrides={**_COMMON, **SIZES[family]})
            results.append(measure(family, path, tokens=tokens, repeats=repeats, threads=threads))
    open_console().print(_table(results))
    if json_file is not None:
        lines = [{**asdict(result), "ratio": result.ratio} for result in results]
        json_file.write_text(json.dumps(lines, indent=2) + "\n", encoding="utf-8")


@torch.inference_mode()
def measure(family: str, folder: Path, *, tokens: int, repeats: int, threads: int) -> FamilyResult:
    """One family: both sides in turn, medians."""
    torch.set_num_threads(threads)
    token_ids = torch.randint(5, 500, (tokens,), generator=torch.Generator().manual_seed(0))
    ours, theirs = _OurLayers(folder, tokens), _their_model(folder)
    our_s: list[_Times] = []
    their_s: list[_Times] = []
    for turn in range(WARM_UPS + repeats):
        began = _Times.now()
        first = ours.last_logits(token_ids)
        between = _Times.now()
        second = theirs(token_ids[None], use_cache=True, logits_to_keep=1).logits[0, -1]
        done = _Times.now()
        if turn < WARM_UPS:
            _check(family, first, second.float())
            continue
        our_s.append(between.since(began))
        their_s.append(done.since(between))
    return FamilyResult(
        family=family,
        tokens=tokens,
        threads=threads,
        wavepp_tokens_per_s=tokens / statistics.median(times.wall_s for times in our_s),
        transformers_tokens_per_s=tokens / statistics.median(times.wall_s for times in their_s),
        cpu_ratio=statistics.median(times.cpu_s for times in their_s)
        / statistics.median(times.cpu_s for times in our_s),
    )


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds by the clock, and of CPU in this process."""

    wall_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> Self:
        return cls(time.perf_counter(), time.process_time())

    def since(self, before: _Times) -> _Times:
        return _Times(self.wall_s - before.wall_s, self.cpu_s - before.cpu_s)


class _OurLayers:
    """All layers of a checkpoint as one stage, and pools for one prompt."""

    def __init__(self, folder: Path, tokens: int) -> None:
        self._spec = spec = read_model_spec(folder)
        blocks = -(-tokens // BLOCK_SIZE)
        self._table = torch.arange(blocks, dtype=torch.int32).numpy()
        config = EngineConfig(model=str(folder), num_gpu_blocks_override=blocks, max_num_seqs=1)
        layers = (0, spec.num_layers)
        units = group_units(config, spec, layers, tokens)
        self._pools = CachePools(
            spec,
            layers,
            units={name: group.units for name, group in units.items()},
            host_units=dict.fromkeys(units, 0),
            block_size=BLOCK_SIZE,
            device=CPU,
            working_slots=1,
        )
        with CheckpointReader(folder, torch.float32, CPU) as weights:
            self._model = StageModel(spec, *layers, weights, select_ops(CPU))

    def last_logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Of the whole prompt, from nothing."""
        activations = self._model.embed(token_ids)
        wave = self._wave(len(token_ids))
        hidden = self._model.forward(activations, wave, self._pools.layers)["hidden"]
        return self._model.logits(hidden[-1:])[0]

    def _wave(self, length: int) -> Wave:
        """Planned anew each time: that is part of the work."""
        groups = self._model.wave_groups
        span = Span(
            start=0,
            length=length,
            tables={group.name: self._table for group in groups},
            states=self._pools.span_states(0, 0, ()),
        )
        return build_wave([span], groups, BLOCK_SIZE, CPU)


def _their_model(folder: Path) -> Any:
    sys.modules.setdefault("fla", None)  # type: ignore[arg-type]  # its kernels need a GPU
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    )
    return loaded.eval()


def _check(family: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """What is measured must be the same work."""
    difference = float((ours - theirs).abs().max())
    scale = float(theirs.abs().max())
    if difference > 1e-2 * max(scale, 1.0):
        raise ConfigError(f"{family}: logits differ by {difference:.2g}; nothing was measured")


def _table(results: Sequence[FamilyResult]) -> Table:
    table = Table(
        box=box.SIMPLE,
        title="tokens/s of one forward, float32, hidden 512, 8 layers",
        title_justify="left",
    )
    for name in (
        "family",
        "tokens",
        "threads",
        "WavePP",
        "transformers",
        "ratio",
        "ratio of CPU time",
    ):
        table.add_column(name, justify="left" if name == "family" else "right")
    for result in results:
        table.add_row(
            result.family,
            str(result.tokens),
            str(result.threads),
            f"{result.wavepp_tokens_per_s:,.0f}",
            f"{result.transformers_tokens_per_s:,.0f}",
            f"{result.ratio:.2f}",
            f"{result.cpu_ratio:.2f}",
        )
    return table
