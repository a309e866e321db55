"""The life of a request: one table, and nothing else decides which moves are legal.

Rule 1: every phase, every event and every legal move of a request stands in TRANSITIONS. A move
that is not there is a bug of this side and raises LocalProtocolError with the request's story.
Rule 2: what does not change which moves are legal (limits, votes, positions) is not a phase.

Owns: the table, and how it is drawn (`render_mermaid`; the diagram in docs/protocol.md is its
output). May not: know what a phase costs or who is next. Paper, section on admission.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from dataclasses import dataclass, field

from wavepp.errors import LocalProtocolError
from wavepp.units import RequestId

STORY_MOVES_MAX = 64
"""Moves of one request that are remembered for its story."""


class Phase(enum.Enum):
    """Where a request is."""

    ARRIVED = "arrived"  # only the driver knows it
    ANNOUNCED = "announced"  # its tokens are on the way to the stages
    READY = "ready"  # every stage has its tokens and gave a hint
    DEFERRED = "deferred"  # another request is computing the prefix it lacks
    CLAIMING = "claiming"  # every stage was asked for a lease and an escrow
    RETRYING = "retrying"  # every stage was told to move them to a lower endpoint
    WAITING = "waiting"  # refused for capacity, or rolled back, and undone; it waits for a release
    ADMITTED = "admitted"  # committed at one endpoint on every stage
    RUNNING = "running"  # some of its tokens were planned into waves
    COMPLETING = "completing"  # all of its tokens were planned; the last wave is under way
    DONE = "done"  # served
    ABORTED = "aborted"  # nobody wants it any more
    FAILED = "failed"  # a stage could not compute it
    REFUSED = "refused"  # it can never be held


class Event(enum.Enum):
    """What moves a request."""

    ANNOUNCE = "announce"
    HINT = "hint"
    DEFER = "defer"
    WAKE = "wake"
    CLAIM = "claim"
    RETRY = "retry"
    NO_ROOM = "no room"
    NOT_TRIED = "not tried"
    REVIVE = "revive"
    ADMIT = "admit"
    PLAN = "plan"
    PLAN_LAST = "plan last"
    RESTART = "restart"
    ROLL_BACK = "roll back"
    FINISH = "finish"
    ABORT = "abort"
    FAIL = "fail"
    REFUSE = "refuse"


TRANSITIONS: dict[Phase, dict[Event, Phase]] = {
    Phase.ARRIVED: {
        Event.ANNOUNCE: Phase.ANNOUNCED,
        Event.ABORT: Phase.ABORTED,
    },
    Phase.ANNOUNCED: {
        Event.HINT: Phase.READY,
        Event.ABORT: Phase.ABORTED,
    },
    Phase.READY: {
        Event.DEFER: Phase.DEFERRED,
        Event.CLAIM: Phase.CLAIMING,
        Event.ABORT: Phase.ABORTED,
    },
    Phase.DEFERRED: {
        Event.WAKE: Phase.READY,
        Event.ABORT: Phase.ABORTED,
    },
    Phase.CLAIMING: {
        Event.ADMIT: Phase.ADMITTED,
        Event.RETRY: Phase.RETRYING,
        Event.NO_ROOM: Phase.WAITING,
        Event.NOT_TRIED: Phase.READY,
        Event.REFUSE: Phase.REFUSED,
        Event.ABORT: Phase.ABORTED,
    },
    Phase.RETRYING: {
        Event.ADMIT: Phase.ADMITTED,
        Event.RETRY: Phase.RETRYING,
        Event.NO_ROOM: Phase.WAITING,
        Event.ABORT: Phase.ABORTED,
    },
    Phase.WAITING: {
        Event.REVIVE: Phase.READY,
        Event.ABORT: Phase.ABORTED,
    },
    Phase.ADMITTED: {
        Event.PLAN: Phase.RUNNING,
        Event.PLAN_LAST: Phase.COMPLETING,
        Event.ABORT: Phase.ABORTED,
    },
    Phase.RUNNING: {
        Event.PLAN: Phase.RUNNING,
        Event.PLAN_LAST: Phase.COMPLETING,
        Event.RESTART: Phase.READY,
        Event.ROLL_BACK: Phase.WAITING,
        Event.FAIL: Phase.FAILED,
        Event.ABORT: Phase.ABORTED,
    },
    Phase.COMPLETING: {
        Event.PLAN_LAST: Phase.COMPLETING,  # a produced token is computed in its turn
        Event.RESTART: Phase.READY,
        Event.ROLL_BACK: Phase.WAITING,
        Event.FINISH: Phase.DONE,
        Event.FAIL: Phase.FAILED,
        Event.ABORT: Phase.ABORTED,
    },
    Phase.DONE: {},
    Phase.ABORTED: {},
    Phase.FAILED: {},
    Phase.REFUSED: {},
}

ENDED = frozenset(phase for phase, moves in TRANSITIONS.items() if not moves)
"""Phases that nothing leaves."""

UNDECIDED = frozenset({Phase.CLAIMING, Phase.RETRYING})
"""The stages hold a lease for it, and have not agreed yet."""

ADMITTED = frozenset({Phase.ADMITTED, Phase.RUNNING, Phase.COMPLETING})
"""It has a lane."""

HOLDING = UNDECIDED | ADMITTED
"""Counted against `max_num_seqs`."""

QUEUED = frozenset({Phase.READY, Phase.WAITING})
"""It may be the next to claim."""

Edge = tuple[Phase, Event]


@dataclass(slots=True, eq=False)
class Lifecycle:
    """Where one request is, and how it got there.

    Attributes:
        edges: moves taken, counted; handed in, so that many requests share one count.
    """

    request_id: RequestId
    edges: Counter[Edge]
    phase: Phase = Phase.ARRIVED
    _story: deque[tuple[float, Phase, Event]] = field(
        default_factory=lambda: deque(maxlen=STORY_MOVES_MAX)
    )

    def move(self, event: Event, *, now: float) -> None:
        """Takes one move of the table.

        Raises:
            LocalProtocolError: the table has no such move; the message tells the story.
        """
        target = TRANSITIONS[self.phase].get(event)
        if target is None:
            raise LocalProtocolError(
                f"{self.request_id} is {self.phase.value}: {event.value!r} is not legal there. "
                f"Story: {self.story()}"
            )
        self.edges[self.phase, event] += 1
        self._story.append((now, self.phase, event))
        self.phase = target

    def story(self) -> str:
        """The latest moves, oldest first."""
        moves = [f"{now:.6f} {phase.value} -{event.value}->" for now, phase, event in self._story]
        return " ".join([*moves, self.phase.value])


def all_edges() -> frozenset[Edge]:
    """Every move of the table."""
    return frozenset((phase, event) for phase, moves in TRANSITIONS.items() for event in moves)


def render_mermaid() -> str:
    """The table as a Mermaid state diagram. Moves between the same two phases share an arrow."""
    lines = ["stateDiagram-v2", f"    [*] --> {Phase.ARRIVED.value}"]
    for phase, moves in TRANSITIONS.items():
        arrows: dict[Phase, list[str]] = {}
        for event, target in moves.items():
            arrows.setdefault(target, []).append(event.value)
        for target, events in arrows.items():
            lines.append(f"    {phase.value} --> {target.value}: {', '.join(events)}")
        if not moves:
            lines.append(f"    {phase.value} --> [*]")
    return "\n".join(lines) + "\n"
