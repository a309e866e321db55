"""WavePP: pipeline-parallel prefill of large language models.

The public names, loaded when first used, so that `import wavepp` costs nothing. Everything else is
private by folder.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wavepp.config import EngineConfig
    from wavepp.engine import Engine
    from wavepp.errors import (
        ConfigError,
        EngineDeadError,
        LocalProtocolError,
        ProtocolError,
        QueueFullError,
        RemoteProtocolError,
        RequestError,
        WavePPError,
    )
    from wavepp.llm import LLM
    from wavepp.requests import PrefillRequest, PrefillResult

__version__ = "0.1.0"

_HOMES = {
    "LLM": "wavepp.llm",
    "Engine": "wavepp.engine",
    "EngineConfig": "wavepp.config",
    "PrefillRequest": "wavepp.requests",
    "PrefillResult": "wavepp.requests",
    "ConfigError": "wavepp.errors",
    "EngineDeadError": "wavepp.errors",
    "LocalProtocolError": "wavepp.errors",
    "ProtocolError": "wavepp.errors",
    "QueueFullError": "wavepp.errors",
    "RemoteProtocolError": "wavepp.errors",
    "RequestError": "wavepp.errors",
    "WavePPError": "wavepp.errors",
}

__all__ = [
    "LLM",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "LocalProtocolError",
    "PrefillRequest",
    "PrefillResult",
    "ProtocolError",
    "QueueFullError",
    "RemoteProtocolError",
    "RequestError",
    "WavePPError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Loads a public name from its home on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'wavepp' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
