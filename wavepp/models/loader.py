"""Weights of one stage: opens only the files and reads only the tensors that are asked for.

A checkpoint is a folder with model.safetensors.index.json (tensor -> file) and its shards, or with
one model.safetensors. Tensors are mapped into memory and converted one at a time into their final
place, so a stage never holds more than its own weights plus one tensor.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wavepp.errors import ConfigError

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


class CheckpointReader:
    """Reads a checkpoint folder. A context manager; a file is opened once and only when needed."""

    def __init__(self, folder: str | Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder = Path(folder)
        self._dtype = dtype
        self._device = device
        self._files = _weight_map(self._folder)
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
        return name in self._files

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

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Sees from its file's header that a tensor can be read.

        Raises:
            ConfigError: as `read`.
        """
        if name not in self._files:
            raise ConfigError(f"model {str(self._folder)!r}: no tensor {name!r} in the checkpoint")
        file = self._files[name]
        try:
            stored = self._handle(file).get_slice(name)
            found, kind = tuple(stored.get_shape()), stored.get_dtype()
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{self._folder / file}: can't read {name!r}: {error}") from None
        if found != shape:
            raise ConfigError(
                f"{self._folder / file}: {name!r} has shape {list(found)}, config.json says "
                f"{list(shape)}"
            )
        if kind not in STORED_DTYPES:
            raise ConfigError(
                f"{self._folder / file}: {name!r} has dtype {kind}, which is not supported"
            )

    def _mapped(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The stored tensor, mapped from its file."""
        self.check(name, shape)
        tensor: Tensor = self._handle(self._files[name]).get_tensor(name)
        self.tensors_read.append(name)
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


class NameRecorder:
    """Reads nothing: notes what is asked for, and hands out tensors without memory."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def has(self, name: str) -> bool:
        """Optional tensors are not asked for."""
        return False

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


def _seed_of(seed: int, name: str) -> int:
    """A generator seed from an engine seed and a tensor name (FNV-1a, the same everywhere)."""
    value = 0xCBF29CE484222325 ^ (seed & 0xFFFFFFFF)
    for byte in name.encode():
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value >> 1


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name. Only the header of a single file is read."""
    index = folder / INDEX_NAME
    if index.is_file():
        return _read_index(index)
    single = folder / SINGLE_NAME
    if not single.is_file():
        raise ConfigError(f"model {str(folder)!r}: neither {INDEX_NAME} nor {SINGLE_NAME} in it")
    try:
        with safe_open(str(single), framework="pt") as handle:
            return dict.fromkeys(handle.keys(), SINGLE_NAME)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{single}: damaged or incomplete: {error}") from None


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
