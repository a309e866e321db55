"""All checkers that look on at a run."""

from __future__ import annotations

from collections.abc import Callable

from wavepp.sim.check_admission import Agreement, Monotone, OneByOne, Order
from wavepp.sim.check_cache import Conservation, Contents, EscrowIsReal, NoGap, ReleaseOrder
from wavepp.sim.check_end import Ending, OneLog
from wavepp.sim.check_waves import Budget, RingAndLanes, Spans
from wavepp.sim.watch import Checker
from wavepp.sim.world import World

CHECKERS: tuple[Callable[[World], Checker], ...] = (
    Agreement,
    Monotone,
    NoGap,
    Contents,
    Conservation,
    EscrowIsReal,
    ReleaseOrder,
    Spans,
    RingAndLanes,
    Order,
    OneByOne,
    Budget,
    Ending,
    OneLog,
)
