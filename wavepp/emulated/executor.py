"""EmulatedExecutor: a stage whose device takes the time a cost model says, and computes nothing.

Owns: the device's timeline, digests of prompts (last stage) and the waiting. Block pools are
counts: no memory is taken for them. First tokens are a hash of the whole prompt; log probabilities
are refused. Waits are sleeps until absolute times, so that many stages run on few cores.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from wavepp.actors.ports import Carry, StageExecutor, StageOutput
from wavepp.cache.types import BringBack, Effect, Offload, RestoreSnapshot, ZeroSlot
from wavepp.config import EngineConfig
from wavepp.control.work import SpanOutput, SpanWork, StageFacts, StageWork
from wavepp.emulated.prompt_digest import PromptDigests, token_of
from wavepp.emulated.stage_model import StageModel, build_stage_model
from wavepp.emulated.timeline import DeviceTimeline
from wavepp.planner.wave_time import WaveLoad

TIMES = "times"
"""The stand-in for activations, [T, 2]: when they are there, and how late the thread was that says
so; the same in every token's row."""
NO_LOGITS = "an emulated device computes no logits: logprobs and prompt_logprobs can't be had"


def emulated_executor(config: EngineConfig, stage: int) -> StageExecutor:
    """Builds the executor of stage `stage`; an ExecutorFactory.

    Raises:
        ConfigError: the cost model can't be used, or not with this configuration.
    """
    return EmulatedExecutor(config, build_stage_model(config, stage))


class EmulatedExecutor:
    """One stage. See StageExecutor for the contract.

    Args:
        clock, sleep: of this node; tests may bring their own.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: StageModel,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._model = model
        self._scale = config.time_scale
        # Serial admission is the baseline whose stages send before they start their next wave.
        self._blocking_sends = config.admission == "serial"
        self._clock = clock
        self._sleep = sleep
        self._timeline = DeviceTimeline()
        self._copy_s = 0.0  # of the effects before the next wave
        facts = model.facts
        self._sizes = {group.name: group.bytes_per_unit for group in facts.groups}
        self._digests = None
        if facts.stage == config.pipeline_parallel_size - 1:
            self._digests = PromptDigests(
                facts.groups, block_size=facts.block_size, slots=config.max_num_seqs
            )

    @property
    def facts(self) -> StageFacts:
        """Topology and capacity of this stage; constant."""
        return self._model.facts

    def materialize(self, effects: Sequence[Effect]) -> None:
        """The device copies before the wave that comes next; the time is taken there."""
        for effect in effects:
            self._copy_s += self._effect_s(effect)
            if self._digests is not None:
                self._digests.materialize(effect)

    def forward(self, work: StageWork, carry: Carry | None) -> StageOutput:
        """Waits as long as the device would take."""
        if not work.spans:
            return StageOutput(carry=carry)
        now = self._clock()
        outputs = tuple(map(self._output, work.spans)) if self._digests is not None else ()
        tokens = sum(span.length for span in work.spans)
        transfer_s = self._scale * self._model.transfer_s(tokens)
        ready_s, sender_late_s = (-math.inf, 0.0) if carry is None else _read(carry)
        times = self._timeline.run(
            now=now,
            ready_s=ready_s,
            sender_late_s=sender_late_s,
            copy_s=self._scale * self._copy_s,
            compute_s=self._scale * self._compute_s(work.spans),
            send_s=transfer_s if self._blocking_sends else 0.0,
        )
        self._copy_s = 0.0
        self._wait_until(times.sent_s)
        late_s = self._timeline.woke(self._clock())
        if self._digests is not None:
            return StageOutput(outputs=outputs, device=times)
        arrival = (times.done_s + transfer_s, late_s)
        return StageOutput(carry={TIMES: np.broadcast_to(arrival, (tokens, 2))}, device=times)

    def close(self) -> None:
        """Nothing is held."""

    def _compute_s(self, spans: Sequence[SpanWork]) -> float:
        samples = any(span.sample for span in spans)
        return self._model.costs.seconds(WaveLoad.of(spans)) + self._model.head_s * samples

    def _output(self, span: SpanWork) -> SpanOutput:
        assert self._digests is not None
        digest = self._digests.extend(span)
        if span.sampling.logprobs is not None or span.sampling.prompt_logprobs is not None:
            return SpanOutput(request_id=span.request_id, error=NO_LOGITS)
        token_id = token_of(digest, self.facts.vocab_size) if span.sample else None
        return SpanOutput(request_id=span.request_id, token_id=token_id)

    def _effect_s(self, effect: Effect) -> float:
        """Seconds the device copies for an effect."""
        match effect:
            case Offload(group=group, device=units) | BringBack(group=group, host=units):
                return len(units) * self._sizes[group] / self._model.host_bytes_per_s
            case RestoreSnapshot(group=group, from_host=from_host):
                model = self._model
                rate = model.host_bytes_per_s if from_host else model.device_bytes_per_s
                return self._sizes[group] / rate
            case ZeroSlot(group=group):
                return self._sizes[group] / self._model.device_bytes_per_s
            case _:
                raise TypeError(effect)

    def _wait_until(self, at_s: float) -> None:
        while (left_s := at_s - self._clock()) > 0:
            self._sleep(left_s)


def _read(carry: Carry) -> tuple[float, float]:
    ready_s, late_s = carry[TIMES][0].tolist()
    return ready_s, late_s
