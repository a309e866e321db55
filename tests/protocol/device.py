"""A device that holds keys instead of tensors: what a stage's units hold after each step.

Paged unit: (namespace, keys[:i + 1]'s last key). Snapshot and slot: (key of the prefix, position).
Reading something else than the prompt says is what reading another's KV would be.
"""

from __future__ import annotations

from wavepp.cache.store import StageCache
from wavepp.cache.types import (
    BringBack,
    Effect,
    Materialized,
    Offload,
    Prompt,
    RestoreSnapshot,
    SnapshotOrder,
    ZeroSlot,
)

EMPTY = (b"", 0)


class Device:
    """Contents of one stage's pools, on the device and on the host."""

    def __init__(self, cache: StageCache) -> None:
        self.cache = cache
        self.paged = [group.name for group in cache.config.groups if group.paged]
        self.recurrent = [group.name for group in cache.config.groups if not group.paged]
        self.units: dict[tuple[str, int], object] = {}
        self.host: dict[tuple[str, int], object] = {}
        self.slots: dict[tuple[str, int], object] = {}

    def perform(self, effects: tuple[Effect, ...]) -> None:
        """Copies, in order."""
        for effect in effects:
            match effect:
                case Offload(group=group, device=device, host=host):
                    for source, target in zip(device.tolist(), host.tolist(), strict=True):
                        self.host[group, target] = self.units[group, source]
                case BringBack(group=group, host=host, device=device):
                    for source, target in zip(host.tolist(), device.tolist(), strict=True):
                        self.units[group, target] = self.host[group, source]
                case RestoreSnapshot(
                    group=group, snapshot=snapshot, slot=slot, from_host=from_host
                ):
                    held = self.host if from_host else self.units
                    self.slots[group, slot] = held[group, snapshot]
                case ZeroSlot(group=group, slot=slot):
                    self.slots[group, slot] = EMPTY
                case _:
                    raise TypeError(effect)

    def begin(self, prompt: Prompt, sequence: Materialized) -> None:
        """A sequence was materialised: what it reuses must be its own prefix."""
        self.perform(sequence.effects)
        self.read(prompt, sequence, sequence.endpoint)

    def read(self, prompt: Prompt, sequence: Materialized, position: int) -> None:
        """Asserts that [0, position) is there, as far as a window can see."""
        size = prompt.block_size
        for spec in self.cache.config.groups:
            if not spec.paged:
                assert sequence.slot is not None
                if position % size == 0 and position <= prompt.num_tokens:
                    expected = (prompt.keys[position // size - 1], position) if position else EMPTY
                    assert self.slots[spec.name, sequence.slot] == expected, (spec, position)
                continue
            table = sequence.block_tables[spec.name]
            lowest = 0 if spec.window is None else max(position - spec.window, 0) // size
            for block in range(lowest, min(position // size, len(prompt.keys))):
                held = self.units.get((spec.name, int(table[block])))
                assert held == prompt.keys[block], (spec.name, block, position)

    def run(
        self,
        prompt: Prompt,
        sequence: Materialized,
        span: tuple[int, int],
        orders: tuple[SnapshotOrder, ...],
    ) -> None:
        """Computes [start, end): reads what is before, writes its blocks, moves the slot."""
        start, end = span
        size = prompt.block_size
        self.read(prompt, sequence, start)
        for block in range(start // size, min(end // size, len(prompt.keys))):
            for name in self.paged:
                unit = int(sequence.block_tables[name][block])
                self.units[name, unit] = prompt.keys[block]
        for order in orders:
            assert start < order.position <= end, (order, span)
            for name, unit in order.units.items():
                key = prompt.keys[order.position // size - 1]
                self.units[name, unit] = (key, order.position)
        for name in self.recurrent:
            if end % size == 0 and end <= prompt.num_tokens:
                self.slots[name, sequence.slot] = (prompt.keys[end // size - 1], end)  # type: ignore[index]
