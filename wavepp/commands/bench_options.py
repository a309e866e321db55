"""Options that several benchmarks have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Repeats = Annotated[int, typer.Option(min=1, metavar="N", help="timed runs of each cell")]
ReuseFrac = Annotated[
    float, typer.Option(min=0.0, max=1.0, metavar="X", help="of a prompt that is a shared prefix")
]
NumPrefixes = Annotated[int, typer.Option(min=1, metavar="N", help="distinct shared prefixes")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="OUT", help="write meta and rows here")
]
