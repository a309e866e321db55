"""Writes docs/configuration.md from the fields of EngineConfig, which are the engine flags.

python scripts/render_configuration.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from wavepp import EngineConfig

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"

HEADER = """# Configuration

Every command that runs an engine takes these flags; `EngineConfig` and `LLM` take the same names
with underscores. `--config FILE.yaml` reads lines of `flag-name: value`; a flag on the command line
wins over the file, and an unknown name is an error that names the nearest known one.

    # engine.yaml
    model: /models/SmolLM2-135M-Instruct
    pipeline-parallel-size: 2
    max-num-batched-tokens: 512

`-pp` is short for `--pipeline-parallel-size`. "None" as a default means: chosen when the engine
starts, as the description says.

This page is written by `scripts/render_configuration.py`.

| flag | type | default | meaning |
|---|---|---|---|
"""


def type_text(annotation: Any) -> str:
    """A field's type in a reader's words."""
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    text = re.sub(r"typing.Literal\[(.*?)\]", lambda found: found[1].replace(", ", " or "), text)
    text = text.replace(" | None", "").replace("'", "").replace("tuple[int, ...]", "int,int,...")
    return text.replace("|", "or")


def row(name: str, info: FieldInfo) -> str:
    """One field as a line of the table."""
    flag = f"`--{name.replace('_', '-')}`"
    default = "required" if info.is_required() else f"`{info.default}`"
    meaning = (info.description or "").replace("|", "\\|")
    return f"| {flag} | {type_text(info.annotation)} | {default} | {meaning} |\n"


def render() -> str:
    """The whole page."""
    fields = EngineConfig.model_fields.items()
    return HEADER + "".join(row(name, info) for name, info in fields)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
