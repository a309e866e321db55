"""Virtual time: what happens next, and the links that messages travel on.

Owns: the only clock of a simulation and the order of events. May not: know what an event does.
Equal times keep the order in which they were asked for, so one seed is one history.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

Action = Callable[[], None]

FIFO_GAP_S = 1e-9
"""Between two messages of one link, at least: they never change places."""


class Clock:
    """A heap of actions by time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Action, bool]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, when: float, action: Action, *, outside: bool = False) -> None:
        """Does `action` at a time (now, if that is later).

        Args:
            outside: it comes from outside the pipeline, and happens whatever becomes of that.
        """
        self._serial += 1
        heapq.heappush(self._heap, (max(when, self.now), self._serial, action, outside))

    def after(self, delay: float, action: Action) -> None:
        """Does `action` that much later."""
        self.at(self.now + delay, action)

    def forget(self) -> None:
        """Nothing that is under way inside the pipeline will arrive."""
        self._heap = [entry for entry in self._heap if entry[3]]
        heapq.heapify(self._heap)

    def step(self) -> bool:
        """Does the next action; False: there is none."""
        if not self._heap:
            return False
        self.now, _, action, _ = heapq.heappop(self._heap)
        self.events += 1
        action()
        return True


class Link:
    """Messages from one place to another: random delays, first in, first out.

    Args:
        delay: seconds for the next message.
    """

    def __init__(self, clock: Clock, delay: Callable[[], float]) -> None:
        self._clock = clock
        self._delay = delay
        self._last = 0.0
        self._waiting: deque[Action] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def send(self, action: Action, *, takes_s: float = 0.0) -> None:
        """Does `action` at the other end when the message arrives.

        Args:
            takes_s: for what it carries, besides the delay.
        """
        arrives = self._clock.now + self._delay() + takes_s
        self._last = max(arrives, self._last + FIFO_GAP_S)
        self._waiting.append(action)
        self._clock.at(self._last, self._arrive)

    def pull(self) -> bool:
        """Lets the next message arrive right now; False: none is under way.

        The clock's own entry for it then delivers the one after it, or nothing: a message may
        come early, never late, and never before an older one.
        """
        if not self._waiting:
            return False
        self._waiting.popleft()()
        return True

    def _arrive(self) -> None:
        if self._waiting:
            self._waiting.popleft()()
