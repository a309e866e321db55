"""The `wavepp` command: argument parsing only; what the commands do is in wavepp/commands.

Nothing heavy (torch, transformers, Ray) is imported before a command needs it. What a user can get
wrong ends in one line on standard error and exit status 2, never a traceback.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from wavepp import __version__
from wavepp.commands.bench_ablation import run_ablation
from wavepp.commands.bench_grid import run_grid
from wavepp.commands.bench_options import JsonFile, NumPrefixes, Repeats, ReuseFrac
from wavepp.commands.engine_flags import engine_command
from wavepp.config import EngineConfig, build_config
from wavepp.errors import ConfigError, RequestError, WavePPError

OK, FAILURE, USAGE = 0, 1, 2
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)

app = typer.Typer(
    name="wavepp",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut long flag names off on narrow terminals
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(rich_markup_mode=None)
app.add_typer(bench, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"wavepp {__version__}")
        raise typer.Exit


def _help_without_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(USAGE)


@bench.callback(invoke_without_command=True)
def _bench(context: typer.Context) -> None:
    """Measure speed."""
    _help_without_command(context)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Pipeline-parallel prefill of large language models."""
    _help_without_command(context)


def run_batch(
    config: EngineConfig,
    input_file: Annotated[
        str, typer.Option("--input-file", "-i", metavar="FILE", help="JSON lines; - for a pipe")
    ],
    output_file: Annotated[
        str, typer.Option("--output-file", "-o", metavar="FILE", help="answers; - for a pipe")
    ],
    resume: Annotated[
        bool,
        typer.Option("--resume", help="keep the answers in the output file, do what is missing"),
    ] = False,
) -> None:
    """Answer a file of prompts, one JSON line each, in order.

    Lines are OpenAI batch lines (custom_id, method, url, body with /v1/completions or
    /v1/chat/completions) or plain ones: {"prompt": "text"} or {"prompt_token_ids": [1, 2]}.

    An existing output file is overwritten, unless --resume is given.
    """
    from wavepp.commands.run_batch import run

    run(config, input_file, output_file, resume=resume)


def throughput(
    config: EngineConfig,
    workload: Annotated[
        str,
        typer.Option(metavar="LIST", help="of cold, reuse, mixed, storm, trace; comma-separated"),
    ] = "cold",
    concurrency: Annotated[
        str, typer.Option(metavar="LIST", help="requests kept in flight; comma-separated")
    ] = "1,4,8",
    prompt_len: Annotated[int, typer.Option(min=1, metavar="N", help="tokens in a prompt")] = 4096,
    requests: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="in a run; default: 8, the concurrency, a trace's"),
    ] = None,
    request_rate: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="arrivals a second, instead of a closed loop"),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="requests of workload trace, one JSON object a line"),
    ] = None,
    trace_scale: Annotated[
        float, typer.Option(min=1e-6, metavar="X", help="times faster than the trace was recorded")
    ] = 1.0,
    repeats: Repeats = 3,
    reuse_frac: ReuseFrac = 0.9,
    num_prefixes: NumPrefixes = 4,
    baseline: Annotated[
        str | None, typer.Option(metavar="transformers", help="run it in turn, on the same tokens")
    ] = None,
    json_file: JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="OUT.png", help="draw throughput, waves, wave sizes")
    ] = None,
    engine_trace: Annotated[
        Path | None, typer.Option(metavar="OUT", help="what other commands call --trace")
    ] = None,
) -> None:
    """Measure prompt throughput, in process: a closed loop, arrivals at a rate, or a trace."""
    from wavepp.bench.throughput import Plan, run

    if engine_trace is not None:
        config = config.model_copy(update={"trace": str(engine_trace)})

    plan = Plan.parse(
        workloads=workload,
        concurrency=concurrency,
        prompt_len=prompt_len,
        requests=requests,
        repeats=repeats,
        reuse_frac=reuse_frac,
        num_prefixes=num_prefixes,
        baseline=baseline,
        request_rate=request_rate,
        trace=trace,
        trace_scale=trace_scale,
        seed=config.seed,
    )
    run(config, plan, json_file, plot)


def serve(
    config: EngineConfig,
    host: Annotated[str, typer.Option(metavar="TEXT", help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, metavar="N", help="to listen on")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(metavar="TEXT", help="ask clients for this bearer token")
    ] = None,
    max_body_mib: Annotated[
        float, typer.Option(metavar="X", help="refuse request bodies larger than this")
    ] = 32,
    num_replicas: Annotated[
        int, typer.Option(min=1, metavar="N", help="engines, each a whole pipeline")
    ] = 1,
    shutdown_timeout_s: Annotated[
        float, typer.Option(min=0, metavar="X", help="for requests in flight when told to stop")
    ] = 60.0,
) -> None:
    """Serve OpenAI's HTTP API on Ray Serve, until SIGTERM or Ctrl-C."""
    from wavepp.commands.serve import run

    options = {
        "api_key": api_key,
        "max_body_mib": max_body_mib,
        "num_replicas": num_replicas,
        "shutdown_timeout_s": shutdown_timeout_s,
    }
    run(config, options, host=host, port=port)


