"""Writes the tables in docs/results.md from the reports that were measured, in docs/results/.

python scripts/render_results.py

`ablation-*.json` are what `wavepp bench ablation --json` wrote; rows of one cell may stand in
several of them. `short-*.json` and `ray-*.json` are that too, with pools that are short, in one
process and on Ray. `grid-*.json` are what `wavepp bench grid --json` wrote, a section each.
"""

from __future__ import annotations

import json
from pathlib import Path

from wavepp.bench.ablation_table import write_sections
from wavepp.bench.grid_table import write_section

DOCS = Path(__file__).parent.parent / "docs"

if __name__ == "__main__":
    written = 0
    for title in ("ablation", "short", "ray"):
        files = sorted((DOCS / "results").glob(f"{title}-*.json"))
        reports = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        write_sections(reports, DOCS / "results.md", title)
        written += len(files)
    for grid in sorted((DOCS / "results").glob("grid-*.json")):
        write_section(json.loads(grid.read_text(encoding="utf-8")), grid.stem, DOCS / "results.md")
        written += 1
    print(f"{DOCS / 'results.md'}: {written} reports")
