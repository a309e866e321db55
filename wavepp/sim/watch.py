"""How checkers look on: taps on the machines, and the base of every checker.

Owns: what there is to see. May not: change anything. A tap replaces a method of one object by
itself with somebody looking before or after; the machines do not know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from wavepp.control.facts import Finish, WaveCompleted
from wavepp.control.stage import PreparedWave
from wavepp.protocol.messages import Decision, RoundMessage, RoundReply, WaveSchedule
from wavepp.sim.options import Job
from wavepp.sim.stage import SimStage
from wavepp.sim.violation import Violation

if TYPE_CHECKING:
    from wavepp.sim.world import World


class Checker:
    """An outside observer. `name` is number and title; every method may look, none may touch."""

    name = "0 nothing"

    def __init__(self, world: World) -> None:
        self.world = world

    def require(self, truth: bool, message: str, *facts: object) -> None:
        """
        Raises:
            Violation: it is not true.
        """
        if not truth:
            raise Violation(self.name, " ".join([message, *map(repr, facts)]))

    def logged(self, decision: Decision) -> None:
        """The driver decided this (the stages are as they were when it did)."""

    def sent(self, messages: Sequence[RoundMessage]) -> None:
        """A round went out."""

    def replied(self, reply: RoundReply) -> None:
        """A stage answered it."""

    def launched(self, schedule: WaveSchedule) -> None:
        """A wave went out."""

    def prepared(self, stage: SimStage, wave: PreparedWave) -> None:
        """A stage prepared a wave."""

    def held(self, stage: SimStage) -> None:
        """A stage's tree lock was let go."""

    def completed(self, fact: WaveCompleted) -> None:
        """A wave came back, before the driver is told."""

    def finished(self, job: Job, finish: Finish) -> None:
        """A caller got an answer."""

    def turned(self) -> None:
        """The driver took a fact, and what it ordered is under way."""

    def ended(self) -> None:
        """Nothing is left to happen."""


HOOKS = (
    "logged",
    "sent",
    "replied",
    "launched",
    "prepared",
    "held",
    "completed",
    "finished",
    "turned",
    "ended",
)


def hooks_of(checkers: Sequence[Checker]) -> dict[str, list[Callable[..., None]]]:
    """For every hook, the checkers that look there."""
    return {
        hook: [
            getattr(checker, hook)
            for checker in checkers
            if getattr(type(checker), hook) is not getattr(Checker, hook)
        ]
        for hook in HOOKS
    }


def tap(
    target: object,
    name: str,
    *,
    before: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
) -> None:
    """Looks at every call of one object's method: `before(*args)`, `after(result, *args)`."""
    method = getattr(target, name)

    def watched(*args: Any, **options: Any) -> Any:
        if before is not None:
            before(*args)
        result = method(*args, **options)
        if after is not None:
            after(result, *args)
        return result

    setattr(target, name, watched)
