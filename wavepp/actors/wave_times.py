"""The file of coefficients that planner `balanced` starts from.

Owns: reading it. JSON or YAML; its form is that of `planner.wave_time.parse_stage_costs`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from wavepp.config import EngineConfig
from wavepp.errors import ConfigError
from wavepp.planner.wave_time import StageCosts, parse_stage_costs


def read_wave_times(config: EngineConfig) -> tuple[StageCosts, ...] | None:
    """Coefficients, one set a stage; None: the configuration names no file.

    Raises:
        ConfigError: the file can't be read, holds something else, or speaks of another number of
            stages.
    """
    if config.wave_times is None:
        return None
    path = Path(config.wave_times)
    try:
        document = _load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"wave_times {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        told = str(error).splitlines()[0]
        raise ConfigError(f"wave_times {path}: neither JSON nor YAML: {told}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"wave_times {path}: expected one key, 'stages'")
    try:
        costs = parse_stage_costs(document)
    except ConfigError as error:
        raise ConfigError(f"wave_times {path}: {error}") from None
    stages = config.pipeline_parallel_size
    if len(costs) != stages:
        raise ConfigError(
            f"wave_times {path}: {len(costs)} stages, pipeline_parallel_size is {stages}"
        )
    return costs


def _load(text: str) -> Any:
    """JSON first: YAML would read its 1e-5 as text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return yaml.safe_load(text)
