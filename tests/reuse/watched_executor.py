"""A torch executor that follows every snapshot from where it is written to where it is restored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from wavepp.actors.executors import TorchExecutor
from wavepp.actors.ports import Carry, StageOutput
from wavepp.cache.types import Effect, Offload, RestoreSnapshot
from wavepp.config import EngineConfig
from wavepp.control.work import StageWork

Place = tuple[str, str, int]  # tier, group, unit


class WatchedExecutor(TorchExecutor):
    """Asserts that what a working slot is set to is, bit for bit, what was saved.

    Attributes:
        counts: what happened: "saved" (inside a span: "inner"), "restored" from the device or
            from the "host".
    """

    def __init__(self, config: EngineConfig, stage: int) -> None:
        super().__init__(config, stage)
        self.counts: Counter[str] = Counter()
        self._saved: dict[Place, list[Tensor]] = {}
        self._recurrent = {g.name: g.units for g in self.facts.groups if g.kind == "recurrent"}

    def materialize(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            super().materialize([effect])
            match effect:
                case Offload(group=group, device=device, host=host) if group in self._recurrent:
                    for taken, put in zip(device.tolist(), host.tolist(), strict=True):
                        self._saved["host", group, put] = self._saved["device", group, taken]
                case RestoreSnapshot(group=group, snapshot=unit, slot=slot, from_host=from_host):
                    tier = "host" if from_host else "device"
                    held = self._states(group, self._recurrent[group] + slot)
                    pairs = zip(held, self._saved[tier, group, unit], strict=True)
                    assert all(torch.equal(now, then) for now, then in pairs)
                    self.counts["host" if from_host else "restored"] += 1
                case _:
                    pass

    def forward(self, work: StageWork, carry: Carry | None) -> StageOutput:
        output = super().forward(work, carry)
        for span in work.spans:
            for order in span.snapshots:
                at_end = order.position == span.start + span.length
                self.counts["saved" if at_end else "inner"] += 1
                for group, unit in order.units.items():
                    states = self._states(group, unit)
                    self._saved["device", group, unit] = states
                    if at_end:
                        slot = self._states(group, self._recurrent[group] + order.slot)
                        assert all(torch.equal(*pair) for pair in zip(slot, states, strict=True))
        return output

    def _states(self, group: str, unit: int) -> list[Tensor]:
        return [pool[unit].clone() for ours, _ in self._pools._of(group) for pool in ours]
