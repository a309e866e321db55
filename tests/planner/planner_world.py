"""A driver small enough to read: admitted requests, a ring, turns. It drives any planner the way
DriverControl does, and checks after every step what must always hold.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from wavepp.planner.demand import Demand, newest_chunks
from wavepp.planner.packing import Cut, Piece
from wavepp.planner.planner import Plan, Planner
from wavepp.planner.ring import Ring
from wavepp.units import RequestId, WaveNumber, align_down


def piece(name: str, remaining: int, *, start: int = 0, solo: bool = False) -> Piece:
    return Piece(request_id=RequestId(name), start=start, remaining=remaining, solo=solo)


def pieces(*remaining: int) -> tuple[Piece, ...]:
    """Pieces named a, b, c, ... that start at 0."""
    return tuple(piece(chr(ord("a") + i), tokens) for i, tokens in enumerate(remaining))


@dataclass(slots=True)
class Admitted:
    name: str
    end: int
    planned: int
    computed: int


class World:
    """Positions, ring and turns; every plan goes through `step`."""

    def __init__(self, planner: Planner, *, ring_depth: int, block_size: int) -> None:
        """Of R / 2 stages, as by default."""
        self.planner = planner
        self.num_stages = ring_depth // 2
        self.block_size = block_size
        self.ring: Ring[tuple[Cut, ...]] = Ring(ring_depth)
        self.requests: dict[str, Admitted] = {}
        self.in_admission = 0
        self.turn = 0
        self.now = 0.0
        self.budgets: list[int] = []
        self.waves: list[tuple[Cut, ...]] = []
        self.spans: dict[str, list[tuple[int, int]]] = {}
        self.idle_turns: set[int] = set()  # turns since the last wave at which nothing was planned

    def admit(self, name: str, tokens: int, *, endpoint: int = 0) -> None:
        self.requests[name] = Admitted(name, endpoint + tokens, endpoint, endpoint)

    def drop(self, name: str) -> None:
        """The request is aborted."""
        del self.requests[name]

    def next_turn(self, seconds: float = 0.0) -> None:
        self.turn += 1
        self.now += seconds

    def complete(self) -> None:
        """The oldest wave comes back."""
        number = WaveNumber(self.ring.completed + 1)
        cuts = self.ring.complete(number)
        seconds = 0.001 + 0.0001 * sum(cut.length for cut in cuts)
        self.planner.timed(number, [seconds] * self.num_stages)
        for cut in cuts:
            request = self.requests.get(cut.request_id)
            if request is None:
                continue
            assert request.computed == cut.start
            request.computed += cut.length
            if request.computed == request.end:
                del self.requests[request.name]

    def demand(self) -> Demand:
        waiting = tuple(
            piece(r.name, r.end - r.planned, start=r.planned)
            for r in self.requests.values()
            if r.planned < r.end
        )
        admitted = [[cut for cut in wave if cut.request_id in self.requests] for wave in self.ring]
        return Demand(
            pieces=waiting,
            chunks=newest_chunks(admitted),
            ring_waves=len(self.ring),
            turn=self.turn,
            in_admission=self.in_admission,
        )

    def step(self, accept: random.Random | None = None) -> Plan:
        """Plans and launches one wave. `accept`: the executor takes a random part of it."""
        assert self.ring.has_room
        demand = self.demand()
        plan = self.planner.plan(demand, now=self.now)
        if not plan.cuts:
            self._note_idle(demand, plan)
            return plan
        cuts = plan.cuts if accept is None else accepted_part(plan.cuts, accept, self.block_size)
        if not cuts:
            return plan
        number = self.ring.next_number
        for cut in cuts:
            request = self.requests[cut.request_id]
            assert request.planned == cut.start, (request, cut)
            request.planned += cut.length
            assert request.planned <= request.end, (request, cut)
            self.spans.setdefault(cut.request_id, []).append((cut.start, cut.length))
        self.planner.launched(number, cuts, now=self.now)
        self.ring.launch(number, cuts)
        self.budgets.append(plan.budget)
        self.waves.append(cuts)
        self.idle_turns.clear()
        return plan

    def fill(self) -> None:
        """Plans until the ring is full or the planner wants no more now."""
        while self.ring.has_room and self.step().cuts:
            pass

    def _note_idle(self, demand: Demand, plan: Plan) -> None:
        """Progress: work waits, the ring has room, and nothing is planned: for one turn at most."""
        if not demand.pieces:
            assert plan.wait_until is None
            self.idle_turns.clear()
            return
        assert plan.wait_until is not None, "work was left waiting for nothing"
        assert len(self.ring) > 0, "held with an empty ring"
        assert plan.wait_until > self.now
        self.idle_turns.add(self.turn)
        assert len(self.idle_turns) < 2, "nothing was planned for two turns"


def accepted_part(cuts: Sequence[Cut], rng: random.Random, block_size: int) -> tuple[Cut, ...]:
    """What an executor short of room might take: some first spans, the last one shortened."""
    taken = list(cuts[: rng.randint(0, len(cuts))])
    if taken and rng.random() < 0.5:
        last = taken.pop()
        length = align_down(last.start + rng.randint(0, last.length), block_size) - last.start
        if 0 < length < last.length:
            last = Cut(request_id=last.request_id, start=last.start, length=length, final=False)
        taken.append(last)
    return tuple(taken)
