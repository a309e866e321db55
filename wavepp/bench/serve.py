"""`wavepp bench serve`: a load on a server, told as `vllm bench serve` tells it.

Owns: the prompts, the numbers and their print.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wavepp.bench.report import quantile
from wavepp.bench.serve_client import Arrivals, Outcome, Target, find_model, send_all
from wavepp.bench.workloads import SPECIAL_TOKENS
from wavepp.console import open_console
from wavepp.errors import ConfigError, WavePPError

COLUMNS, LABEL = 50, 40
MS = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to send; names as the options of `vllm bench serve`.

    Attributes:
        dataset_path: a file of prompts, JSON lines with "prompt" or plain text lines; None: random
            tokens, `random_prefix_len` of them alike in all prompts.
        vocab_size: random tokens are drawn below it.
    """

    base_url: str
    endpoint: str = "/v1/completions"
    model: str | None = None
    api_key: str | None = None
    num_prompts: int = 1000
    dataset_path: Path | None = None
    random_input_len: int = 1024
    random_output_len: int = 1
    random_prefix_len: int = 0
    vocab_size: int = 500
    request_rate: float | None = None
    max_concurrency: int | None = None
    ignore_eos: bool = False
    seed: int = 0


def run(plan: Plan, json_file: Path | None) -> None:
    """Sends the load and prints what came of it.

    Raises:
        ConfigError: the server does not answer, or the prompts can't be read.
        WavePPError: no request was answered.
    """
    prompts = make_prompts(plan)
    outcomes, wall_s = asyncio.run(_send(plan, prompts))
    result = summary(outcomes, wall_s)
    console = open_console()
    for line in block(plan, result):
        console.print(line, highlight=False, markup=False)
    if json_file is not None:
        told = {name: str(value) if isinstance(value, Path) else value
                for name, value in asdict(plan).items() if name != "api_key"}  # fmt: skip
        json_file.write_text(json.dumps({"plan": told, **result}, indent=1) + "\n")
    if not result["completed"]:
        raise WavePPError(f"no request was answered; the first one: {outcomes[0].error}")


async def _send(plan: Plan, prompts: Sequence[str | list[int]]) -> tuple[list[Outcome], float]:
    base_url = plan.base_url.rstrip("/")
    model = plan.model or await find_model(base_url, plan.api_key)
    extra: dict[str, Any] = {"max_tokens": plan.random_output_len, "temperature": 0.0}
    if plan.ignore_eos:
        extra["ignore_eos"] = True
    target = Target(url=base_url + plan.endpoint, model=model, api_key=plan.api_key, extra=extra)
    arrivals = Arrivals(per_s=plan.request_rate, in_flight_max=plan.max_concurrency, seed=plan.seed)
    outcomes = await send_all(target, prompts, arrivals)
    begin_s = min(outcome.sent_s for outcome in outcomes)
    return outcomes, max(outcome.sent_s + outcome.end_s for outcome in outcomes) - begin_s


def make_prompts(plan: Plan) -> list[str | list[int]]:
    """The prompts of a plan, the same for the same seed.

    Raises:
        ConfigError: the file can't be read, or holds none.
    """
    if plan.dataset_path is not None:
        return _read_prompts(plan.dataset_path, plan.num_prompts)
    rng = random.Random(plan.seed)

    def draw(count: int) -> list[int]:
        return [rng.randrange(SPECIAL_TOKENS, plan.vocab_size) for _ in range(count)]

    prefix = draw(plan.random_prefix_len)
    return [prefix + draw(plan.random_input_len) for _ in range(plan.num_prompts)]


def _read_prompts(path: Path, count: int) -> list[str | list[int]]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        prompts = [json.loads(line)["prompt"] if line[0] == "{" else line for line in lines]
    except (OSError, UnicodeDecodeError, ValueError, KeyError) as error:
        raise ConfigError(f"prompts {path}: {type(error).__name__}: {error}") from None
    if not prompts:
        raise ConfigError(f"prompts {path}: the file is empty")
    return [prompts[number % len(prompts)] for number in range(count)]


def summary(outcomes: Sequence[Outcome], wall_s: float) -> dict[str, Any]:
    """All numbers of a run, named as in the JSON of `vllm bench serve`. Times in milliseconds."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    input_tokens = sum(outcome.prompt_tokens for outcome in good)
    output_tokens = sum(outcome.output_tokens for outcome in good)
    result: dict[str, Any] = {
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "errors": sorted({outcome.error for outcome in outcomes if outcome.error})[:10],
        "duration": wall_s,
        "total_input_tokens": input_tokens,
        "total_cached_tokens": sum(outcome.cached_tokens for outcome in good),
        "total_output_tokens": output_tokens,
        "request_throughput": len(good) / wall_s if wall_s else 0.0,
        "output_throughput": output_tokens / wall_s if wall_s else 0.0,
        "total_token_throughput": (input_tokens + output_tokens) / wall_s if wall_s else 0.0,
    }
    firsts = [outcome.first_s for outcome in good if outcome.first_s is not None]
    per_token = [
        (outcome.end_s - outcome.first_s) / (outcome.output_tokens - 1)
        for outcome in good
        if outcome.first_s is not None and outcome.output_tokens > 1
    ]
    between = [seconds for outcome in good for seconds in outcome.between_s]
    ends = [outcome.end_s for outcome in good]
    for name, values in (("ttft", firsts), ("tpot", per_token), ("itl", between), ("e2el", ends)):
        result |= _spread(name, values)
    return result


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    names = (f"mean_{name}_ms", f"median_{name}_ms", f"p99_{name}_ms")
    if not seconds:
        return dict.fromkeys(names)
    numbers = (statistics.mean(seconds), statistics.median(seconds), quantile(seconds, 0.99))
    return {label: MS * number for label, number in zip(names, numbers, strict=True)}


def block(plan: Plan, result: dict[str, Any]) -> Iterator[str]:
    """The printed lines."""
    yield " Serving Benchmark Result ".center(COLUMNS, "=")
    yield _line("Successful requests:", result["completed"])
    yield _line("Failed requests:", result["failed"])
    if plan.max_concurrency is not None:
        yield _line("Maximum request concurrency:", plan.max_concurrency)
    if plan.request_rate is not None:
        yield _line("Request rate configured (RPS):", plan.request_rate)
    yield _line("Benchmark duration (s):", result["duration"])
    yield _line("Total input tokens:", result["total_input_tokens"])
    yield _line("Total cached input tokens:", result["total_cached_tokens"])
    yield _line("Total generated tokens:", result["total_output_tokens"])
    yield _line("Request throughput (req/s):", result["request_throughput"])
    yield _line("Output token throughput (tok/s):", result["output_throughput"])
    yield _line("Total token throughput (tok/s):", result["total_token_throughput"])
    titles = {
        "ttft": "Time to First Token",
        "tpot": "Time per Output Token (excl. 1st token)",
        "itl": "Inter-token Latency",
        "e2el": "End-to-end Latency",
    }
    for name, title in titles.items():
        if result[f"mean_{name}_ms"] is None:
            continue
        yield title.center(COLUMNS, "-")
        for kind in ("mean", "median", "p99"):
            label = f"{'P99' if kind == 'p99' else kind.capitalize()} {name.upper()} (ms):"
            yield _line(label, result[f"{kind}_{name}_ms"])
    yield "=" * COLUMNS


def _line(label: str, value: float) -> str:
    return f"{label:<{LABEL}}{value if isinstance(value, int) else f'{value:.2f}':<10}"
