"""Writes examples/grafana.json: a Grafana dashboard for the server's metrics.

python examples/make_dashboard.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "grafana.json"
WIDTH, HEIGHT, COLUMNS = 12, 8, 2

# title, unit, [(expression, legend)]
PANELS: list[tuple[str, str, list[tuple[str, str]]]] = [
    (
        "Requests",
        "short",
        [
            ("sum(wavepp:num_requests_running)", "running"),
            ("sum(wavepp:num_requests_waiting)", "waiting"),
        ],
    ),
    (
        "Tokens a second",
        "short",
        [
            ("sum(rate(wavepp:prompt_tokens_total[1m]))", "prompt"),
            ("sum(rate(wavepp:prompt_tokens_cached_by_source_total[1m]))", "of it cached"),
            ("sum(rate(wavepp:generation_tokens_total[1m]))", "produced"),
        ],
    ),
    (
        "Time to first token",
        "s",
        [
            (
                f"histogram_quantile({share}, "
                "sum(rate(wavepp:time_to_first_token_seconds_bucket[1m])) by (le))",
                f"p{round(share * 100)}",
            )
            for share in (0.5, 0.95, 0.99)
        ],
    ),
    (
        "Where requests spend their time",
        "s",
        [
            (f"sum(rate(wavepp:{name}_sum[1m])) / sum(rate(wavepp:{name}_count[1m]))", label)
            for name, label in (
                ("request_queue_time_seconds", "queue"),
                ("request_prefill_time_seconds", "prefill"),
                ("e2e_request_latency_seconds", "whole"),
            )
        ],
    ),
    ("Stages busy", "percentunit", [("rate(wavepp:stage_busy_seconds_total[1m])", "{{stage}}")]),
    (
        "Stages waiting",
        "percentunit",
        [("rate(wavepp:stage_wait_seconds_total[1m])", "{{stage}} {{reason}}")],
    ),
    (
        "Prefix hits",
        "percentunit",
        [
            (
                "sum(rate(wavepp:prefix_cache_hits_total[5m])) / "
                "sum(rate(wavepp:prefix_cache_queries_total[5m]))",
                "tokens",
            )
        ],
    ),
    ("Blocks held by requests", "percentunit", [("wavepp:kv_cache_usage_perc", "{{stage}}")]),
    (
        "Ring and leases",
        "short",
        [
            ("sum(wavepp:ring_occupancy)", "waves in flight"),
            ("sum(wavepp:leases)", "leases"),
            ("max(wavepp:lease_age_seconds_max)", "oldest lease, s"),
        ],
    ),
    (
        "Refusals and trouble",
        "short",
        [
            ("sum(rate(wavepp:admission_rejections_total[5m])) by (reason)", "{{reason}}"),
            ("sum(wavepp:invariant_violations_total)", "broken invariants"),
        ],
    ),
]


def panel(number: int) -> dict[str, Any]:
    """One graph."""
    title, unit, lines = PANELS[number]
    row, column = divmod(number, COLUMNS)
    return {
        "id": number + 1,
        "title": title,
        "type": "timeseries",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(lines)
        ],
    }


def render() -> str:
    """The dashboard's JSON."""
    source = {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    dashboard = {
        "title": "WavePP",
        "uid": "wavepp",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source]},
        "panels": [panel(number) for number in range(len(PANELS))],
    }
    return json.dumps(dashboard, indent=1) + "\n"


if __name__ == "__main__":
    OUT.write_text(render(), encoding="utf-8")