app.command("run-batch")(engine_command(run_batch))
app.command("serve")(engine_command(serve))
bench.command("throughput")(engine_command(throughput, left_out=frozenset({"trace"})))
bench.command("ablation")(engine_command(run_ablation, left_out=frozenset({"trace"})))
bench.command("grid")(
    engine_command(run_grid, left_out=frozenset({"trace", "planner", "wave_times"}))
)


@bench.command("admission")
def admission(
    prompt_len: Annotated[
        int, typer.Option(min=1, metavar="N", help="tokens in a prompt; a quarter is timed too")
    ] = 200_000,
    concurrency: Annotated[
        int, typer.Option(min=1, metavar="N", help="prompts at once, and held by the caches")
    ] = 64,
    block_size: Annotated[int, typer.Option(min=1, metavar="N", help="tokens in a block")] = 64,
    stages: Annotated[
        int, typer.Option(min=1, metavar="N", help="stages of the pipeline that admits")
    ] = 4,
    runs: Annotated[
        int, typer.Option(min=2, metavar="N", help="runs of a prompt from which others part")
    ] = 200,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="timed runs of each")] = 5,
    seed: Annotated[int, typer.Option(metavar="N", help="of the made prompts")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Measure admission: keys, probes, hints, leases, escrows, lock holds, whole admissions.

    No model and no network: real caches and the real protocol, in memory. Times by the wall clock
    and by the CPU.
    """
    from wavepp.bench.admission import Plan, run

    plan = Plan(
        prompt_len=prompt_len,
        concurrency=concurrency,
        block_size=block_size,
        stages=stages,
        runs=runs,
        repeats=repeats,
        seed=seed,
    )
    run(plan, json_file)


@bench.command("families")
def families(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="FAMILY...", help="default: all")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="tokens in the prompt")] = 1024,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="timed runs of each side")] = 5,
    threads: Annotated[int, typer.Option(min=1, metavar="N", help="CPU threads")] = 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="write the results here")
    ] = None,
) -> None:
    """Measure the layers of each model family beside transformers' forward, on random weights."""
    from wavepp.bench.families import run

    run(names or (), tokens=tokens, repeats=repeats, threads=threads, json_file=json_file)


@bench.command("serve")
def bench_serve(
    base_url: Annotated[
        str, typer.Option(metavar="URL", help="of the server")
    ] = "http://127.0.0.1:8000",
    endpoint: Annotated[str, typer.Option(metavar="PATH", help="to send to")] = "/v1/completions",
    model: Annotated[
        str | None, typer.Option(metavar="TEXT", help="default: the first the server lists")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(metavar="TEXT", help="the server's bearer token")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, metavar="N", help="requests to send")] = 1000,
    dataset_path: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="prompts, a line each (JSON with prompt, or text)"),
    ] = None,
    random_input_len: Annotated[
        int, typer.Option(min=1, metavar="N", help="tokens of a random prompt")
    ] = 1024,
    random_output_len: Annotated[
        int, typer.Option(min=0, metavar="N", help="max_tokens of every request")
    ] = 1,
    random_prefix_len: Annotated[
        int, typer.Option(min=0, metavar="N", help="tokens before them, alike in all prompts")
    ] = 0,
    vocab_size: Annotated[
        int, typer.Option(min=10, metavar="N", help="random tokens are drawn below it")
    ] = 500,
    request_rate: Annotated[
        float | None, typer.Option(min=0.001, metavar="X", help="requests a second; default: all")
    ] = None,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="most requests in flight")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="every answer is as long as it may be")
    ] = False,
    seed: Annotated[int, typer.Option(metavar="N", help="of prompts and arrivals")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="write all numbers here")
    ] = None,
) -> None:
    """Measure a server of OpenAI's API under load: throughput, times to first token and to the end.

    Options, numbers and print are those of `vllm bench serve`.
    """
    from wavepp.bench.serve import Plan, run

    plan = Plan(
        base_url=base_url,
        endpoint=endpoint,
        model=model,
        api_key=api_key,
        num_prompts=num_prompts,
        dataset_path=dataset_path,
        random_input_len=random_input_len,
        random_output_len=random_output_len,
        random_prefix_len=random_prefix_len,
        vocab_size=vocab_size,
        request_rate=request_rate,
        max_concurrency=max_concurrency,
        ignore_eos=ignore_eos,
        seed=seed,
    )
    run(plan, json_file)


