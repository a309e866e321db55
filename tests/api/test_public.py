"""The public names, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import wavepp


def test_every_public_name_is_there() -> None:
    for name in wavepp.__all__:
        assert getattr(wavepp, name) is not None
    assert set(dir(wavepp)) == set(wavepp.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        wavepp.LMM  # noqa: B018


@pytest.mark.parametrize(
    "statement",
    [
        "import wavepp",
        "from wavepp import LLM, Engine, EngineConfig, PrefillRequest, PrefillResult",
    ],
)
def test_import_brings_nothing_heavy(statement: str) -> None:
    heavy = "{'torch', 'transformers', 'ray', 'rich', 'typer'}"
    code = f"import sys; {statement}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "device", ["device='cpu'", "device='emulated', cost_model='b300-kimi-k3'"], ids=["cpu", "emul"]
)
def test_who_starts_a_pipeline_on_ray_needs_no_torch(device: str) -> None:
    code = (
        "import sys\n"
        "from wavepp.config import EngineConfig\n"
        "from wavepp.engine import build_backend\n"
        f"config = EngineConfig(model='m', transport='ray', {device})\n"
        "print(type(build_backend(config)).__name__, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["RayPipeline", "False"]
