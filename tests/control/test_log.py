"""The decision log: numbers, digests, gaps, divergence."""

from __future__ import annotations

import pytest

from wavepp.control.log import AppliedLog, DecisionLog
from wavepp.errors import RemoteProtocolError
from wavepp.protocol.messages import NO_WAVE, Announce, Decision, Free, LogEntry, StageAck
from wavepp.units import LogNumber, RequestId, StageIndex


def announce(name: str) -> Decision:
    return Announce(request_id=RequestId(name), attempt=1, num_tokens=3)


def free(name: str) -> Decision:
    return Free(request_id=RequestId(name), attempt=1, fence_wave=NO_WAVE)


def apply_all(log: DecisionLog, stage: AppliedLog) -> list[Decision]:
    return stage.take_new(log.unacked(stage.stage), apply_to=log.last)


def test_stage_applies_each_decision_once_in_order() -> None:
    log, stage = DecisionLog(1), AppliedLog(StageIndex(0))
    decisions = [announce("a"), announce("b"), free("a")]
    for decision in decisions:
        log.append(decision)
    assert apply_all(log, stage) == decisions
    assert apply_all(log, stage) == []
    assert stage.applied == 3


def test_log_keeps_what_some_stage_has_not_acknowledged() -> None:
    log, stages = DecisionLog(2), [AppliedLog(StageIndex(i)) for i in range(2)]
    log.append(announce("a"))
    log.append(announce("b"))
    apply_all(log, stages[0])
    log.acknowledge(stages[0].ack)
    assert [entry.number for entry in log.unacked(StageIndex(0))] == []
    assert [entry.number for entry in log.unacked()] == [1, 2]
    apply_all(log, stages[1])
    log.acknowledge(stages[1].ack)
    assert log.unacked() == ()
    log.append(free("a"))
    assert [entry.number for entry in log.unacked()] == [3]


def test_log_ignores_an_acknowledgement_that_came_late() -> None:
    log, stage = DecisionLog(1), AppliedLog(StageIndex(0))
    log.append(announce("a"))
    apply_all(log, stage)
    early = stage.ack
    log.append(free("a"))
    apply_all(log, stage)
    log.acknowledge(stage.ack)
    log.acknowledge(early)
    assert log.acked == (2,)


def test_stage_refuses_a_gap() -> None:
    log, stage = DecisionLog(1), AppliedLog(StageIndex(0))
    log.append(announce("a"))
    log.append(announce("b"))
    with pytest.raises(RemoteProtocolError, match="got decision 2 after 0"):
        stage.take_new(log.unacked()[1:], apply_to=log.last)


def test_stage_refuses_a_message_that_does_not_reach_what_it_needs() -> None:
    stage = AppliedLog(StageIndex(0))
    with pytest.raises(RemoteProtocolError, match="has decisions up to 0, the message needs 1"):
        stage.take_new([], apply_to=LogNumber(1))


def test_stage_refuses_a_number_that_changed_its_meaning() -> None:
    stage = AppliedLog(StageIndex(0))
    stage.take_new([LogEntry(number=LogNumber(1), decision=announce("a"))], apply_to=LogNumber(1))
    with pytest.raises(RemoteProtocolError, match=r"decision 1 was .*'a'.* now it is .*'b'"):
        stage.take_new(
            [LogEntry(number=LogNumber(1), decision=announce("b"))], apply_to=LogNumber(1)
        )


def test_driver_refuses_an_unequal_digest() -> None:
    log = DecisionLog(1)
    log.append(announce("a"))
    with pytest.raises(RemoteProtocolError, match="stage 0 diverged at decision 1"):
        log.acknowledge(StageAck(stage=StageIndex(0), applied=LogNumber(1), digest=1))


def test_driver_refuses_an_acknowledgement_from_the_future() -> None:
    with pytest.raises(RemoteProtocolError, match="the log ends at 0"):
        DecisionLog(1).acknowledge(StageAck(stage=StageIndex(0), applied=LogNumber(1), digest=0))