@bench.command("compare")
def compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="the one that should win")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="what it is measured against")],
) -> None:
    """Compare two results cell by cell: A's input tokens/s over B's."""
    from wavepp.bench.compare import run

    run(first, second)


@app.command("top")
def top(
    url: Annotated[str, typer.Argument(metavar="URL", help="of the server")],
    api_key: Annotated[
        str | None, typer.Option(metavar="TEXT", help="the server's bearer token")
    ] = None,
    every: Annotated[float, typer.Option(min=0.1, metavar="X", help="seconds between looks")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="print one look and end")] = False,
) -> None:
    """Show what a server does: its queue, ring, stages, caches and hit rate, until Ctrl-C."""
    from wavepp.commands.top import run

    run(url, api_key=api_key, every_s=every, once=once)


@app.command("sim")
def sim(
    seeds: Annotated[str, typer.Argument(metavar="SEED | A:B", help="one seed, or a range")],
    minutes: Annotated[
        float | None,
        typer.Option(metavar="N", help="go on with the seeds after these for so long"),
    ] = None,
) -> None:
    """Run the real driver and stages under a virtual clock, with faults, and check every step.

    One seed prints a line an event; a range prints a summary. Ends with status 1 when something was
    wrong, and says how to see it again.
    """
    from wavepp.commands.sim import run

    if not run(seeds, minutes):
        raise typer.Exit(FAILURE)


@app.command("make-tiny")
def make_tiny(
    family: Annotated[str, typer.Argument(help="model family, such as llama")],
    out: Annotated[Path, typer.Argument(help="folder to write")],
) -> None:
    """Write a tiny random checkpoint in the released layout."""
    from wavepp.commands.models import run_make_tiny

    run_make_tiny(family, out)


@app.command("check-model")
def check_model(
    model: Annotated[str, typer.Argument(help="folder of a checkpoint")],
    pipeline_parallel_size: Annotated[
        int | None,
        typer.Option("--pipeline-parallel-size", "-pp", metavar="N", help="P: stages (default: 1)"),
    ] = None,
    layer_partition: Annotated[
        str | None, typer.Option(metavar="8,8,7,7", help="layers per stage; default: balanced")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="of weights; default: the checkpoint's")] = None,
) -> None:
    """Say which family a checkpoint is, what each stage would load, and what is unsupported.

    Ends with status 1 when something is unsupported.
    """
    from wavepp.commands.models import run_check_model

    options = {
        "model": model,
        "pipeline_parallel_size": pipeline_parallel_size,
        "layer_partition": layer_partition,
        "dtype": dtype,
    }
    run_check_model(build_config({k: v for k, v in options.items() if v is not None}))


def plan(
    config: EngineConfig,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT.yaml", help="time this machine, and write a cost model for --cost-model"
        ),
    ] = None,
) -> None:
    """Say how a model would be split over stages, which budgets and pools it gets, and why."""
    from wavepp.commands.plan import run

    run(config, profile)


app.command("plan")(engine_command(plan))


@app.command("trace")
def trace(
    file: Annotated[Path, typer.Argument(help="what an engine wrote with --trace")],
    request: Annotated[
        str | None, typer.Option(metavar="ID", help="tell the story of this request")
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(metavar="OUT", help="write waves, rounds and leases for ui.perfetto.dev"),
    ] = None,
) -> None:
    """Read a trace: a summary, the story of one request, or a file for Perfetto."""
    from wavepp.commands.trace import run

    run(file, request=request, perfetto=perfetto)


def main() -> NoReturn:
    """The console command. Turns errors into one line and an exit status."""
    sys.exit(_status())


def _status() -> int:
    try:
        status = typer.main.get_command(app).main(standalone_mode=False)
    except (ConfigError, RequestError) as error:
        return _complain(str(error), USAGE)
    except WavePPError as error:
        return _complain(str(error), FAILURE)
    except (KeyboardInterrupt, typer.Abort):
        status = STOPPED[0]
    except _click_exception() as error:
        return _complain(error.format_message(), USAGE)
    if status in STOPPED:
        return _complain("interrupted", status)
    return status if isinstance(status, int) else OK


def _click_exception() -> Any:
    """The root of what typer raises for wrong usage; its home differs between typer's versions."""
    return typer.BadParameter.__mro__[2]


def _complain(message: str, status: int) -> int:
    line = " ".join(message.split())
    typer.echo(f"wavepp: {line}", err=True)
    return status


if __name__ == "__main__":
    main()
