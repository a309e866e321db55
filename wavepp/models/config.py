"""config.json of a Hugging Face checkpoint -> ModelSpec.

Owns reading and checking what the file says; a family (families/) knows which keys it has. Anything
that is not supported is refused with a ConfigError that names the key, never silently ignored.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from wavepp.errors import ConfigError
from wavepp.models.families import FAMILIES
from wavepp.models.json_config import JsonConfig
from wavepp.models.quantization import read_quantization
from wavepp.models.spec import DTYPE_BYTES, DtypeName, ModelSpec

logger = logging.getLogger(__name__)


def read_model_spec(folder: str | Path, dtype: str = "auto") -> ModelSpec:
    """The spec of the checkpoint in `folder`.

    Args:
        folder: holds config.json, and generation_config.json if there are more end tokens.
        dtype: of weights, activations and cache; "auto" takes the checkpoint's.

    Raises:
        ConfigError: no such folder or file, not JSON, or a key with a value that is not supported.
    """
    path = Path(folder)
    config = JsonConfig(_read_json(path / "config.json"), "config.json")
    model_type = config.text("model_type")
    build = _family(model_type)
    read_quantization(config)
    _say_what_is_dropped(config)
    return build(config, _dtype(config, dtype), _eos_token_ids(config, path))


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.parent.is_dir():
        raise ConfigError(f"model {str(path.parent)!r}: no such folder")
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"model {str(path.parent)!r}: no {path.name} in it") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: can't be read as JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return cast("Mapping[str, Any]", loaded)


def _say_what_is_dropped(config: JsonConfig) -> None:
    """Multi-token-prediction layers and towers for other inputs are not read: one line each."""
    text = config.child("text_config")
    extra = config.count("num_nextn_predict_layers", 0) or text.count("num_nextn_predict_layers", 0)
    if extra:
        logger.info("num_nextn_predict_layers %d: these layers are not used in prefill", extra)
    if config.mapping("vision_config"):
        logger.info("vision_config: only the language model is read")


def _family(model_type: str) -> Callable[[JsonConfig, DtypeName, tuple[int, ...]], ModelSpec]:
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError(
            f"config.json: model_type {model_type!r} is not supported; known: {known}"
        )
    return FAMILIES[model_type]


def _dtype(config: JsonConfig, asked: str) -> DtypeName:
    """The asked dtype, or the checkpoint's (`dtype`, formerly `torch_dtype`), or float32."""
    text = config.child("text_config")
    kinds = (source.raw(key) for source in (config, text) for key in ("dtype", "torch_dtype"))
    found = next((kind for kind in kinds if kind), "float32")
    name = found if asked == "auto" else asked
    name = str(name).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        where = "config.json: dtype" if asked == "auto" else "dtype"
        raise ConfigError(f"{where} {name!r} is not supported; known: {', '.join(DTYPE_BYTES)}")
    return name


def _eos_token_ids(config: JsonConfig, folder: Path) -> tuple[int, ...]:
    """All end tokens: config.json's and generation_config.json's together, ascending."""
    ids = set(config.int_list("eos_token_id"))
    ids |= set(config.child("text_config").int_list("eos_token_id"))
    extra = folder / "generation_config.json"
    if extra.is_file():
        generation = JsonConfig(_read_json(extra), extra.name)
        ids |= set(generation.int_list("eos_token_id"))
    return tuple(sorted(ids))
