"""The lifecycle table: closed, complete, and drawn in the docs as it is."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest

from wavepp.errors import LocalProtocolError
from wavepp.protocol.states import (
    ADMITTED,
    ENDED,
    HOLDING,
    QUEUED,
    TRANSITIONS,
    Event,
    Lifecycle,
    Phase,
    all_edges,
    render_mermaid,
)
from wavepp.units import RequestId

DOCS = Path(__file__).parent.parent.parent / "docs" / "protocol.md"


def at(phase: Phase) -> Lifecycle:
    """A request in a phase."""
    return Lifecycle(RequestId("a"), Counter(), phase)


def test_every_phase_has_a_row() -> None:
    assert set(TRANSITIONS) == set(Phase)


def test_every_phase_is_reached_from_arrived() -> None:
    reached, todo = {Phase.ARRIVED}, [Phase.ARRIVED]
    while todo:
        for target in TRANSITIONS[todo.pop()].values():
            if target not in reached:
                reached.add(target)
                todo.append(target)
    assert reached == set(Phase)


def test_every_event_moves_something() -> None:
    assert {event for _, event in all_edges()} == set(Event)


def test_cancellation_is_legal_in_every_live_phase() -> None:
    for phase, moves in TRANSITIONS.items():
        if phase not in ENDED:
            assert moves[Event.ABORT] is Phase.ABORTED


def test_only_endings_end() -> None:
    assert {Phase.DONE, Phase.ABORTED, Phase.FAILED, Phase.REFUSED} == ENDED


def test_nothing_runs_that_was_not_admitted() -> None:
    entered = {phase for phase, moves in TRANSITIONS.items() if Phase.RUNNING in moves.values()}
    assert entered <= ADMITTED


def test_only_who_holds_nothing_may_claim() -> None:
    claimers = {phase for phase, moves in TRANSITIONS.items() if Event.CLAIM in moves}
    assert claimers <= QUEUED
    assert not claimers & HOLDING


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(Phase, Event)))
def test_moves_follow_the_table_and_others_change_nothing(phase: Phase, event: Event) -> None:
    life = at(phase)
    target = TRANSITIONS[phase].get(event)
    if target is not None:
        life.move(event, now=1.0)
        assert (life.phase, life.edges) == (target, Counter({(phase, event): 1}))
        return
    with pytest.raises(LocalProtocolError, match=f"a is {phase.value}: '{event.value}'"):
        life.move(event, now=1.0)
    assert (life.phase, life.edges) == (phase, Counter())


def test_an_illegal_move_tells_the_story() -> None:
    life = at(Phase.ARRIVED)
    life.move(Event.ANNOUNCE, now=1.0)
    life.move(Event.HINT, now=2.5)
    with pytest.raises(LocalProtocolError) as error:
        life.move(Event.FINISH, now=3.0)
    assert "1.000000 arrived -announce-> 2.500000 announced -hint-> ready" in str(error.value)


def test_diagram_draws_every_edge() -> None:
    drawn = render_mermaid()
    for phase, event in all_edges():
        line = next(
            line
            for line in drawn.splitlines()
            if line.startswith(f"    {phase.value} --> {TRANSITIONS[phase][event].value}:")
        )
        assert event.value in line.split(": ")[1].split(", ")


def test_docs_show_the_diagram_of_the_table() -> None:
    assert f"```mermaid\n{render_mermaid()}```\n" in DOCS.read_text(encoding="utf-8")


def test_docs_describe_every_phase() -> None:
    text = DOCS.read_text(encoding="utf-8").split("```mermaid")[0]
    for phase in Phase:
        assert phase.value in text, phase
