"""The README's Python lines, run as they stand on the real checkpoint; and the demo's printout."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from e2e_commands import processes_with, read_jsonl, run, wait_until

from wavepp.models.tiny import make_tiny

ROOT = Path(__file__).parents[2]
PROMPTS = ROOT / "examples" / "prompts.jsonl"


@pytest.mark.ray
def test_python_lines_of_the_readme_run(smollm2_folder: Path, tmp_path: Path) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    script = tmp_path / "readme_lines.py"
    script.write_text(block.replace("MODEL_FOLDER", str(smollm2_folder)))
    done = run([sys.executable, str(script)])
    assert done.returncode == 0, done.stderr
    text, tokens = done.stdout.splitlines()
    assert re.fullmatch(r"\(\d+,\) -\d\.\d+ 5", text), text
    assert re.fullmatch(r"\(\d+,\) -\d\.\d+ 3", tokens), tokens
    assert wait_until(lambda: processes_with(str(script)) == [], seconds=20)


def test_demo_answers_are_shown_with_probabilities(tmp_path: Path) -> None:
    """The demo's two commands, on a tiny model in one process: every prompt has its line."""
    answers = tmp_path / "answers.jsonl"
    # The tiny tokenizer makes far more tokens of the handbook than a real one does.
    model = make_tiny("llama", tmp_path / "tiny", overrides={"max_position_embeddings": 8192})
    batch = ["wavepp", "run-batch", "-i", str(PROMPTS), "-o", str(answers), "--model", str(model)]
    done = run([*batch, "-pp", "2", "--transport", "local"])
    assert done.returncode == 0, done.stderr
    summary = done.stderr[done.stderr.index("batch") :]
    for shown in ("requests", "input tokens", "input tokens/s", "stage 0 busy", "stage 1 busy"):
        assert shown in summary, summary

    script = str(ROOT / "examples" / "show_answers.py")
    shown = run([sys.executable, script, str(PROMPTS), str(answers)])
    assert shown.returncode == 0, shown.stderr
    assert "What is the capital of France?" in shown.stdout
    assert len(shown.stdout.splitlines()) == 1 + len(read_jsonl(PROMPTS))


def test_engine_example_runs(smollm2_folder: Path) -> None:
    done = run([sys.executable, str(ROOT / "examples" / "engine.py"), str(smollm2_folder)])
    assert done.returncode == 0, done.stderr
    first, *_, third, stage_0, stage_1 = done.stdout.splitlines()
    assert first == "The capital of France is Paris"
    assert third.startswith("Monday, Tuesday, Wednesday,")
    assert stage_0.startswith("stage 0: layers 0-14, ")
    assert stage_1.startswith("stage 1: layers 15-29, ")
