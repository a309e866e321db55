"""The installed `wavepp` command, its inputs and outputs, and processes that must be gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
LOGPROB_TOLERANCE = 2e-3
COMMAND_TIMEOUT_S = 240


def clean_environment(**extra: str) -> dict[str, str]:
    """This process's environment with the commands of its Python first, and no Ray cluster."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    path = f"{BIN}{os.pathsep}{kept.get('PATH', '')}"
    return kept | {"PATH": path, "RAY_USAGE_STATS_ENABLED": "0", "COLUMNS": "120"} | extra


def run(
    command: Sequence[str], *, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; its output comes back as text."""
    return subprocess.run(
        command,
        env=env if env is not None else clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
    )


def make_tiny(folder: Path, family: str = "llama") -> Path:
    """A tiny random checkpoint, by the command users have for it."""
    done = run(["wavepp", "make-tiny", family, str(folder)])
    assert done.returncode == 0, done.stderr
    return folder


def write_jsonl(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    """Writes one object a line."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Reads one object a line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def answer_of(line: dict[str, Any]) -> tuple[str, float]:
    """(first token, its log probability) of a completion's output line that asked for logprobs."""
    assert line["error"] is None, line
    logprobs = line["response"]["body"]["choices"][0]["logprobs"]
    return logprobs["tokens"][0], logprobs["token_logprobs"][0]


def same_answers(left: Sequence[dict[str, Any]], right: Sequence[dict[str, Any]]) -> bool:
    """Equal ids in equal order, equal tokens, log probabilities within the tolerance."""
    assert [line["custom_id"] for line in left] == [line["custom_id"] for line in right]
    pairs = [(answer_of(a), answer_of(b)) for a, b in zip(left, right, strict=True)]
    return all(a[0] == b[0] and abs(a[1] - b[1]) <= LOGPROB_TOLERANCE for a, b in pairs)


def processes_with(text: str) -> list[str]:
    """Command lines or environments of other processes that hold the text."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        try:
            held = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        except OSError:
            continue
        if text.encode() in held:
            found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:150])
    return found


def wait_until(true: Callable[[], bool], *, seconds: float) -> bool:
    """Waits for something to become true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.1)
    return true()
