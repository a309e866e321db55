"""One stage in memory: machine, cache, log, device, and the fences that the control keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from device import Device

from wavepp.cache.store import StageCache
from wavepp.cache.types import Materialized, Prompt
from wavepp.control.log import AppliedLog
from wavepp.protocol.messages import (
    NO_WAVE,
    Abort,
    Admit,
    Decision,
    Free,
    LogEntry,
    SpanPlan,
    Undo,
)
from wavepp.protocol.stage import StageMachine
from wavepp.units import LogNumber, RequestId, WaveNumber


@dataclass
class Wave:
    number: WaveNumber
    spans: tuple[SpanPlan, ...]
    entries: tuple[LogEntry, ...]
    apply_to: LogNumber


@dataclass
class Node:
    """One stage: machine, cache, log, device, and the fences it keeps (control's part)."""

    machine: StageMachine
    cache: StageCache
    log: AppliedLog
    device: Device
    decisions: list[Decision] = field(default_factory=list)
    running: dict[RequestId, int] = field(default_factory=dict)  # admitted -> attempt
    prompts: dict[RequestId, Prompt] = field(default_factory=dict)  # of admitted ones
    sequences: dict[RequestId, Materialized] = field(default_factory=dict)
    positions: dict[RequestId, int] = field(default_factory=dict)
    fences: dict[RequestId, WaveNumber] = field(default_factory=dict)
    finished: WaveNumber = NO_WAVE
    waves: list[Wave] = field(default_factory=list)  # handed over by the stage before, in order

    def apply(self, entries: Sequence[LogEntry], apply_to: LogNumber) -> None:
        for decision in self.log.take_new(entries, apply_to=apply_to):
            self.decisions.append(decision)
            prompt = self.machine.prompt(decision.request_id)
            self.machine.apply(decision)
            request_id = decision.request_id
            if isinstance(decision, Admit) and prompt is not None:
                self.running[request_id] = decision.attempt
                self.prompts[request_id] = prompt
                self.positions[request_id] = decision.endpoint
            elif isinstance(decision, Undo | Abort | Free) and request_id in self.running:
                self.fences[request_id] = decision.fence_wave
        self.release_due()

    def release_due(self) -> None:
        for request_id in [name for name, wave in self.fences.items() if wave <= self.finished]:
            self.machine.release(request_id)
            del self.fences[request_id], self.running[request_id], self.prompts[request_id]
            del self.positions[request_id]
            self.sequences.pop(request_id, None)

    def execute(self, wave: Wave) -> None:
        assert wave.number == self.finished + 1, (wave, self.finished)
        self.apply(wave.entries, wave.apply_to)
        for span in wave.spans:
            self.execute_span(span)
        self.finished = wave.number
        self.release_due()

    def execute_span(self, span: SpanPlan) -> None:
        request_id, end = span.request_id, span.start + span.length
        assert self.running[request_id] == span.attempt, span
        prompt = self.prompts[request_id]
        if request_id not in self.sequences:
            self.sequences[request_id] = self.cache.materialize(request_id)
            assert self.sequences[request_id].endpoint == span.start, span
            self.device.begin(prompt, self.sequences[request_id])
        assert self.positions[request_id] == span.start, (self.positions, span)
        self.positions[request_id] = end
        junctions = [p for p in self.machine.junctions(request_id) if span.start < p <= end]
        points = {*junctions, *([prompt.tail] if span.start < prompt.tail <= end else [])}
        orders = self.cache.snapshot_orders(request_id, sorted(points), junctions=junctions)
        self.device.perform(orders.effects)
        self.device.run(prompt, self.sequences[request_id], (span.start, end), orders.orders)
        self.cache.publish(request_id, end)
        for order in orders.orders:
            self.cache.snapshot_taken(request_id, order.position)
