"""Writes the ablation's tables in docs/results.md from the reports that were measured.

python scripts/render_results.py

The reports are what `wavepp bench ablation --json` wrote, in docs/results/; rows of one cell may
stand in several of them.
"""

from __future__ import annotations

import json
from pathlib import Path

from wavepp.bench.ablation_table import write_sections

DOCS = Path(__file__).parent.parent / "docs"

if __name__ == "__main__":
    files = sorted((DOCS / "results").glob("ablation-*.json"))
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    write_sections(reports, DOCS / "results.md")
    print(f"{DOCS / 'results.md'}: {len(reports)} reports")
