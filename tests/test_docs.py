"""What the documentation says is so: files exist, flags are listed, commands are commands."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from wavepp import EngineConfig

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
PATH_LIKE = re.compile(r"`((?:wavepp|docs|scripts|tests|examples|\.ci)/[\w./-]*)`")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)[^)]*\)")
OTHERS_COMMANDS = ("curl", "kill", "serve")
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)


def load(path: Path) -> ModuleType:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands() -> list[str]:
    """Every command line that a page shows in a bash block."""
    blocks = [block for page in PAGES for block in BLOCK.findall(page.read_text())]
    lines = [line for block in blocks for line in block.splitlines() if line.strip()]
    assert lines
    return lines


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_only_files_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [name for name in PATH_LIKE.findall(text) if not (ROOT / name).exists()]
    missing += [name for name in LINK.findall(text) if not (page.parent / name).exists()]
    assert missing == []


def test_configuration_page_lists_every_flag() -> None:
    script = load(ROOT / "scripts" / "render_configuration.py")
    assert script.PAGE.read_text(encoding="utf-8") == script.render(), script.__doc__
    undescribed = [name for name, info in EngineConfig.model_fields.items() if not info.description]
    assert undescribed == []


@pytest.mark.parametrize("line", commands())
def test_shown_commands_are_commands(line: str) -> None:
    """Scripts exist and can be run; `wavepp` has the subcommand and all the flags shown."""
    words = shlex.split(line)
    if words[0] in OTHERS_COMMANDS:
        return
    if "wavepp" not in words:
        script = ROOT / words[0]
        assert script.is_file()
        assert script.stat().st_mode & 0o111
        return
    words = words[words.index("wavepp") :]
    flags = [word for word in words if re.fullmatch(r"-{1,2}[a-z][\w-]*", word)]
    first = 2 + (words[1] == "bench")
    command = [str(BIN / "wavepp"), *words[1:first], "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    known = set(re.findall(r"-{1,2}[a-z][\w-]*", done.stdout))
    assert [flag for flag in flags if flag not in known] == []


def test_shipped_prompts_are_what_their_maker_writes() -> None:
    maker = load(ROOT / "examples" / "make_prompts.py")
    assert (ROOT / "examples" / "prompts.jsonl").read_text(encoding="utf-8") == maker.render()
    ids = [line["custom_id"] for line in maker.lines()]
    assert len(ids) == len(set(ids))


def test_scripts_install_the_torch_that_the_package_asks_for() -> None:
    pinned = re.findall(r'"(torch==[\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert (
        re.findall(r'^TORCH="(.*)"$', (ROOT / "scripts" / "_venv.sh").read_text(), re.M) == pinned
    )
