"""`wavepp make-tiny` and `wavepp check-model`: checkpoints, written and read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from wavepp.config import EngineConfig
from wavepp.console import open_console, print_under
from wavepp.errors import WavePPError

if TYPE_CHECKING:
    from wavepp.models.check import ModelReport, StageReport


def run_make_tiny(family: str, out: Path) -> None:
    """Writes the checkpoint and says where.

    Raises:
        ConfigError: the family is unknown, or the folder can't be written.
    """
    from wavepp.models.tiny import make_tiny

    folder = make_tiny(family, out)
    open_console(stderr=True).print(f"{family}: {folder}", highlight=False, soft_wrap=True)


def run_check_model(config: EngineConfig) -> None:
    """Prints what a checkpoint is and what each stage would load.

    Raises:
        ConfigError: there is no checkpoint, or it can't be split so.
        WavePPError: something about it is unsupported; it was printed.
    """
    from wavepp.engine import check_folder

    check_folder(config)
    from wavepp.models.check import check_model  # brings torch, too slow for a wrong path

    report = check_model(
        config.model, config.pipeline_parallel_size, config.layer_partition, dtype=config.dtype
    )
    console = open_console()
    if report.num_layers:
        print_under(console, report.model, _model_table(report))
    if report.stages:
        console.print(_stage_table(report))
    for sentence in report.unsupported:
        console.print(f"unsupported: {sentence}", highlight=False, soft_wrap=True)
    if report.unsupported:
        raise WavePPError(f"{config.model} can't be served: {len(report.unsupported)} problem(s)")


def _model_table(report: ModelReport) -> Table:
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    facts = {
        "family": report.family,
        "dtype": report.dtype,
        "layers": str(report.num_layers),
        "hidden size": f"{report.hidden_size:,}",
        "vocabulary": f"{report.vocab_size:,}",
        "longest prompt": f"{report.max_model_len:,}",
        "weights": _size(report.weight_bytes),
        "preferred cuts": _cuts(report.preferred_cuts, report.num_layers),
    }
    for name, value in facts.items():
        table.add_row(name, value)
    return table


def _cuts(cuts: Sequence[int], layers: int) -> str:
    """Layers before which a cut costs least to carry over."""
    if len(cuts) == layers - 1:
        return "anywhere"
    return ", ".join(str(cut) for cut in cuts) or "nowhere"


def _stage_table(report: ModelReport) -> Table:
    table = Table(box=box.SIMPLE, title="stages", title_justify="left")
    sizes = ("weights", "cache / token", "snapshot", "carry / token")
    for name in ("stage", "layers", *sizes[:3], "cache groups", sizes[3], "sends on"):
        table.add_column(name, justify="right" if name in sizes else "left")
    for stage in report.stages:
        table.add_row(*_stage_cells(stage))
    return table


def _stage_cells(stage: StageReport) -> list[str]:
    groups = ", ".join(
        f"{group.name} x{group.layers} ({group.kind}: "
        + " + ".join(f"{name} {size:,}" for name, size in group.tensors)
        + ")"
        for group in stage.groups
    )
    return [
        str(stage.stage),
        f"{stage.layers[0]}-{stage.layers[1] - 1}",
        _size(stage.weight_bytes),
        _size(stage.cache_bytes_per_token),
        _size(stage.snapshot_bytes) if stage.snapshot_bytes else "-",
        groups,
        _size(stage.carry_bytes_per_token) if stage.carry else "-",
        ", ".join(tensor.name for tensor in stage.carry) or "-",
    ]


def _size(count: int) -> str:
    """Bytes for people."""
    size, unit = float(count), "B"
    for larger in ("KB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
