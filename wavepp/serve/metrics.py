"""What Prometheus reads: vLLM's names, after `wavepp:`, where the thing is the same.

Owns: the counts of answers that went through this server. What the engine counts itself (queue,
waves, stages, caches) is taken from its latest snapshot when somebody reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from wavepp.config import EngineConfig
from wavepp.requests import WAVE_SIZE_BOUNDS, EngineStats, PrefillResult, StageStats

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
PREFIX = "wavepp:"


class Metrics:
    """The metrics of one server.

    Args:
        config: told in `cache_config_info`; its model name is a label of everything counted here.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector(config)
        self._registry.register(self._engine)
        self._model = config.model_name
        self._prompt_tokens = self._counter("prompt_tokens", "tokens of prompts that were served")
        self._cached = self._counter(
            "prompt_tokens_cached_by_source", "those of them that were not computed", "source"
        )
        self._generation_tokens = self._counter("generation_tokens", "tokens that were produced")
        self._success = self._counter("request_success", "answers", "finished_reason")
        self._rejections = self._counter("admission_rejections", "refusals", "reason")
        self._ttft = self._histogram("time_to_first_token_seconds", "arrival to first token")
        self._e2e = self._histogram("e2e_request_latency_seconds", "arrival to end")
        self._queue = self._histogram("request_queue_time_seconds", "arrival to admission")
        self._hint = self._histogram("hint_seconds", "arrival to what stages said of its prefix")
        self._admission = self._histogram("admission_seconds", "from there to admission")
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "first wave to first token, or to the end"
        )

    def answered(self, result: PrefillResult) -> None:
        """A request came to its end, well or not."""
        self._success.labels(self._model, result.finish_reason).inc()
        if result.finish_reason not in ("stop", "length"):
            return
        self._prompt_tokens.labels(self._model).inc(result.num_prompt_tokens)
        self._cached.labels(self._model, "local_cache_hit").inc(result.num_cached_tokens)
        self._generation_tokens.labels(self._model).inc(len(result.token_ids))
        times = result.timings
        end_s = times.first_token_s if times.first_token_s is not None else times.done_s
        _observe(self._ttft.labels(self._model), times.queued_s, times.first_token_s)
        _observe(self._e2e.labels(self._model), times.queued_s, times.done_s)
        _observe(self._queue.labels(self._model), times.queued_s, times.admitted_s)
        _observe(self._hint.labels(self._model), times.queued_s, times.hint_s)
        _observe(self._admission.labels(self._model), times.hint_s, times.admitted_s)
        _observe(self._prefill.labels(self._model), times.first_wave_s, end_s)

    def left(self, count: int = 1) -> None:
        """A client went away, and with it so many requests that had no end yet."""
        self._success.labels(self._model, "abort").inc(count)

    def refused(self, reason: str) -> None:
        """A request was refused."""
        self._rejections.labels(self._model, reason).inc()

    def text(self, stats: EngineStats | None) -> bytes:
        """All metrics in Prometheus' text format; `stats` None: without the engine's own."""
        self._engine.stats = stats
        return generate_latest(self._registry)

    def families(self, stats: EngineStats | None) -> list[Metric]:
        """All metrics as they are."""
        self._engine.stats = stats
        return list(self._registry.collect())

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        counter = Counter(PREFIX + name, text, ("model_name", *labels), registry=self._registry)
        if not labels:
            counter.labels(self._model)  # told as 0 from the beginning
        return counter

    def _histogram(self, name: str, text: str) -> Histogram:
        histogram = Histogram(
            PREFIX + name, text, ("model_name",), registry=self._registry, buckets=SECONDS
        )
        histogram.labels(self._model)
        return histogram


class _EngineCollector(Collector):
    """An engine's snapshot as metrics."""

    def __init__(self, config: EngineConfig) -> None:
        self.stats: EngineStats | None = None
        self._info = {
            name: str(getattr(config, name))
            for name in ("block_size", "enable_prefix_caching", "kv_offloading_size")
        }

    def collect(self) -> Iterator[Metric]:
        """As prometheus_client asks."""
        info = InfoMetricFamily(f"{PREFIX}cache_config", "how the cache is set up")
        info.add_metric([], self._info)
        yield info
        if self.stats is not None:
            yield from _of_engine(self.stats)
            yield from _of_stages(self.stats.stages)

    def describe(self) -> Iterable[Metric]:
        """Nothing is known before the first snapshot."""
        return ()


