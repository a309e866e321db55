"""Checkers of the whole: liveness and quiescence, one log.

Own nothing; see `watch`. The thirteenth, coverage of the lifecycle table, is over many seeds: see
`campaign`.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

from wavepp.control.facts import Finish
from wavepp.protocol.messages import Decision
from wavepp.sim.options import Job
from wavepp.sim.stage import SimStage
from wavepp.sim.watch import Checker, tap
from wavepp.sim.world import World


class Ending(Checker):
    """11: everybody gets one answer, of the right kind; then nothing is left anywhere."""

    name = "11 liveness"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._answers: Counter[str] = Counter()

    def finished(self, job: Job, finish: Finish) -> None:
        self._answers[self.world.names[job.name]] += 1
        reason = finish.result.finish_reason
        wanted = job.cancel_s is None and job.cancel_in is None and not self.world.cancelled(job)
        self.require(reason != "abort" or not wanted, f"{job.name} ended by", reason)
        may_fail = self.world.options.faults.error > 0 or self.world.is_lying
        self.require(reason != "error" or may_fail, f"{job.name}:", finish.result.error)

    def ended(self) -> None:
        world = self.world
        unanswered = [name for name in world.jobs if self._answers[name] != 1]
        self.require(not unanswered, "not one answer each:", unanswered, world.stories())
        driver = world.driver
        self.require(not driver.is_busy, "the driver still waits for something")
        driver.check()
        gate = driver.leader.books.gate
        self.require(gate.is_idle, "a lane is held:", gate.holders)
        for stage in world.stages:
            self._quiet(stage)

    def _quiet(self, stage: SimStage) -> None:
        control, where = stage.control, f"stage {stage.index}"
        self.require(control.is_idle, f"{where} is not idle")
        control.check()
        self.require(control.cache.held() == (), where, control.cache.held())
        stats = control.cache.stats()
        self.require(stats.leases + stats.escrows + stats.sequences == 0, where, stats)
        self.require(stats.slots_free == self.world.options.max_num_seqs, where, stats)
        for group in stats.groups:
            self.require(group.free + group.cached == group.units, where, group)
            self.require(group.private == group.reserved == 0, where, group)
            self.require(group.host_free + group.host_cached == group.host_units, where, group)


class OneLog(Checker):
    """12: every stage applies the driver's decisions, each once, in order, before it acts on what
    relies on them; equal numbers have equal digests."""

    name = "12 decisions"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._decided: list[Decision] = []
        self._applied: list[int] = [0] * len(world.stages)
        self._digests: dict[int, int] = {}
        for stage in world.stages:
            tap(stage.control.machine, "apply", before=partial(self._applying, stage))
            tap(stage.control.machine, "claim", before=partial(self._relying, stage))

    def logged(self, decision: Decision) -> None:
        self._decided.append(decision)

    def _applying(self, stage: SimStage, decision: Decision) -> None:
        at = self._applied[stage.index]
        expected = self._decided[at] if at < len(self._decided) else None
        self.require(
            decision is expected, f"stage {stage.index} applied as number {at + 1}", decision
        )
        self._applied[stage.index] = at + 1

    def _relying(self, stage: SimStage, *rest: object) -> None:
        self._agree(stage)

    def held(self, stage: SimStage) -> None:
        self._agree(stage)

    def _agree(self, stage: SimStage) -> None:
        log = stage.control._log
        self.require(
            log.applied == self._applied[stage.index],
            f"stage {stage.index} counts {log.applied} decisions, it applied",
            self._applied[stage.index],
        )
        digest = self._digests.setdefault(log.applied, log.digest)
        self.require(digest == log.digest, f"stage {stage.index} diverged at", log.applied)

    def ended(self) -> None:
        for stage, applied in enumerate(self._applied):
            self.require(
                applied == len(self._decided), f"stage {stage} applied {applied} of",
                len(self._decided),
            )  # fmt: skip
