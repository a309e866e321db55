"""Traces of real pipelines, and of messages written by hand, read back into stories."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wavepp import Engine, EngineConfig
from wavepp.actors.perfetto import FIRST_STAGE, LEASES, REQUESTS, perfetto_events
from wavepp.actors.ports import StageReport
from wavepp.actors.story import Request, Trace, describe_reuse, read_trace
from wavepp.actors.trace import TraceWriter, plain
from wavepp.cache.types import HintVote, LeaseVote, Refusal, ReuseVote
from wavepp.control.facts import (
    Arrival,
    Arrived,
    LaunchWave,
    RoundAnswered,
    SendRound,
    WaveCompleted,
)
from wavepp.control.work import ErrorRecord, Sampling, SpanOutput
from wavepp.errors import ConfigError
from wavepp.protocol.messages import (
    Admit,
    Announce,
    Decision,
    Free,
    LogEntry,
    RoundMessage,
    RoundReply,
    SpanPlan,
    StageAck,
    Undo,
    WaveSchedule,
)
from wavepp.protocol.votes import (
    Claim,
    ClaimVote,
    HintReply,
    Junction,
    Retry,
    RoundAnswer,
    RoundAsk,
)
from wavepp.requests import PositionLogprobs, TokenLogprob
from wavepp.units import LogNumber, RequestId, StageIndex, WaveNumber

A = RequestId("a#1")


def texts(request: Request) -> list[str]:
    return [moment.text for moment in request.moments]


# -- real pipelines --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Trace:
    """Four prompts that share a prefix, two of them at once; one of them twice; one aborted."""
    path = tmp_path_factory.mktemp("traces") / "real.jsonl"
    config = EngineConfig(
        model=tiny_llama,
        transport="local",
        pipeline_parallel_size=2,
        block_size=16,
        max_num_batched_tokens=64,
        threads_per_stage=1,
        trace=str(path),
    )
    shared = [(7 * place) % 200 + 5 for place in range(150)]

    async def serve() -> None:
        async with Engine(config) as engine:
            await engine.prefill([*shared, 1], request_id="first")
            await asyncio.gather(
                *(engine.prefill([*shared, token], request_id=f"of {token}") for token in (2, 3))
            )
            await engine.prefill([*shared, 1], request_id="first")
            await engine.prefill([*shared, 4], request_id="scored", prompt_logprobs=1)
            gone = asyncio.create_task(engine.prefill([9] * 600, request_id="gone"))
            await asyncio.sleep(0)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)

    asyncio.run(serve())
    return read_trace(path)


def test_every_request_is_there_in_order(real: Trace) -> None:
    names = [request.user_id for request in real.requests.values()]
    assert names == ["first", "of 2", "of 3", "first", "scored", "gone"]
    reasons = [request.finish_reason for request in real.requests.values()]
    assert reasons == ["length"] * 5 + ["abort"]
    assert len(real.named("first")) == 2
    assert real.named("first#4") == [real.requests["first#4"]]
    assert real.named("nobody") == []
    real.requests["first#1"].user_id = "batch_1-0"  # the first prompt of a batch line
    assert real.named("batch_1") == real.named("batch_1-0") == [real.requests["first#1"]]
    assert real.named("batch") == []
    assert not real.cut_short
    assert real.num_stages == 2


def test_reuse_is_told_as_it_was(real: Trace) -> None:
    requests = real.requests
    reused = [(r.candidate, r.endpoint, r.num_cached) for r in list(requests.values())[:5]]
    assert reused == [(0, 0, 0), (144, 144, 144), (144, 144, 144), (144, 144, 144), (0, 0, 0)]
    told = texts(requests["of 2#2"])
    assert "arrived: 151 tokens, max_tokens 1" in told[0]
    assert any(t.startswith("hints of round") and t.count("144") == 2 for t in told)
    assert "vote of stage 1, attempt 1: committed at 144" in told
    assert any(t.endswith("tokens [144, 151), the last") for t in told)
    assert any(t.startswith("finished: length, 144 of 151 tokens reused") for t in told)
    assert told[-1].startswith("freed")


def test_moments_are_in_order_of_time(real: Trace) -> None:
    for request in real.requests.values():
        times = [moment.at_s for moment in request.moments]
        assert times == sorted(times)
        assert request.arrived_s == times[0]
        assert request.done_s is not None
        if request.admitted_s is not None:
            assert request.arrived_s <= request.admitted_s <= request.done_s


def test_waves_hold_every_computed_token_once_and_the_stages_times(real: Trace) -> None:
    for request in list(real.requests.values())[:5]:
        spans = [
            (start, start + length)
            for wave in real.waves.values()
            for name, start, length in wave.spans
            if name == request.request_id
        ]
        assert spans[0][0] == request.endpoint
        assert spans[-1][1] == request.num_tokens
        assert all(end == start for (_, end), (start, _) in pairwise(spans))
    for wave in real.waves.values():
        assert [times.stage for times in wave.stages] == [0, 1]
        assert wave.completed_s is not None
        first, second = wave.stages
        assert first.prepare_from_s <= first.prepared_s <= first.forward_from_s <= first.done_s
        assert first.done_s <= second.done_s <= wave.completed_s


def test_leases_end_when_they_are_materialised(real: Trace) -> None:
    for request in list(real.requests.values())[:5]:
        [(start_s, end_s)] = request.leases
        first_wave = real.waves[request.waves[0]]
        assert end_s == max(times.prepared_s for times in first_wave.stages)
        assert request.arrived_s <= start_s < end_s


def test_perfetto_shows_waves_by_stage_rounds_and_leases(real: Trace) -> None:
    shown = json.loads(json.dumps(perfetto_events(real)))
    events: list[dict[str, Any]] = shown["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in slices)
    by_process = {
        pid: [event["name"] for event in slices if event["pid"] == pid and event["tid"] == 1]
        for pid in (1, FIRST_STAGE, FIRST_STAGE + 1)
    }
    assert by_process[1] == [f"round {number}" for number in real.rounds]
    assert by_process[FIRST_STAGE] == [f"wave {number}" for number in real.waves]
    assert by_process[FIRST_STAGE + 1] == by_process[FIRST_STAGE]
    open_ = [(e["pid"], e["id"], e["name"]) for e in events if e["ph"] == "b"]
    closed = [(e["pid"], e["id"], e["name"]) for e in events if e["ph"] == "e"]
    assert sorted(open_) == sorted(closed)
    assert {identity for pid, identity, _ in open_ if pid == REQUESTS} == set(real.requests)
    leased = [name for name, request in real.requests.items() if request.leases]
    assert [identity for pid, identity, _ in open_ if pid == LEASES] == leased
    names = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert names == {"driver", "requests", "leases", "stage 0", "stage 1"}


# -- messages by hand: what small pipelines seldom do ----------------------------------------------


class Hand:
    """Writes a trace as the driver does, with the real messages."""

    def __init__(self, path: Path, stages: int = 2) -> None:
        self.path, self.stages = path, stages
        self.writer = TraceWriter(str(path))
        self.now, self.number = 0.0, 0

    def write(self, kind: str, value: object) -> None:
        self.now += 1.0
        self.writer.write(kind, self.now, value)

    def arrive(self, tokens: int = 100) -> None:
        arrival = Arrival(
            user_id="a",
            token_ids=np.arange(tokens, dtype=np.int64),
            max_tokens=1,
            sampling=Sampling(),
        )
        self.write("fact", Arrived(arrival=arrival))

    def entries(self, *decisions: Decision) -> tuple[LogEntry, ...]:
        made = []
        for decision in decisions:
            self.number += 1
            made.append(LogEntry(number=LogNumber(self.number), decision=decision))
        return tuple(made)

    def round(self, number: int, *decisions: Decision, **ask: Any) -> None:
        message = RoundMessage(
            epoch=1,
            round_number=number,
            apply_to=LogNumber(self.number + len(decisions)),
            entries=self.entries(*decisions),
            ask=RoundAsk(**ask),
        )
        self.write("effects", [SendRound(messages=(message,) * self.stages)])

    def answers(self, number: int, *answers: RoundAnswer) -> None:
        replies = tuple(
            RoundReply(epoch=1, round_number=number, ack=ack(stage), answer=answer)
            for stage, answer in enumerate(answers)
        )
        self.write("fact", RoundAnswered(replies=replies[::-1]))

    def wave(self, number: int, *decisions: Decision, **span: Any) -> None:
        plan = SpanPlan(
            request_id=A, attempt=1, **{"start": 0, "length": 64, "final": False} | span
        )
        schedule = WaveSchedule(
            epoch=1,
            wave=WaveNumber(number),
            spans=(plan,),
            apply_to=LogNumber(self.number + len(decisions)),
            entries=self.entries(*decisions),
        )
        self.write("effects", [LaunchWave(schedule=schedule, budget=64)])

    def read(self) -> Trace:
        self.writer.flush()
        return read_trace(self.path)


def ack(stage: int) -> StageAck:
    return StageAck(stage=StageIndex(stage), applied=LogNumber(0), digest=0)


def hint(**reuse: Any) -> RoundAnswer:
    vote = HintVote(reuse=ReuseVote(**reuse), version=0)
    return RoundAnswer(hints=(HintReply(request_id=A, hint=vote),))


def vote(endpoint: int | None, *, committed: bool = True, **lease: Any) -> RoundAnswer:
    made = None
    if endpoint is not None:
        made = LeaseVote(
            request_id=A,
            attempt=1,
            endpoint=endpoint,
            reuse=ReuseVote(attention=endpoint),
            committed=committed,
            **lease,
        )
    return RoundAnswer(votes=(ClaimVote(request_id=A, attempt=1, lease=made),))


@pytest.fixture
def hand(tmp_path: Path) -> Iterator[Hand]:
    made = Hand(tmp_path / "hand.jsonl")
    yield made
    made.writer.close()


def test_lowered_endpoint_is_told_with_its_votes(hand: Hand) -> None:
    hand.arrive()
    hand.round(1, Announce(request_id=A, attempt=1, num_tokens=100), hints=(A,))
    hand.answers(1, hint(attention=96, snapshots=(32, 64)), hint())
    hand.round(2, claims=(Claim(request_id=A, attempt=1, limit=64, oversized=True),))
    hand.answers(2, vote(64), vote(32, committed=False))
    hand.round(3, Retry(request_id=A, attempt=2, limit=32))
    hand.answers(3, vote(32), vote(32))
    hand.wave(
        1,
        Admit(request_id=A, attempt=2, endpoint=32),
        Junction(request_id=A, attempt=2, position=96),
        start=32,
        length=68,
        final=True,
    )
    request = hand.read().requests[A]
    assert texts(request)[1:] == [
        "announced in round 1",
        "hints of round 1: stage 0 96, snapshots at 32, 64; stage 1 no limit",
        "claimed in round 2, attempt 1: candidate 64, ignoring the headroom",
        "vote of stage 0, attempt 1: committed at 64",
        "vote of stage 1, attempt 1: leased to 32 only; usable: 32",
        "told in round 3 to move to 32 at most, attempt 2",
        "vote of stage 0, attempt 1: committed at 32",
        "vote of stage 1, attempt 1: committed at 32",
        "admitted with wave 1, attempt 2: endpoint 32",
        "junction at 96, told with wave 1",
        "wave 1: tokens [32, 100), the last",
    ]
    assert (request.candidate, request.endpoint, request.retries) == (64, 32, 1)
    assert request.rounds == {1, 2}
    assert request.leases == [(4.0, None)]
    assert (request.done_s, request.took_s) == (None, None)


def test_refusal_is_told_with_both_numbers(hand: Hand) -> None:
    refusal = Refusal(reason="capacity", group="attention", needed=9, available=4)
    hand.arrive()
    hand.round(1, claims=(Claim(request_id=A, attempt=1, limit=0),))
    hand.answers(1, vote(0, committed=False, refusal=refusal), vote(None))
    hand.round(2, Undo(request_id=A, attempt=1, fence_wave=WaveNumber(0)))
    hand.write("waits", {A: ("b#2", 64)})
    hand.write("waits", {})
    request = hand.read().requests[A]
    assert texts(request)[2:] == [
        "vote of stage 0, attempt 1: refused, capacity: 9 of attention needed, 4 there",
        "vote of stage 1, attempt 1: not tried, an earlier request was refused",
        "attempt 1 undone in round 2",
        "waits for b#2, which computes up to 64",
        "waits no longer",
    ]
    assert request.undone == 1
    assert request.leases == [(2.0, 4.0)]


def test_failed_span_is_told_with_its_stage(hand: Hand) -> None:
    error = ErrorRecord(request_id=A, stage=StageIndex(1), message="out of luck", guilty=True)
    hand.arrive()
    hand.round(1)
    hand.wave(1, Admit(request_id=A, attempt=1, endpoint=0))
    hand.write(
        "fact", WaveCompleted(wave=WaveNumber(1), outputs=(), errors=(error,), acks=(ack(0),))
    )
    request = hand.read().requests[A]
    assert texts(request)[-1] == "wave 1 failed on stage 1: out of luck"


def test_a_decision_is_told_once_though_it_is_carried_twice(hand: Hand) -> None:
    hand.arrive()
    hand.wave(1, Admit(request_id=A, attempt=1, endpoint=0))
    hand.number = 0  # carried again
    hand.round(1, Admit(request_id=A, attempt=1, endpoint=0))
    told = [text for text in texts(hand.read().requests[A]) if text.startswith("admitted")]
    assert told == ["admitted with wave 1, attempt 1: endpoint 0"]


def test_stage_times_end_the_lease(hand: Hand) -> None:
    hand.arrive()
    hand.round(1, claims=(Claim(request_id=A, attempt=1, limit=0),))
    hand.wave(1, Admit(request_id=A, attempt=1, endpoint=0))
    for stage, prepared_s in enumerate((4.5, 4.25)):
        report = StageReport(
            ack=ack(stage),
            prepare_from_s=4.0,
            prepared_s=prepared_s,
            forward_from_s=4.5,
            done_s=5.0,
        )
        hand.write("wave", {"wave": 1, "report": report})
    assert hand.read().requests[A].leases == [(2.0, 4.5)]


def test_words_for_endpoints() -> None:
    assert describe_reuse(plain(ReuseVote())) == "no limit"
    assert describe_reuse(plain(ReuseVote(attention=64))) == "64"
    everything = ReuseVote(attention=64, snapshots=(), sliding=((0, 16), (32, 64)))
    assert describe_reuse(plain(everything)) == "64, windows at 0-16, 32-64, snapshots at 0"


def test_another_epoch_is_told_and_its_numbers_go_on(hand: Hand) -> None:
    hand.arrive()
    for epoch in (1, 2):
        hand.round(1, Announce(request_id=A, attempt=1, num_tokens=100), hints=(A,))
        hand.wave(1, Admit(request_id=A, attempt=1, endpoint=0))
        if epoch == 1:
            hand.write("epoch", {"epoch": 2, "reason": "stage 1 died"})
            hand.number = 0
    hand.round(2, Free(request_id=A, attempt=1, fence_wave=WaveNumber(1)))
    trace = hand.read()
    assert sorted(trace.waves) == [1, 2]
    assert sorted(trace.rounds) == [1, 2, 3]
    assert trace.requests[A].waves == [2]
    texts = [moment.text for moment in trace.requests[A].moments]
    assert "admitted with wave 2, attempt 1: endpoint 0" in texts
    assert "begins again in epoch 2: stage 1 died" in texts
    assert texts[-1].endswith("freed in round 3, behind wave 2")


# -- the file --------------------------------------------------------------------------------------


def test_prompts_are_not_in_the_trace(hand: Hand) -> None:
    scored = PositionLogprobs(chosen=TokenLogprob(token_id=77, logprob=-1.0, rank=1))
    output = SpanOutput(request_id=A, token_id=5, prompt_logprobs=(scored, scored))
    hand.arrive()
    hand.write("fact", WaveCompleted(wave=WaveNumber(1), outputs=(output,), errors=(), acks=()))
    hand.writer.flush()
    lines = [json.loads(line) for line in hand.path.read_text().splitlines()]
    assert lines[0]["value"]["arrival"]["token_ids"] == {"len": 100}
    assert lines[1]["value"]["outputs"][0]["prompt_logprobs"] == {"len": 2}


def test_unfinished_last_line_is_left_out(hand: Hand) -> None:
    hand.arrive()
    hand.writer.flush()
    whole = hand.path.read_text()
    hand.path.write_text(whole + whole[:50])
    trace = hand.read()
    assert trace.cut_short
    assert list(trace.requests) == [A]


def test_records_of_unknown_kinds_are_passed_over(hand: Hand) -> None:
    hand.write("weather", {"sun": True})
    hand.write("fact", {"type": "SunRose"})
    hand.arrive()
    assert list(hand.read().requests) == [A]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no record"),
        ("{\n{}\n", "line 1 is not JSON"),
        ("[1]\n", "line 1 is no record of a trace"),
        ('{"t": 1}\n', "line 1 is no record of a trace .KeyError: 'kind'"),
        ('{"t": "x", "kind": "fact", "value": {}}\n', "line 1 is no record"),
        ('{"t": 1, "kind": "other", "value": 1}\n{"t": 1, "kind": "fact", "value": 3}\n', "line 2"),
        ('{"t": 1, "kind": "effects", "value": 3}\n', "line 1 is no record of a trace .TypeError"),
        (b"\xff\xfe\x00", "not a text file"),
    ],
)
def test_file_that_is_no_trace_is_named(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=f"trace .*bad.jsonl: .*{message}"):
        read_trace(path)


def test_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_trace(tmp_path)