def _of_engine(stats: EngineStats) -> Iterator[Metric]:
    gauges = {
        "num_requests_running": ("requests that are admitted", stats.requests_running),
        "num_requests_waiting": ("requests that wait", stats.requests_waiting),
        "ring_occupancy": ("waves in flight", stats.ring_occupancy),
        "wave_budget_tokens": ("tokens the latest wave was allowed", stats.wave_budget),
        "leases": ("leases that are not materialised yet", stats.leases),
        "lease_age_seconds_max": ("age of the oldest of them", stats.lease_age_s_max),
    }
    counters = {
        "prefix_cache_queries": ("prompt tokens looked up", stats.prefix_queries),
        "prefix_cache_hits": ("of those, reused on every stage", stats.prefix_hits),
        "waves": ("waves that came back", stats.waves),
        "computed_tokens": ("tokens that were computed", stats.computed_tokens),
        "admission_rounds": ("rounds to all stages", stats.rounds),
        "endpoint_lowered": ("agreements below the candidate", stats.endpoints_lowered),
        "lease_mismatch": ("votes of unequal endpoints", stats.lease_mismatches),
        "endpoint_lowered_tokens": ("tokens they were below it", stats.endpoint_lowered_tokens),
        "capacity_refusals": ("times a stage had no room", stats.capacity_refusals),
        "stage_restarts": ("stages that were replaced", stats.stage_restarts),
        "victim_substitutions": (
            "reclaimed blocks that others were taken for",
            sum(stage.victims_substituted for stage in stats.stages),
        ),
        "invariant_violations": (
            "times an idle stage held something",
            stats.invariant_violations,
        ),
    }
    for name, (text, gauge) in gauges.items():
        yield GaugeMetricFamily(PREFIX + name, text, value=gauge)
    for name, (text, count) in counters.items():
        yield CounterMetricFamily(PREFIX + name, text, value=count)
    failures = CounterMetricFamily(
        f"{PREFIX}escrow_failures", "no blocks for a request", labels=["reason"]
    )
    failures.add_metric(["no_room"], stats.capacity_refusals)
    failures.add_metric(["rolled_back"], stats.rolled_back)
    yield failures
    yield _wave_sizes(stats)


def _wave_sizes(stats: EngineStats) -> Metric:
    bounds = [*map(str, map(float, WAVE_SIZE_BOUNDS)), "+Inf"]
    buckets = list(zip(bounds, accumulate(stats.wave_size_counts), strict=True))
    return HistogramMetricFamily(
        f"{PREFIX}iteration_tokens_total",
        "tokens of a wave",
        buckets=buckets,
        sum_value=stats.launched_tokens,
    )


def _of_stages(stages: Iterable[StageStats]) -> Iterator[Metric]:
    usage = GaugeMetricFamily(f"{PREFIX}kv_cache_usage_perc", "of blocks held", labels=["stage"])
    snapshots = GaugeMetricFamily(f"{PREFIX}snapshot_usage_perc", "filled", labels=["stage"])
    escrow = GaugeMetricFamily(f"{PREFIX}escrow_blocks", "blocks promised", labels=["stage"])
    busy = CounterMetricFamily(f"{PREFIX}stage_busy_seconds", "computing", labels=["stage"])
    wait = CounterMetricFamily(
        f"{PREFIX}stage_wait_seconds", "not computing", labels=["stage", "reason"]
    )
    for stage in stages:
        label = str(stage.stage)
        usage.add_metric([label], stage.cache_usage)
        if stage.snapshots_total:
            snapshots.add_metric([label], stage.snapshots_filled / stage.snapshots_total)
        escrow.add_metric([label], stage.escrow_blocks)
        busy.add_metric([label], stage.busy_s)
        for reason, seconds in stage.wait_s.items():
            wait.add_metric([label, reason], seconds)
    yield from (usage, snapshots, escrow, busy, wait)


def _observe(histogram: Histogram, from_s: float | None, to_s: float | None) -> None:
    if from_s is not None and to_s is not None:
        histogram.observe(to_s - from_s)
