"""Weights of one stage: opens only the files and reads only the tensors that are asked for.

A checkpoint is a folder with model.safetensors.index.json (tensor -> file) and its shards, or with
one model.safetensors. Tensors are mapped into memory and converted one at a time into their final
place, so a stage never holds more than its own weights plus one tensor.
"""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wavepp.errors import ConfigError
from wavepp.models.json_config import JsonConfig
from wavepp.models.quantization import (
    Quantization,
    dequantize,
    packed_shape,
    read_quantization,
    stored_parts,
)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
STORED_DTYPES = ("F64", "F32", "F16", "BF16")
DUMMY_STD = 0.02


class WeightSource(Protocol):
    """Where a stage's layers get their weights from."""

    def has(self, name: str) -> bool:
        """Whether the tensor is there."""
        ...

    def read(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """One tensor, in the source's dtype (or `dtype`) and on its device.

        Raises:
            ConfigError: it is missing, has another shape, or its file is damaged.
        """
        ...

    def read_rows(self, names: Sequence[str], rows: Sequence[int], columns: int | None) -> Tensor:
        """Several tensors stacked along dim 0: [sum(rows), columns], or [sum(rows)] for None."""
        ...

    def read_leading(self, name: str, count: int, *, dtype: torch.dtype | None = None) -> Tensor:
        """The first `count` elements of a tensor of any shape, which may be padded behind them."""
        ...


class CheckpointReader:
    """Reads a checkpoint folder. A context manager; a file is opened once and only when needed."""

    def __init__(self, folder: str | Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder = Path(folder)
        self._dtype = dtype
        self._device = device
        self._stored = _weight_map(self._folder)
        self._quantization = _quantization(self._folder)
        self._open: dict[str, Any] = {}
        self.tensors_read: list[str] = []

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()

    @property
    def files_opened(self) -> tuple[str, ...]:
        """Names of the files that are open now."""
        return tuple(sorted(self._open))

    def has(self, name: str) -> bool:
        """Whether the tensor is in the checkpoint."""
        return _is_there(name, self._stored, self._quantization)

    def read(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """One tensor; see WeightSource."""
        out = torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
        out.copy_(self._mapped(name, shape))
        return out

    def read_rows(self, names: Sequence[str], rows: Sequence[int], columns: int | None) -> Tensor:
        """Several tensors stacked along dim 0; see WeightSource."""
        tail = () if columns is None else (columns,)
        out = torch.empty((sum(rows), *tail), dtype=self._dtype, device=self._device)
        begin = 0
        for name, count in zip(names, rows, strict=True):
            out[begin : begin + count].copy_(self._mapped(name, (count, *tail)))
            begin += count
        return out

    def check(self, name: str, shape: tuple[int, ...] | None) -> None:
        """Sees from its file's header that a tensor can be read; quantised ones are not decoded.

        Args:
            shape: None: any.

        Raises:
            ConfigError: as `read`.
        """
        parts = self._quantised_parts(name)
        if parts is None:
            self._check_stored(name, shape, STORED_DTYPES)
            return
        assert self._quantization is not None
        packed = None if shape is None else packed_shape(shape, self._quantization.format)
        self._check_stored(parts[0], packed, None)
        for part in parts[1:]:
            self._check_stored(part, None, None)

    def _check_stored(
        self, name: str, shape: tuple[int, ...] | None, dtypes: tuple[str, ...] | None
    ) -> None:
        if name not in self._stored:
            raise ConfigError(f"model {str(self._folder)!r}: no tensor {name!r} in the checkpoint")
        stored = self._stored[name]
        path = self._folder / stored.file
        try:
            header = self._handle(stored.file).get_slice(stored.name)
            found, kind = tuple(header.get_shape()), header.get_dtype()
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: can't read {name!r}: {error}") from None
        if shape is not None and found != shape:
            raise ConfigError(
                f"{path}: {name!r} has shape {list(found)}, config.json says {list(shape)}"
            )
        if dtypes is not None and kind not in dtypes:
            raise ConfigError(f"{path}: {name!r} has dtype {kind}, which is not supported")

    def read_leading(self, name: str, count: int, *, dtype: torch.dtype | None = None) -> Tensor:
        """The first elements of a tensor; see WeightSource."""
        out = torch.empty((count,), dtype=dtype or self._dtype, device=self._device)
        stored = self._mapped(name, None).reshape(-1)
        if stored.shape[0] < count:
            raise ConfigError(
                f"{self._folder}: {name!r} has {stored.shape[0]} elements, config.json says {count}"
            )
        return out.copy_(stored[:count])

    def _mapped(self, name: str, shape: tuple[int, ...] | None) -> Tensor:
        """The tensor, mapped from its file or decoded; `shape` None: whatever it has."""
        self.check(name, shape)
        tensor = self._decoded(name)
        if tensor is None:
            tensor = self._stored_tensor(name)
        elif shape is not None and tuple(tensor.shape) != shape:
            raise ConfigError(
                f"model {str(self._folder)!r}: {name!r} has shape {list(tensor.shape)}, "
                f"config.json says {list(shape)}"
            )
        self.tensors_read.append(name)
        return tensor

    def _decoded(self, name: str) -> Tensor | None:
        """A quantised tensor as plain numbers; None: it is stored plainly."""
        parts = self._quantised_parts(name)
        if parts is None or self._quantization is None:
            return None
        tensors = {part: self._stored_tensor(part).to(self._device) for part in parts}
        return dequantize(name, tensors, self._quantization)

    def _quantised_parts(self, name: str) -> tuple[str, ...] | None:
        """What a quantised tensor is stored as; None: it is stored plainly."""
        if self._quantization is None:
            return None
        parts = stored_parts(name, self._quantization.format)
        return parts if all(part in self._stored for part in parts) else None

    def _stored_tensor(self, name: str) -> Tensor:
        """One tensor as it is stored, mapped from its file."""
        if name not in self._stored:
            raise ConfigError(f"model {str(self._folder)!r}: no tensor {name!r} in the checkpoint")
        stored = self._stored[name]
        try:
            tensor: Tensor = self._handle(stored.file).get_tensor(stored.name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{self._folder / stored.file}: can't read {name!r}: {error}"
            ) from None
        return tensor

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            path = self._folder / file
            if not path.is_file():
                raise ConfigError(f"{path}: no such file, but {INDEX_NAME} names it")
            try:
                self._open[file] = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path}: damaged or incomplete: {error}") from None
        return self._open[file]


class DummyWeights:
    """Random weights that need no files (`load_format: dummy`).

    A tensor's values depend on the seed and its name, so every stage split has the same model.
    """

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._seed = seed
        self._dtype = dtype
        self._device = device

    def has(self, name: str) -> bool:
        """Optional tensors do not exist here."""
        return False

    def read(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """One tensor: norms near 1, all else normal with a small deviation."""
        generator = torch.Generator().manual_seed(_seed_of(self._seed, name))
        values = torch.randn(shape, generator=generator).mul_(DUMMY_STD)
        if name.endswith("norm.weight"):
            values.add_(1.0)
        return values.to(device=self._device, dtype=dtype or self._dtype)

    def read_rows(self, names: Sequence[str], rows: Sequence[int], columns: int | None) -> Tensor:
        """Several tensors stacked along dim 0; see WeightSource."""
        tail = () if columns is None else (columns,)
        parts = [self.read(name, (count, *tail)) for name, count in zip(names, rows, strict=True)]
        return torch.cat(parts)

    def read_leading(self, name: str, count: int, *, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of `count` elements; see WeightSource."""
        return self.read(name, (count,), dtype=dtype)


class NameRecorder:
    """Reads nothing: notes what is asked for, and hands out tensors without memory.

    Args:
        have: names of the checkpoint in question, which decide between two spellings of one tensor.

    Attributes:
        shapes: of every tensor by name; None where the stored one may be larger.
    """

    def __init__(self, have: Container[str] = ()) -> None:
        self._have = have
        self.shapes: dict[str, tuple[int, ...] | None] = {}

    def has(self, name: str) -> bool:
        """Whether the checkpoint in question has it."""
        return name in self._have

    def read(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """A tensor on the meta device; see WeightSource."""
        self.shapes[name] = shape
        return torch.empty(shape, dtype=dtype, device="meta")

    def read_rows(self, names: Sequence[str], rows: Sequence[int], columns: int | None) -> Tensor:
        """A tensor on the meta device; see WeightSource."""
        tail = () if columns is None else (columns,)
        self.shapes |= {name: (count, *tail) for name, count in zip(names, rows, strict=True)}
        return torch.empty((sum(rows), *tail), device="meta")

    def read_leading(self, name: str, count: int, *, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor on the meta device; see WeightSource."""
        self.shapes[name] = None
        return torch.empty((count,), dtype=dtype, device="meta")


def stored_names(folder: str | Path) -> frozenset[str]:
    """Names of all tensors of a checkpoint; no weight is read.

    Raises:
        ConfigError: there is no checkpoint, or its index is damaged.
    """
    return frozenset(_weight_map(Path(folder)))


def _is_there(name: str, have: Container[str], quantization: Quantization | None) -> bool:
    if name in have or quantization is None:
        return name in have
    return all(part in have for part in stored_parts(name, quantization.format))


def _quantization(folder: Path) -> Quantization | None:
    """The format of a checkpoint's weights; a folder without a config has plain ones."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    return read_quantization(JsonConfig(json.loads(path.read_text(encoding="utf-8")), path.name))


def _seed_of(seed: int, name: str) -> int:
    """A generator seed from an engine seed and a tensor name (FNV-1a, the same everywhere)."""
    value = 0xCBF29CE484222325 ^ (seed & 0xFFFFFFFF)
    for byte in name.encode():
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value >> 1


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor is: its file, and its name there."""

    file: str
    name: str


def _weight_map(folder: Path) -> dict[str, _Stored]:
    """Plain tensor name -> where it is. Only the header of a single file is read."""
    index = folder / INDEX_NAME
    if index.is_file():
        files = _read_index(index)
        return {_plain(name): _Stored(file, name) for name, file in files.items()}
    single = folder / SINGLE_NAME
    if not single.is_file():
        raise ConfigError(f"model {str(folder)!r}: neither {INDEX_NAME} nor {SINGLE_NAME} in it")
    try:
        with safe_open(str(single), framework="pt") as handle:
            return {_plain(name): _Stored(SINGLE_NAME, name) for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{single}: damaged or incomplete: {error}") from None


def _plain(name: str) -> str:
    """A language model's name without what says that it is part of a larger model."""
    for prefix, plain in (("language_model.", ""), ("model.language_model.", "model.")):
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def _read_index(index: Path) -> dict[str, str]:
    try:
        loaded = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{index}: can't be read as JSON: {error}") from None
    files = loaded.get("weight_map") if isinstance(loaded, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ConfigError(f"{index}: no weight_map of tensor names to file names in it")
    for file in set(files.values()):
        if Path(file).name != file:
            raise ConfigError(f"{index}: weight_map names {file!r}, which is not in this folder")
    return files
