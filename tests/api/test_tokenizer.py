"""Which class reads a tokenizer: AutoTokenizer's choice, without torch where it can be."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from wavepp.config import EngineConfig
from wavepp.errors import ConfigError
from wavepp.tokenizer import Tokenizer, load_tokenizer

TEXT = "The quick brown fox — a “quote”, naïve, 东京 \n\t<|im_start|>end"


def load(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(EngineConfig(model=str(folder)))
    assert tokenizer is not None
    return tokenizer


def declare(folder: Path, out: Path, tokenizer_class: str | None) -> Path:
    """The same tokenizer under another class name."""
    shutil.copytree(folder, out)
    said = json.loads((out / "tokenizer_config.json").read_text())
    said.pop("tokenizer_class")
    if tokenizer_class is not None:
        said["tokenizer_class"] = tokenizer_class
    (out / "tokenizer_config.json").write_text(json.dumps(said))
    return out


@pytest.mark.parametrize(
    "name",
    ["TokenizersBackend", "PreTrainedTokenizerFast", "GPT2Tokenizer", "LlamaTokenizer", None],
)
def test_reads_as_auto_tokenizer_does(tiny_llama: Path, tmp_path: Path, name: str | None) -> None:
    folder = declare(tiny_llama, tmp_path / "model", name)
    ours, theirs = load(folder), AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    assert type(ours._inner) is type(theirs)
    ids = ours.encode(TEXT)
    assert ids == theirs.encode(TEXT)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_a_plain_tokenizer_needs_no_torch(tiny_llama: Path) -> None:
    script = (
        "import sys\n"
        "from wavepp.config import EngineConfig\n"
        "from wavepp.tokenizer import load_tokenizer\n"
        "assert load_tokenizer(EngineConfig(model=sys.argv[1])).encode('hello')\n"
        "print('torch' in sys.modules)\n"
    )
    command = [sys.executable, "-c", script, str(tiny_llama)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.parametrize("text", ["{", "[]", "null", '{"tokenizer_class": 3}'])
def test_a_damaged_tokenizer_config_is_said(tiny_llama: Path, tmp_path: Path, text: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(ConfigError, match="can't be read") as error:
        load(folder)
    assert str(folder) in str(error.value)
