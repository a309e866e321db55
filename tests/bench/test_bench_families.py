"""`bench families`: both sides do the same work, and nothing is measured when they do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from wavepp.bench import families
from wavepp.errors import ConfigError
from wavepp.models.tiny import TINY_FAMILIES, make_tiny


@pytest.fixture(autouse=True)
def _tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "_COMMON", {})
    monkeypatch.setattr(families, "SIZES", {"kimi_linear": {}, "gemma3_text": {}})


def test_named_families_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    families.run(["kimi_linear"], tokens=70, repeats=2, threads=1, json_file=out)
    (row,) = json.loads(out.read_text())
    assert (row["family"], row["tokens"], row["threads"]) == ("kimi_linear", 70, 1)
    ours, theirs = row["wavepp_tokens_per_s"], row["transformers_tokens_per_s"]
    assert row["ratio"] == pytest.approx(ours / theirs)
    assert row["cpu_ratio"] > 0
    shown = capsys.readouterr().out
    assert "kimi_linear" in shown
    assert f"{row['ratio']:.2f}" in shown


def test_unknown_family_is_named() -> None:
    with pytest.raises(ConfigError, match="family 'gpt' is not known; known: kimi_linear, gemma"):
        families.run(["gpt"], tokens=8, repeats=1, threads=1, json_file=None)


def test_different_work_is_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny("gemma3_text", tmp_path)
    theirs = families._their_model(folder)

    def doubled(*args: Any, **options: Any) -> Any:
        answer = theirs(*args, **options)
        answer.logits = 2 * answer.logits
        return answer

    monkeypatch.setattr(families, "_their_model", lambda folder: doubled)
    with pytest.raises(ConfigError, match="gemma3_text: logits differ by"):
        families.measure("gemma3_text", folder, tokens=20, repeats=1, threads=1)


def test_sizes_name_families_that_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert set(families.SIZES) <= set(TINY_FAMILIES)
