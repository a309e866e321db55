"""`wavepp bench ablation`: its flags; the rest is in wavepp/bench/ablation.py."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from wavepp.commands.bench_options import JsonFile, NumPrefixes, Repeats, ReuseFrac
from wavepp.config import EngineConfig

ROWS = "naive,wave,escrow,mpu,balanced,tp"


def run_ablation(
    config: EngineConfig,
    *,
    rows: Annotated[
        str,
        typer.Option(
            metavar="LIST", help="of naive, wave, lease, escrow, mpu, balanced, tp, greedy"
        ),
    ] = ROWS,
    workload: Annotated[
        str, typer.Option(metavar="LIST", help="of cold, reuse, mixed: one a cell")
    ] = "cold,reuse,reuse",
    prompt_len: Annotated[
        str, typer.Option(metavar="LIST", help="tokens in a prompt: one a cell")
    ] = "131072,131072,262144",
    concurrency: Annotated[
        str, typer.Option(metavar="LIST", help="requests kept in flight: one a cell")
    ] = "16,8,32",
    requests: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="in a timed run; default: twice the concurrency"),
    ] = None,
    repeats: Repeats = 3,
    reuse_frac: ReuseFrac = 0.9,
    num_prefixes: NumPrefixes = 4,
    json_file: JsonFile = None,
    results: Annotated[
        Path | None, typer.Option(metavar="PAGE.md", help="put the tables between a page's marks")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="OUT.png", help="draw the last cell's waves by stage")
    ] = None,
) -> None:
    """Measure on emulated devices what each mechanism is worth, beside the paper's figures.

    Lists of workloads, lengths and concurrencies go together: by default the paper's three cells.
    Give the paper's limits too: --max-num-batched-tokens 16384 --max-num-seqs 16.
    """
    from wavepp.bench.ablation import AblationPlan, run

    plan = AblationPlan.parse(
        rows=rows,
        workloads=workload,
        prompt_lens=prompt_len,
        concurrency=concurrency,
        requests=requests,
        repeats=repeats,
        reuse_frac=reuse_frac,
        num_prefixes=num_prefixes,
        seed=config.seed,
    )
    run(
        config,
        plan,
        json_file=json_file,
        results=results,
        plot_file=plot,
        command=shlex.join(["wavepp", *sys.argv[1:]]),
    )
