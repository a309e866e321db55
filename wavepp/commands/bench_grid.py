"""`wavepp bench grid`: its flags; the rest is in wavepp/bench/grid.py."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from wavepp.commands.bench_options import JsonFile, NumPrefixes, ReuseFrac
from wavepp.config import EngineConfig


def run_grid(
    config: EngineConfig,
    *,
    planners: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="of greedy, static, mpu, balanced; or rows of the ablation: naive, wave, lease, "
            "escrow (static waves), tp",
        ),
    ] = "greedy,static,mpu,balanced",
    cells: Annotated[
        str,
        typer.Option(
            metavar="LIST", help="of workload:tokens (cold, reuse, mixed) and trace: prompts"
        ),
    ] = "cold:65536,cold:131072,cold:262144,reuse:131072,reuse:262144,mixed:131072",
    concurrency: Annotated[
        str, typer.Option(metavar="LIST", help="requests kept in flight: each with every cell")
    ] = "8,16,32",
    load: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="instead: arrivals, at so many times what greedy carries"
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="requests of cell trace, one JSON object a line"),
    ] = None,
    trace_requests: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="first so many of it; default: all")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="in a run; default: twice the concurrency, else 64"),
    ] = None,
    reuse_frac: ReuseFrac = 0.9,
    num_prefixes: NumPrefixes = 4,
    wave_times: Annotated[
        Path | None, typer.Option(metavar="FILE", help="what `balanced` starts from")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Compare planners on emulated devices under a virtual clock: no second of it is waited for.

    Driver, stages, planner and caches are the real ones; what a machine costs is not in it. Equal
    seeds give equal figures, whatever else the machine does.
    """
    from wavepp.bench.grid import GridPlan, run

    plan = GridPlan.parse(
        planners=planners,
        cells=cells,
        concurrency=concurrency,
        load=load,
        trace=trace,
        trace_requests=trace_requests,
        requests=requests,
        reuse_frac=reuse_frac,
        num_prefixes=num_prefixes,
        seed=config.seed,
        wave_times=wave_times,
    )
    run(config, plan, json_file=json_file, command=shlex.join(["wavepp", *sys.argv[1:]]))
