"""The server's metrics through Ray's own exporter, for those who collect from Ray's nodes.

Owns: what was told so far. Names are those of `/metrics` with `_` for `:` (Ray allows none), and
Ray's prefix; Serve adds labels for application, deployment and replica. Ray can't be handed a
histogram that is counted already: its buckets are gauges that only grow, under the same names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample
from ray.serve import metrics as ray_metrics

from wavepp.serve.service import Service

EVERY_S = 5.0

Series = tuple[str, tuple[tuple[str, str], ...]]


class RayExporter:
    """Tells Ray's metrics agent what changed."""

    def __init__(self) -> None:
        self._counters: dict[str, ray_metrics.Counter] = {}
        self._gauges: dict[str, ray_metrics.Gauge] = {}
        self._told: dict[Series, float] = {}

    async def run(self, service: Service) -> None:
        """Tells again and again, until it is cancelled."""
        while True:
            self.tell(service.metrics.families(await service.stats()))
            await asyncio.sleep(EVERY_S)

    def tell(self, families: Iterable[Metric]) -> None:
        """Tells all metrics as they are now."""
        for family in families:
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                if family.type == "counter":
                    self._count(sample, family.documentation)
                else:
                    self._set(sample, family.documentation)

    def _count(self, sample: Sample, text: str) -> None:
        """Ray's counters take what was added, and add `_total` to their names themselves."""
        name = _name(sample).removesuffix("_total")
        series = (name, tuple(sorted(sample.labels.items())))
        added = sample.value - self._told.get(series, 0.0)
        if added <= 0:
            return
        self._told[series] = sample.value
        if name not in self._counters:
            self._counters[name] = ray_metrics.Counter(name, text, _keys(sample.labels))
        self._counters[name].inc(added, dict(sample.labels))

    def _set(self, sample: Sample, text: str) -> None:
        name = _name(sample)
        if name not in self._gauges:
            self._gauges[name] = ray_metrics.Gauge(name, text, _keys(sample.labels))
        self._gauges[name].set(sample.value, dict(sample.labels))


def _name(sample: Sample) -> str:
    return sample.name.replace(":", "_")


def _keys(labels: Mapping[str, str]) -> Any:
    return tuple(labels)  # any number of them, though Serve's signature has one
