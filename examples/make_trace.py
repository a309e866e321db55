"""Writes examples/trace.jsonl: a made trace of requests, for `wavepp bench throughput --trace`.

python examples/make_trace.py

Conversations that grow turn by turn behind one of four system prompts, 300 requests at about one a
second, in Mooncake's line format.
"""

from __future__ import annotations

from pathlib import Path

from wavepp.bench.trace_file import sample_trace

REQUESTS, SEED = 300, 7
FILE = Path(__file__).parent / "trace.jsonl"

if __name__ == "__main__":
    FILE.write_text("".join(f"{line}\n" for line in sample_trace(REQUESTS, SEED)), encoding="utf-8")
    print(f"{FILE}: {REQUESTS} requests")
