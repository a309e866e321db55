"""A trace as Perfetto (or chrome://tracing) shows it: waves by stage, rounds, requests, leases.

Owns: the shape of the JSON. One process a stage with its preparing and its computing, one for the
driver with its rounds, one for requests, one for leases.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wavepp.actors.story import Request, Trace, Wave

Event = dict[str, Any]

DRIVER, REQUESTS, LEASES, FIRST_STAGE = 1, 2, 3, 10
ROUNDS, COMPUTE, PREPARE = 1, 1, 2
US = 1e6


def perfetto_events(trace: Trace) -> dict[str, Any]:
    """The JSON object to write. Times are microseconds since the first record."""
    events = [
        *_names(trace),
        *_rounds(trace),
        *(event for wave in trace.waves.values() for event in _wave(trace, wave)),
        *(event for request in trace.requests.values() for event in _request(trace, request)),
    ]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _names(trace: Trace) -> Iterator[Event]:
    processes = {DRIVER: "driver", REQUESTS: "requests", LEASES: "leases"}
    threads = {(DRIVER, ROUNDS): "rounds"}
    for stage in range(trace.num_stages):
        pid = FIRST_STAGE + stage
        processes[pid] = f"stage {stage}"
        threads |= {(pid, COMPUTE): "compute", (pid, PREPARE): "prepare"}
    for pid, name in processes.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for (pid, tid), name in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _rounds(trace: Trace) -> Iterator[Event]:
    for round_ in trace.rounds.values():
        end_s = trace.last_s if round_.answered_s is None else round_.answered_s
        yield {
            **_slice(trace, (DRIVER, ROUNDS), round_.sent_s, end_s),
            "name": f"round {round_.number}",
            "args": {
                "announced": round_.announced,
                "hints": round_.hints,
                "claims": round_.claims,
            },
        }


def _wave(trace: Trace, wave: Wave) -> Iterator[Event]:
    spans = {name: f"[{start}, {start + length})" for name, start, length in wave.spans}
    args = {"tokens": wave.num_tokens, "budget": wave.budget, "spans": spans}
    told = {"args": args, "name": f"wave {wave.number}"}
    for times in wave.stages:
        pid = FIRST_STAGE + times.stage
        yield {**_slice(trace, (pid, PREPARE), times.prepare_from_s, times.prepared_s), **told}
        yield {**_slice(trace, (pid, COMPUTE), times.forward_from_s, times.done_s), **told}


def _request(trace: Trace, request: Request) -> Iterator[Event]:
    done_s = trace.last_s if request.done_s is None else request.done_s
    admitted_s = request.admitted_s
    phases = [("waits", request.arrived_s, done_s if admitted_s is None else admitted_s)]
    if admitted_s is not None:
        phases.append(("runs", admitted_s, done_s))
    told = {
        "tokens": request.num_tokens,
        "reused": request.num_cached,
        "finish_reason": request.finish_reason,
        "story": [moment.text for moment in request.moments],
    }
    name = request.request_id
    whole: Event = {"cat": "request", "pid": REQUESTS, "id": name, "name": name, "args": told}
    yield from _async(trace, whole, request.arrived_s, done_s)
    for phase, start_s, end_s in phases:
        yield from _async(trace, {**whole, "name": phase, "args": {}}, start_s, end_s)
    for start_s, end in request.leases:
        lease: Event = {"cat": "lease", "pid": LEASES, "id": name, "name": name}
        yield from _async(trace, lease, start_s, trace.last_s if end is None else end)


def _slice(trace: Trace, track: tuple[int, int], start_s: float, end_s: float) -> Event:
    pid, tid = track
    ts = _ts(trace, start_s)
    return {"ph": "X", "pid": pid, "tid": tid, "ts": ts, "dur": max(_ts(trace, end_s) - ts, 0.0)}


def _async(trace: Trace, event: Event, start_s: float, end_s: float) -> Iterator[Event]:
    """Begin and end of something that overlaps others of its process."""
    yield {**event, "ph": "b", "ts": _ts(trace, start_s)}
    yield {**event, "ph": "e", "ts": _ts(trace, end_s), "args": {}}


def _ts(trace: Trace, at_s: float) -> float:
    return round((at_s - trace.first_s) * US, 3)
