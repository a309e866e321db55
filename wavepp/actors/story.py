"""From a trace back to what happened: requests, rounds and waves, each with its times.

Owns: how the records of `actors/trace.py` are read. May not: print, or need anything but the file.
Records of kinds it does not know are passed over, so that a trace can say more than is read here.
All times are seconds on the driver's monotonic clock; a stage's own are on its node's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wavepp.errors import ConfigError

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened to a request."""

    at_s: float
    text: str


@dataclass(slots=True)
class Request:
    """One request.

    Attributes:
        request_id: the name inside the pipeline.
        leases: from the claim until every stage had materialised it, or it was undone; None: the
            trace ends before.
    """

    user_id: str
    request_id: str
    num_tokens: int
    arrived_s: float
    moments: list[Moment] = field(default_factory=list)
    rounds: set[int] = field(default_factory=set)
    waves: list[int] = field(default_factory=list)
    leases: list[tuple[float, float | None]] = field(default_factory=list)
    candidate: int | None = None
    endpoint: int | None = None
    retries: int = 0
    undone: int = 0
    admitted_s: float | None = None
    done_s: float | None = None
    finish_reason: str | None = None
    num_cached: int = 0

    @property
    def took_s(self) -> float | None:
        """From arrival to end."""
        return None if self.done_s is None else self.done_s - self.arrived_s

    def note(self, at_s: float, text: str) -> None:
        """Adds to its story."""
        self.moments.append(Moment(at_s, text))


@dataclass(slots=True)
class Round:
    """One round; `answered_s` is None when the trace ends before."""

    number: int
    sent_s: float
    announced: int
    hints: int
    claims: int
    answered_s: float | None = None


@dataclass(frozen=True, slots=True)
class StageTimes:
    """What one stage did for one wave, and when."""

    stage: int
    prepare_from_s: float
    prepared_s: float
    forward_from_s: float
    done_s: float


