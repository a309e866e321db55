"""A small language for scenarios: a pipeline, who asks for what and when, and what came of it.

Everything runs in `wavepp.sim`: the real driver and stages, all checkers looking on; `run` raises
if one of them sees anything, or if anything is left at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from wavepp.cache.keys import make_prompt
from wavepp.cache.store import StageCache
from wavepp.cache.types import GroupSpec
from wavepp.protocol.messages import RoundMessage
from wavepp.protocol.states import Phase
from wavepp.sim.checkers import CHECKERS
from wavepp.sim.device import Text
from wavepp.sim.options import VOCABULARY, Job, StageOptions, WorldOptions
from wavepp.sim.stage import SimStage
from wavepp.sim.world import World
from wavepp.units import RequestId

BLOCK = 4


def distinct(count: int, start: int) -> tuple[int, ...]:
    """T(n): n tokens that differ from those of other starts (if these differ by enough)."""
    return tuple((start + at) % VOCABULARY for at in range(count))


def attention(units: int, *, host: int = 0, **options: Any) -> StageOptions:
    """A stage with one attention window of so many blocks."""
    group = GroupSpec(name="attn", kind="attention", units=units, host_units=host)
    return StageOptions(groups=(group,), **options)


def recurrent(units: int, **options: Any) -> StageOptions:
    """A stage with recurrent layers only, and so many snapshots."""
    return StageOptions(groups=(GroupSpec(name="state", kind="recurrent", units=units),), **options)


def hybrid(blocks: int, snapshots: int, **options: Any) -> StageOptions:
    """A stage with both."""
    groups = (
        GroupSpec(name="attn", kind="attention", units=blocks),
        GroupSpec(name="state", kind="recurrent", units=snapshots),
    )
    return StageOptions(groups=groups, **options)


class Scenario:
    """A pipeline. `ask` and `cancel`, then `run`; afterwards `reason`, `cached`, `order`.

    Args:
        stages: one a stage, first stage first.
        options: of WorldOptions.
    """

    def __init__(
        self,
        *stages: StageOptions,
        seed: int = 0,
        show: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        options.setdefault("block_size", BLOCK)
        self.world = World(
            WorldOptions(stages=stages, **options), seed=seed, checkers=CHECKERS, show=show
        )

    # -- the user --------------------------------------------------------------------------------

    def ask(self, name: str, tokens: Sequence[int], *, at: float = 0.0, **options: Any) -> None:
        """A request arrives (options of Job)."""
        self.world.submit(Job(name=name, at_s=at, tokens=tuple(tokens), **options))

    def cancel(self, name: str, *, at: float) -> None:
        """Somebody gives up."""
        self.world.abort(name, at_s=at)

    def run(self) -> Scenario:
        """To the end, with all checks; everything was answered and nothing is left."""
        self.world.run()
        return self

    # -- what can be arranged --------------------------------------------------------------------

    def warm(self, stage: int, tokens: Sequence[int], *, snapshots: Sequence[int] = ()) -> None:
        """Puts a prefix into one stage's cache alone, as if it had been computed there."""
        sim = self.world.stages[stage]
        cache, name = sim.control.cache, RequestId(f"warmer#{stage}")
        text = self.world.texts[name] = Text("", tuple(tokens), cache.config.block_size)
        for end in [*snapshots, len(tokens)]:
            prompt = make_prompt([*tokens[:end], 0], cache.config.block_size)
            assert cache.claim(name, 1, prompt, 0).committed
            sequence = cache.materialize(name)
            sim.device.perform(sequence.effects)
            for group, table in sequence.block_tables.items():
                for unit, digest in zip(table.tolist(), text.blocks(end), strict=False):
                    sim.device.units[group][unit] = digest
            wanted = [end] if end in snapshots else []
            orders = cache.snapshot_orders(name, wanted).orders
            for order in orders:
                for group, unit in order.units.items():
                    sim.device.units[group][unit] = text.digest(order.position)
            cache.publish(name, end)
            for order in orders:
                cache.snapshot_taken(name, order.position)
            cache.free(name)

    def before_claims(self, action: Callable[[SimStage], None]) -> None:
        """Does something to each stage once, between its hints and its first claims."""
        done: set[int] = set()

        def look(message: RoundMessage, stage: SimStage) -> None:
            if message.ask.claims and stage.index not in done:
                done.add(stage.index)
                action(stage)

        self.world.before_round = look

    # -- what came of it -------------------------------------------------------------------------

    def reason(self, name: str) -> str:
        """Why it ended; "refused on arrival" when it was."""
        if name in self.world.refusals:
            return f"refused on arrival: {self.world.refusals[name]}"
        return self.world.results[name].finish_reason

    def cached(self, name: str) -> int:
        """Prompt tokens that were reused."""
        return self.world.results[name].num_cached_tokens

    def order(self, *names: str) -> list[str]:
        """Names in the order in which they ended."""
        return sorted(names, key=lambda name: self.world.results[name].timings.done_s)

    def cache(self, stage: int) -> StageCache:
        """One stage's cache."""
        return self.world.stages[stage].control.cache

    def faults(self, name: str) -> int:
        """How often that happened."""
        return self.world.faults_seen[name]


PHASES = (
    Phase.ANNOUNCED,
    Phase.READY,
    Phase.CLAIMING,
    Phase.ADMITTED,
    Phase.RUNNING,
    Phase.COMPLETING,
)
