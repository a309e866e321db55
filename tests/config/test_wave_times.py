"""The file that planner `balanced` starts from: read, checked, and what comes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from wavepp.actors.driver import driver_options
from wavepp.actors.wave_times import read_wave_times
from wavepp.config import EngineConfig
from wavepp.control.driver import DriverControl
from wavepp.emulated.stage_model import build_stage_model
from wavepp.engine import check_folder
from wavepp.errors import ConfigError
from wavepp.planner.balance import BalancedSizing
from wavepp.planner.planner import WavePlanner
from wavepp.planner.wave_time import StageCosts

TWO = {"stages": [{"c0": 0.01, "c1": 1e-5, "c2": 0}, {"c0": 0.02, "c1": 2e-5, "c2": 1e-10}]}
COSTS = (StageCosts(c0=0.01, c1=1e-5, c2=0.0), StageCosts(c0=0.02, c1=2e-5, c2=1e-10))
YAML = "stages:\n- {c0: 0.01, c1: 1.0e-5, c2: 0}\n- {c0: 0.02, c1: 2.0e-5, c2: 1.0e-10}\n"


def config(file: Path | None, **options: Any) -> EngineConfig:
    named: dict[str, Any] = {
        "device": "emulated",
        "cost_model": "uniform",
        "pipeline_parallel_size": 2,
        "planner": "balanced",
        "wave_times": file,
        **options,
    }
    return EngineConfig(**named)


@pytest.mark.parametrize("text", [json.dumps(TWO), YAML])
def test_the_planner_starts_from_the_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "times"
    file.write_text(text)
    made = config(file)
    facts = [build_stage_model(made, stage).facts for stage in range(2)]
    planner = DriverControl(facts, driver_options(made)).waves.planner
    assert isinstance(planner, WavePlanner)
    assert isinstance(planner.sizing, BalancedSizing)
    assert planner.sizing.model.costs == COSTS


def test_without_a_file_all_is_measured() -> None:
    assert read_wave_times(config(None)) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "neither JSON nor YAML"),
        ("[]", "expected one key, 'stages'"),
        ('{"stages": []}', "a list of coefficients"),
        ('{"stages": [{"c0": 1, "c1": 1}]}', "stage 0: expected c0, c1 and c2"),
        ('{"stages": [{"c0": -1, "c1": 1, "c2": 0}]}', "stage 0: c0 -1 is not in"),
        (json.dumps({"stages": TWO["stages"][:1]}), "1 stages, pipeline_parallel_size is 2"),
    ],
)
def test_a_bad_file_is_told_before_anything_starts(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "times.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as told:
        check_folder(config(file))
    assert str(file) in str(told.value)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        check_folder(config(tmp_path / "none.json"))


def test_other_planners_take_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="wave_times is for planner balanced, not mpu"):
        config(tmp_path / "times.json", planner="mpu")
