"""Every short history of tiny worlds: two stages, three blocks or snapshots each, two requests.

Both stages apply the same decisions; each has its own cache. An endpoint is agreed as the driver
would do it.
"""

from __future__ import annotations

import itertools

import pytest
from cache_world import World, attention, recurrent

from wavepp.cache.types import best_endpoint
from wavepp.units import RequestId

PROMPTS = {"x": [1] * 9, "y": [1] * 4 + [2] * 4, "z": [3] * 5}
ACTIONS = ("admit x", "admit y", "admit z", "start", "run", "abort", "wipe 0")


class TinyPipeline:
    def __init__(self, groups: tuple[tuple, tuple]) -> None:
        self.stages = [World(*own, slots=2) for own in groups]
        self.admitted: list[str] = []
        self.running: list[str] = []
        self.count = 0

    def act(self, action: str) -> bool:
        """Does it if it is legal now."""
        match action.split():
            case ["admit", name]:
                return self.admit(PROMPTS[name])
            case ["start"] if self.admitted:
                rid = self.admitted.pop(0)
                ends = {stage.materialize(rid).endpoint for stage in self.stages}
                assert len(ends) == 1, "stages would start at different positions"
                self.running.append(rid)
            case ["run"] if self.running:
                rid = self.running.pop(0)
                for stage in self.stages:
                    stage.finish(rid)
            case ["abort"] if self.admitted + self.running:
                rid = (self.admitted + self.running)[-1]
                for names in (self.admitted, self.running):
                    if rid in names:
                        names.remove(rid)
                for stage in self.stages:
                    stage.cache.free(RequestId(rid))
            case ["wipe", _]:
                self.stages[0].cache.reset()
            case _:
                return False
        return True

    def admit(self, ids: list[int]) -> bool:
        if len(self.admitted) + len(self.running) == 2:
            return False
        self.count += 1
        rid = f"r{self.count}"
        prompts = [stage.prompt(ids) for stage in self.stages]
        pairs = list(zip(self.stages, prompts, strict=True))
        hints = [stage.cache.hint(prompt).reuse for stage, prompt in pairs]
        limit = best_endpoint(hints, prompts[0].reuse_cap)
        votes = [stage.claim(rid, prompt, limit) for stage, prompt in pairs]
        attempt = 1
        while not all(vote.committed and vote.endpoint == limit for vote in votes):
            if any(vote.refusal for vote in votes):
                for stage in self.stages:
                    stage.cache.undo(RequestId(rid))
                return True
            attempt += 1
            limit = best_endpoint([vote.reuse for vote in votes], limit)
            votes = [stage.cache.move(RequestId(rid), attempt, limit) for stage in self.stages]
            assert attempt < 9, "limits only fall, so this ends"
        self.admitted.append(rid)
        return True

    def check(self) -> None:
        for stage in self.stages:
            stage.check()

    def drain(self) -> None:
        while self.running or self.admitted:
            assert self.act("run") or self.act("start")
        self.check()
        for name in PROMPTS:  # nothing is stuck: every prompt still goes through
            assert self.act(f"admit {name}")
            assert len(self.admitted) == 1
            self.act("start")
            self.act("run")
        self.check()


@pytest.mark.parametrize(
    "groups",
    [
        ((attention(3),), (attention(4),)),
        ((attention(4, host=1),), (attention(3), recurrent(1))),
        ((recurrent(3),), (attention(3, host=2),)),
    ],
    ids=["attention", "host_and_hybrid", "recurrent_and_host"],
)
def test_every_short_history_of_two_stages(groups) -> None:
    played = 0
    beginnings = (("admit x",), ("admit x", "start", "run"))
    for beginning, rest in itertools.product(beginnings, itertools.product(ACTIONS, repeat=3)):
        pipeline = TinyPipeline(groups)
        if not all(pipeline.act(action) for action in (*beginning, *rest)):
            continue
        played += 1
        pipeline.check()
        pipeline.drain()
    assert played > 200
