"""Fixtures of the model tests: tiny checkpoints and their oracles, made once a session."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_oracle import load_oracle, oracle_logits

from wavepp.models.tiny import make_tiny

sys.path.insert(0, str(Path(__file__).parent.parent / "kernels"))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family -> folder of its tiny checkpoint."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = make_tiny(family, tmp_path_factory.mktemp("tiny") / family)
        return made[family]

    return folder


@pytest.fixture(scope="session")
def tiny_oracle(tiny_folder: Callable[[str], Path]) -> Callable[[str], Any]:
    """Family -> its tiny checkpoint as transformers loads it."""
    loaded: dict[str, Any] = {}

    def oracle(family: str) -> Any:
        if family not in loaded:
            loaded[family] = load_oracle(tiny_folder(family))
        return loaded[family]

    return oracle


@pytest.fixture(scope="session")
def expected_logits(tiny_oracle: Callable[[str], Any]) -> Callable[[str, list[int]], torch.Tensor]:
    """(family, prompt) -> logits [length, vocab] of transformers, computed once."""
    made: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def logits(family: str, prompt: list[int]) -> torch.Tensor:
        key = (family, tuple(prompt))
        if key not in made:
            made[key] = oracle_logits(tiny_oracle(family), prompt)
        return made[key]

    return logits
