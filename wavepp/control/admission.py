"""Who waits, and who may run: the queue, the lanes, and the room on the smallest stage.

Owns: the waiting requests in order of arrival, the admitted ones, and exact accounting of what they
hold. May not: write the log or talk to stages. FCFS: nobody passes a head that waits (paper,
section on admission). A stage frees what a request held when it applies the same decisions, so the
sums here are the smallest stage's. Leases and escrows replace the accounting by the stages' own
votes; queue, lanes and order stay.
"""

from __future__ import annotations

import bisect

from wavepp.control.limits import Limits
from wavepp.control.states import Phase, RequestState


class Admission:
    """FCFS queue in front of `lanes_max` lanes."""

    def __init__(self, limits: Limits, *, lanes_max: int) -> None:
        assert lanes_max >= 1, lanes_max
        self._limits = limits
        self._lanes_max = lanes_max
        self._waiting: list[RequestState] = []  # by serial
        self._admitted: list[RequestState] = []  # by serial
        self._blocks_held = 0
        self.tokens_waiting = 0

    @property
    def waiting(self) -> tuple[RequestState, ...]:
        """Not admitted, in order of arrival."""
        return tuple(self._waiting)

    @property
    def admitted(self) -> tuple[RequestState, ...]:
        """Admitted, in order of arrival."""
        return tuple(self._admitted)

    @property
    def num_waiting(self) -> int:
        """Requests that are not admitted."""
        return len(self._waiting)

    def enqueue(self, state: RequestState) -> None:
        """Puts a request (back) into the queue, at its place by arrival."""
        bisect.insort(self._waiting, state, key=lambda other: other.serial)
        self.tokens_waiting += state.num_prompt_tokens

    def admit_head(self) -> RequestState | None:
        """Gives the head of the queue a lane and its room if it is ready and both are there."""
        if not self._waiting:
            return None
        head = self._waiting[0]
        if head.phase is not Phase.READY or not self._fits(head):
            return None
        self._leave_queue(head)
        head.enter(Phase.ADMITTED)
        bisect.insort(self._admitted, head, key=lambda other: other.serial)
        self._blocks_held += self._blocks_of(head)
        return head

    def release(self, state: RequestState) -> None:
        """Forgets a request that ends or is about to wait again, wherever it is."""
        if state.phase is Phase.ADMITTED:
            self._admitted.remove(state)
            self._blocks_held -= self._blocks_of(state)
            assert self._blocks_held >= 0, self._blocks_held
        else:
            self._leave_queue(state)

    def check(self) -> None:
        """Asserts that the sums are those of the requests."""
        assert len(self._admitted) <= self._lanes_max, len(self._admitted)
        held = sum(self._blocks_of(state) for state in self._admitted)
        assert held == self._blocks_held, (held, self._blocks_held)
        if self._limits.blocks is not None:
            assert held <= self._limits.blocks.units, (held, self._limits.blocks)
        tokens = sum(state.num_prompt_tokens for state in self._waiting)
        assert tokens == self.tokens_waiting, (tokens, self.tokens_waiting)
        for queue in (self._waiting, self._admitted):
            serials = [state.serial for state in queue]
            assert serials == sorted(serials), serials

    def _leave_queue(self, state: RequestState) -> None:
        self._waiting.remove(state)
        self.tokens_waiting -= state.num_prompt_tokens
        assert self.tokens_waiting >= 0, self.tokens_waiting

    def _blocks_of(self, state: RequestState) -> int:
        return self._limits.blocks_needed(state.num_prompt_tokens, state.arrival.max_tokens)

    def _fits(self, state: RequestState) -> bool:
        if len(self._admitted) >= self._lanes_max:
            return False
        limits = self._limits
        if limits.slots is not None and len(self._admitted) >= limits.slots.units:
            return False
        return (
            limits.blocks is None
            or self._blocks_held + self._blocks_of(state) <= limits.blocks.units
        )
