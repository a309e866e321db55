"""Checkers see what they are for: each is shown a world with one thing wrong."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sim_dsl import Scenario, attention, distinct, hybrid

from wavepp.planner.planner import GreedyWaves, Plan
from wavepp.protocol.messages import Admit
from wavepp.protocol.votes import Retry
from wavepp.sim.options import Faults
from wavepp.sim.violation import Violation

ROOT = Path(__file__).parent.parent.parent


def busy() -> Scenario:
    """Two stages with some work on them."""
    scenario = Scenario(*[hybrid(16, 8)] * 2, wave_tokens_max=8, ring_depth=2)
    for number in range(4):
        scenario.ask(f"r{number}", distinct(20, 30 * (number % 2)), at=0.02 * number)
    return scenario


def skip_a_pin(scenario: Scenario) -> None:
    pool = scenario.cache(1)._parts.pools[0]
    pin = pool.pin
    setattr(pool, "pin", lambda ids: pin(ids[1:]))  # noqa: B010


def swap_slots(scenario: Scenario) -> None:
    slots = scenario.cache(1)._parts.slots
    slots.free[:] = [0] * len(slots.free)


def forget_a_decision(scenario: Scenario) -> None:
    machine = scenario.world.stages[1].control.machine
    apply = machine.apply

    def some(decision: object) -> None:
        if isinstance(decision, Admit):
            apply(decision)
        apply(decision)  # type: ignore[arg-type]

    setattr(machine, "apply", some)  # noqa: B010


def lose_a_unit(scenario: Scenario) -> None:
    scenario.cache(0)._parts.pools[0].free -= 1


def scribble(scenario: Scenario) -> None:
    """The device forgets what the first request wrote."""
    units = scenario.world.stages[1].device.units["attn"]
    scenario.world.clock.at(0.019, lambda: units.__setitem__(slice(None), [1] * len(units)))


def overfill_the_ring(scenario: Scenario) -> None:
    scenario.world.driver.ring.depth = 100


def widen_the_waves(scenario: Scenario) -> None:
    scenario.world.driver.waves.planner = GreedyWaves(wave_tokens_max=16, block_size=4)


def stall_the_planner(scenario: Scenario) -> None:
    idle = Plan(cuts=(), budget=0)
    setattr(scenario.world.driver.waves.planner, "plan", lambda *args, **options: idle)  # noqa: B010


def forget_fences(scenario: Scenario) -> None:
    """Endings name no wave."""
    leader = scenario.world.driver.leader
    end = leader._end

    def early(record: Any, *rest: Any) -> Any:
        record.run.last_wave = 0
        return end(record, *rest)

    setattr(leader, "_end", early)  # noqa: B010


@pytest.mark.parametrize(
    ("harm", "checker"),
    [
        (stall_the_planner, "10 budget"),
        (forget_fences, "7 spans"),
        (skip_a_pin, "3 no gap"),
        (swap_slots, "4 conservation"),
        (lose_a_unit, "4 conservation"),
        (forget_a_decision, "12 decisions"),
        (scribble, "state"),
        (overfill_the_ring, "8 ring"),
        (widen_the_waves, "10 budget"),
    ],
)
def test_a_checker_sees(harm: Callable[[Scenario], None], checker: str) -> None:
    scenario = busy()
    harm(scenario)
    with pytest.raises(Violation) as caught:
        scenario.run()
    assert caught.value.checker == checker


def test_a_request_that_nobody_answers_is_seen() -> None:
    scenario = busy()
    world = scenario.world
    world.stages[1].parcel = lambda parcel: None  # type: ignore[method-assign]
    with pytest.raises(Violation, match="11 liveness: not one answer each"):
        scenario.run()


def test_an_endpoint_that_rises_is_seen() -> None:
    scenario = busy()
    checkers = scenario.world._hooks["logged"]
    monotone = next(look.__self__ for look in checkers if look.__self__.name == "2 monotone")  # type: ignore[attr-defined]
    monotone._limits["r0#1"] = 8
    with pytest.raises(Violation, match="2 monotone"):
        monotone.logged(Retry(request_id="r0#1", attempt=2, limit=12))  # type: ignore[arg-type]


def test_messages_of_a_link_keep_their_order_when_some_come_early() -> None:
    faults = Faults(interleave=1.0, tail=0.1)
    scenario = Scenario(*[attention(16)] * 2, wave_tokens_max=4, faults=faults, calm_s=9.0)
    for number in range(20):
        scenario.ask(f"r{number}", distinct(20, 30 * number), at=0.002 * number)
    scenario.run()
    assert scenario.faults("interleave") > 10


def test_every_mutation_finds_the_text_it_changes() -> None:
    script: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "mutants"))
    assert len(script["MUTATIONS"]) == 21
    for mutation in script["MUTATIONS"]:
        script["check_text"](mutation)
