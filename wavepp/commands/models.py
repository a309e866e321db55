"""`wavepp make-tiny` and `wavepp check-model`."""

from __future__ import annotations

from pathlib import Path


def run_make_tiny(family: str, out: Path) -> None:
    from wavepp.models.tiny import make_tiny

    make_tiny(family, out)


def run_check_model(model: Path, stages: int) -> None:
    from wavepp.models.check import check_model

    check_model(model, stages)