@dataclass(slots=True)
class Wave:
    """One wave; `budget`: tokens the planner allowed it; `spans`: (request, start, length)."""

    number: int
    launched_s: float
    budget: int
    spans: list[tuple[str, int, int]]
    stages: list[StageTimes] = field(default_factory=list)
    completed_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Of all spans."""
        return sum(length for _, _, length in self.spans)


@dataclass(slots=True)
class Trace:
    """Everything one trace tells.

    Attributes:
        requests: by their name inside the pipeline, in order of arrival.
        cut_short: the last line is incomplete: the file is being written, or its writer was killed.
    """

    requests: dict[str, Request] = field(default_factory=dict)
    rounds: dict[int, Round] = field(default_factory=dict)
    waves: dict[int, Wave] = field(default_factory=dict)
    num_stages: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    cut_short: bool = False

    def named(self, name: str) -> list[Request]:
        """The requests of a user's id (which may be used again), of a name in the pipeline, or of a
        batch line or an HTTP answer, whose prompts are numbered behind its id."""
        numbered = re.compile(re.escape(name) + r"-\d+")
        return [
            request
            for request in self.requests.values()
            if name in (request.user_id, request.request_id) or numbered.fullmatch(request.user_id)
        ]


def read_trace(path: Path) -> Trace:
    """Reads a file that `--trace` wrote.

    Raises:
        ConfigError: it can't be read, or is not a trace; file and line are named.
    """
    trace = Trace()
    reader = _Reader(trace)
    try:
        with path.open(encoding="utf-8") as file:
            for number, record in _records(path, file, trace):
                try:
                    reader.take(float(record["t"]), str(record["kind"]), record["value"])
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    told = f"{type(error).__name__}: {error}"
                    raise ConfigError(
                        f"trace {path}: line {number} is no record of a trace ({told})"
                    ) from None
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"trace {path}: not a text file") from None
    if not reader.count:
        raise ConfigError(f"trace {path}: holds no record")
    return trace


def _records(path: Path, lines: Iterable[str], trace: Trace) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, 1):
        try:
            yield number, json.loads(line)
        except ValueError:
            if line.endswith("\n"):
                raise ConfigError(f"trace {path}: line {number} is not JSON") from None
            trace.cut_short = True


class _Reader:
    """Takes one record after another."""

    def __init__(self, trace: Trace) -> None:
        self.count = 0
        self._trace = trace
        self._users: dict[str, Request] = {}  # user's id -> its latest request
        self._read_to = 0  # decisions up to this number of the epoch's log were read
        self._past_waves = self._past_rounds = 0  # of the epochs before
        self._waits: Json = {}

    def take(self, at_s: float, kind: str, value: Any) -> None:
        """One record."""
        trace = self._trace
        if not self.count:
            trace.first_s = at_s
        self.count += 1
        trace.last_s = max(trace.last_s, at_s)
        match kind:
            case "fact":
                self._fact(at_s, value)
            case "effects":
                for effect in value:
                    self._effect(at_s, effect)
            case "wave":
                self._report(self._wave(value["wave"]), value["report"])
            case "waits":
                self._waiting(at_s, value)
            case "epoch":
                self._epoch(at_s, value)

    def _epoch(self, at_s: float, value: Json) -> None:
        """Numbers of waves, rounds and decisions begin again; here those of waves and rounds go
        on. Whoever has not finished begins again."""
        self._past_waves = max(self._trace.waves, default=0)
        self._past_rounds = max(self._trace.rounds, default=0)
        self._read_to = 0
        for request in self._trace.requests.values():
            if request.done_s is None:
                _end_lease(request, at_s)
                request.waves, request.endpoint = [], None
                request.note(at_s, f"begins again in epoch {value['epoch']}: {value['reason']}")

    def _wave(self, number: Any) -> int:
        return self._past_waves + int(number)

    def _round(self, number: Any) -> int:
        return self._past_rounds + int(number)

    def _waiting(self, at_s: float, waits: Json) -> None:
        """Who waits for another's prefix now: name -> (donor, up to where)."""
        for name, (donor, target) in waits.items():
            if name not in self._waits:
                self._note(name, at_s, f"waits for {donor}, which computes up to {target}")
        for name in self._waits:
            if name not in waits:
                self._note(name, at_s, "waits no longer")
        self._waits = waits

    # -- facts -------------------------------------------------------------------------------------

    def _fact(self, at_s: float, fact: Json) -> None:
        match fact["type"]:
            case "Arrived":
                self._arrived(at_s, fact["arrival"])
            case "AbortRequested":
                request = self._users.get(fact["user_id"])
                if request is not None and request.done_s is None:
                    request.note(at_s, "abort was asked for")
            case "RoundAnswered":
                self._answered(at_s, fact["replies"])
            case "WaveCompleted":
                self._completed(at_s, fact)

    def _arrived(self, at_s: float, arrival: Json) -> None:
        user_id, tokens = str(arrival["user_id"]), int(arrival["token_ids"]["len"])
        serial = len(self._trace.requests) + 1  # as the driver counts
        request = Request(user_id, f"{user_id}#{serial}", tokens, at_s)
        request.note(at_s, f"arrived: {tokens} tokens, max_tokens {arrival['max_tokens']}")
        self._users[user_id] = self._trace.requests[request.request_id] = request

    def _answered(self, at_s: float, replies: list[Json]) -> None:
        number = self._round(replies[0]["round_number"])
        if number in self._trace.rounds:
            self._trace.rounds[number].answered_s = at_s
        hints: dict[str, list[str]] = {}
        for reply in sorted(replies, key=lambda reply: reply["ack"]["stage"]):
            stage = reply["ack"]["stage"]
            for hint in reply["answer"]["hints"]:
                told = f"stage {stage} {describe_reuse(hint['hint']['reuse'])}"
                hints.setdefault(hint["request_id"], []).append(told)
        for name, told_by in hints.items():
            self._note(name, at_s, f"hints of round {number}: {'; '.join(told_by)}")
        for reply in sorted(replies, key=lambda reply: reply["ack"]["stage"]):
            for vote in reply["answer"]["votes"]:
                self._voted(at_s, reply["ack"]["stage"], vote)

    def _voted(self, at_s: float, stage: int, vote: Json) -> None:
        told = describe_vote(vote)
        self._note(
            vote["request_id"], at_s, f"vote of stage {stage}, attempt {vote['attempt']}: {told}"
        )

    def _completed(self, at_s: float, fact: Json) -> None:
        wave = self._trace.waves.get(self._wave(fact["wave"]))
        failed = {error["request_id"]: error for error in fact["errors"]}
        if wave is None:
            return
        wave.completed_s = at_s
        for name, start, length in wave.spans:
            error = failed.get(name)
            if error is not None:
                text = f"wave {wave.number} failed on stage {error['stage']}: {error['message']}"
            else:
                text = f"wave {wave.number} came back: computed to {start + length}"
                text += _busy(wave)
            self._note(name, at_s, text)

    def _report(self, number: int, report: Json) -> None:
        wave = self._trace.waves.get(number)
        if wave is None:
            return
        times = StageTimes(
            stage=int(report["ack"]["stage"]),
            prepare_from_s=float(report["prepare_from_s"]),
            prepared_s=float(report["prepared_s"]),
            forward_from_s=float(report["forward_from_s"]),
            done_s=float(report["done_s"]),
        )
        wave.stages.append(times)
        if len(wave.stages) < self._trace.num_stages:
            return
        materialized_s = max(stage.prepared_s for stage in wave.stages)
        for name, _, _ in wave.spans:
            request = self._trace.requests.get(name)
            if request is not None and request.waves and request.waves[0] == number:
                _end_lease(request, materialized_s)

    # -- effects -----------------------------------------------------------------------------------

    def _effect(self, at_s: float, effect: Json) -> None:
        match effect["type"]:
            case "SendRound":
                self._sent(at_s, effect["messages"])
            case "LaunchWave":
                self._launched(at_s, effect["schedule"], int(effect["budget"]))
            case "Finish":
                self._finished(at_s, effect["result"])

    def _sent(self, at_s: float, messages: list[Json]) -> None:
        first = messages[0]
        number, ask = self._round(first["round_number"]), first["ask"]
        self._trace.num_stages = len(messages)
        longest = max((message["entries"] for message in messages), key=len)
        self._decisions(at_s, longest, where=f"in round {number}")
        self._trace.rounds[number] = Round(
            number, at_s, len(first["prompts"]), len(ask["hints"]), len(ask["claims"])
        )
        for name in ask["hints"]:
            self._touch(name, number)
        for claim in ask["claims"]:
            self._claimed(at_s, number, claim)

    def _claimed(self, at_s: float, number: int, claim: Json) -> None:
        request = self._touch(claim["request_id"], number)
        if request is None:
            return
        request.candidate = int(claim["limit"])
        request.leases.append((at_s, None))
        text = f"claimed in round {number}, attempt {claim['attempt']}: candidate {claim['limit']}"
        request.note(at_s, text + (", ignoring the headroom" if claim["oversized"] else ""))

    def _launched(self, at_s: float, schedule: Json, budget: int) -> None:
        number = self._wave(schedule["wave"])
        self._decisions(at_s, schedule["entries"], where=f"with wave {number}")
        wave = Wave(number, at_s, budget, [])
        self._trace.waves[number] = wave
        for span in schedule["spans"]:
            name, start, length = span["request_id"], int(span["start"]), int(span["length"])
            wave.spans.append((name, start, length))
            request = self._trace.requests.get(name)
            if request is not None:
                request.waves.append(number)
                final = ", the last" if span["final"] else ""
                request.note(at_s, f"wave {number}: tokens [{start}, {start + length}){final}")

    def _decisions(self, at_s: float, entries: list[Json], *, where: str) -> None:
        """Each decision once, when it is first carried."""
        for entry in entries:
            if int(entry["number"]) > self._read_to:
                self._read_to = int(entry["number"])
                self._decided(at_s, entry["decision"], where)

    def _decided(self, at_s: float, decision: Json, where: str) -> None:
        request = self._trace.requests.get(decision["request_id"])
        if request is None:
            return
        attempt = decision["attempt"]
        match decision["type"]:
            case "Announce":
                text = f"announced {where}"
            case "Retry":
                request.retries += 1
                text = f"told {where} to move to {decision['limit']} at most, attempt {attempt}"
            case "Admit":
                request.endpoint, request.admitted_s = int(decision["endpoint"]), at_s
                text = f"admitted {where}, attempt {attempt}: endpoint {decision['endpoint']}"
            case "Junction":
                text = f"junction at {decision['position']}, told {where}"
            case "Undo":
                request.undone += 1
                request.waves, request.endpoint = [], None
                _end_lease(request, at_s)
                text = f"attempt {attempt} undone {where}{_fence(decision, self._past_waves)}"
            case kind:
                _end_lease(request, at_s)
                text = f"{'aborted' if kind == 'Abort' else 'freed'} {where}"
                text += _fence(decision, self._past_waves)
        request.note(at_s, text)

    def _finished(self, at_s: float, result: Json) -> None:
        request = self._users.get(result["request_id"])
        if request is None:
            return
        request.done_s, request.finish_reason = at_s, str(result["finish_reason"])
        request.num_cached = int(result["num_cached_tokens"])
        admitted_s = result["timings"]["admitted_s"]
        if admitted_s is not None:
            request.admitted_s = float(admitted_s)
        text = f"finished: {request.finish_reason}, {request.num_cached} of {request.num_tokens}"
        text += " tokens reused"
        request.note(at_s, text + (f"; {result['error']}" if result["error"] else ""))

    def _touch(self, name: str, round_number: int) -> Request | None:
        request = self._trace.requests.get(name)
        if request is not None:
            request.rounds.add(round_number)
        return request

    def _note(self, name: str, at_s: float, text: str) -> None:
        request = self._trace.requests.get(name)
        if request is not None:
            request.note(at_s, text)


