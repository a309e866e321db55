"""The documentation as a site: built strictly, so that no link, page or API name is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def build(config: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*command, "-d", str(out)],
        capture_output=True,
        text=True,
        timeout=200,
        env=env,
        check=False,
    )


def test_site_builds_and_names_the_public_calls(tmp_path: Path) -> None:
    built = build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert built.returncode == 0, built.stderr
    api = (tmp_path / "site" / "api.html").read_text()
    for name in ("prefill", "generate", "stream", "reset_prefix_cache", "num_cached_tokens"):
        assert f">{name}<" in api, name


def test_a_dead_link_fails_the_build(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "docs", copy / "docs")
    shutil.copytree(ROOT / "scripts", copy / "scripts")
    shutil.copy(ROOT / "mkdocs.yml", copy)
    (copy / "docs" / "limits.md").write_text("[gone](nowhere.md)\n")
    built = build(copy / "mkdocs.yml", tmp_path / "site")
    assert built.returncode != 0
    assert "nowhere.md" in built.stderr
