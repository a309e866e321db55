"""What a server is told beyond its engine's configuration.

Owns: the options, and the reading of an application's arguments. `serve deploy` brings them typed
from YAML, `serve run wavepp.serve:app_builder name=value` as text; both mean the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from wavepp.config import EngineConfig, build_config
from wavepp.errors import ConfigError
from wavepp.validation import first_problem, nearest

MIB = 2**20


class ServeOptions(BaseModel):
    """How a server behaves towards its clients. Immutable; unknown names are errors.

    Raises:
        ConfigError: an unknown name, or a value of the wrong type or out of range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    api_key: str | None = Field(
        default=None, min_length=1, description="ask clients for this bearer token"
    )
    max_body_mib: float = Field(
        default=32, gt=0, description="refuse request bodies larger than this, in MiB"
    )
    num_replicas: int = Field(
        default=1, ge=1, description="engines of this configuration, each a whole pipeline"
    )
    shutdown_timeout_s: float = Field(
        default=60.0, ge=0, description="how long requests in flight may go on when told to stop"
    )

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise ConfigError(first_problem(error, type(self).model_fields)[0]) from None

    @property
    def body_bytes_max(self) -> int:
        """Bytes of the largest body."""
        return int(self.max_body_mib * MIB)


def read_arguments(arguments: Mapping[str, Any]) -> tuple[EngineConfig, ServeOptions]:
    """An application's arguments as the engine's configuration and the server's options.

    Args:
        arguments: names as in flags, with dashes or underscores; `config` names a YAML file.

    Raises:
        ConfigError: an unknown name (the nearest known one is named), or a bad value.
    """
    given = {name.replace("-", "_"): _typed(value) for name, value in arguments.items()}
    config_file = given.pop("config", None)
    own = {name: given.pop(name) for name in ServeOptions.model_fields if name in given}
    known = [*EngineConfig.model_fields, *ServeOptions.model_fields, "config"]
    for name in given:
        if name not in EngineConfig.model_fields:
            raise ConfigError(f"unknown option {name!r}{nearest(name, known)}")
    if isinstance(own.get("api_key"), int | float):
        raise ConfigError("api_key: quote it, it is not a number")
    return build_config(given, config_file), ServeOptions(**own)


def _typed(value: Any) -> Any:
    """Text as YAML reads it; 8,8,7,7 and whatever else is no YAML scalar stays text."""
    if not isinstance(value, str):
        return value
    try:
        typed = yaml.safe_load(value)
    except yaml.YAMLError:
        return value
    return typed if isinstance(typed, int | float | bool) else value