def describe_reuse(reuse: Json) -> str:
    """The endpoints of a hint or a vote, in a few words."""
    parts = []
    if reuse["attention"] is not None:
        parts.append(str(reuse["attention"]))
    if reuse["sliding"] is not None:
        ranges = ", ".join(f"{low}-{high}" for low, high in reuse["sliding"][-3:])
        parts.append(f"windows at {ranges or 0}")
    if reuse["snapshots"] is not None:
        points = ", ".join(str(point) for point in reuse["snapshots"][-3:])
        parts.append(f"snapshots at {points or 0}")
    return ", ".join(parts) or "no limit"


def describe_vote(vote: Json) -> str:
    """One stage's word on one attempt."""
    lease = vote["lease"]
    if lease is None:
        return "not tried, an earlier request was refused"
    refusal = lease["refusal"]
    if refusal is not None:
        return (
            f"refused, {refusal['reason']}: {refusal['needed']} of {refusal['group']} needed, "
            f"{refusal['available']} there"
        )
    if lease["committed"]:
        return f"committed at {lease['endpoint']}"
    return f"leased to {lease['endpoint']} only; usable: {describe_reuse(lease['reuse'])}"


def _busy(wave: Wave) -> str:
    if not wave.stages:
        return ""
    times = ", ".join(f"{(s.done_s - s.forward_from_s) * 1e3:.2f}" for s in wave.stages)
    return f" (stages were busy {times} ms)"


def _fence(decision: Json, past_waves: int) -> str:
    fence = int(decision["fence_wave"])
    return f", behind wave {past_waves + fence}" if fence else ""


def _end_lease(request: Request, at_s: float) -> None:
    if request.leases and request.leases[-1][1] is None:
        request.leases[-1] = (request.leases[-1][0], at_s)
