"""The driver's rounds: one message to every stage, one reply from each, at most one round out at a
time.

Owns: whether a round is out, its number, and the shape of its messages. May not: decide what is in
the log or what is asked. Every round includes every stage, even one that it has nothing for (paper,
section on admission).
"""

from __future__ import annotations

from collections.abc import Sequence

from wavepp.cache.keys import join_keys
from wavepp.control.log import DecisionLog
from wavepp.control.states import RequestState
from wavepp.errors import RemoteProtocolError
from wavepp.protocol.messages import LogEntry, PromptRecord, RoundMessage, RoundReply
from wavepp.protocol.votes import RoundAsk
from wavepp.units import LogNumber, StageIndex


class Rounds:
    """Builds round messages and takes their replies."""

    def __init__(self, log: DecisionLog, *, num_stages: int, epoch: int) -> None:
        self._log = log
        self._num_stages = num_stages
        self._epoch = epoch
        self.number = 0
        self.is_out = False

    def send(self, prompts: Sequence[PromptRecord], ask: RoundAsk) -> tuple[RoundMessage, ...]:
        """Starts a round that carries the log, payloads and questions."""
        assert not self.is_out, self.number
        self.is_out = True
        self.number += 1
        return tuple(
            self._message(tuple(prompts), ask, self._log.unacked(StageIndex(stage)))
            for stage in range(self._num_stages)
        )

    def answered(self, replies: Sequence[RoundReply]) -> None:
        """Ends the round.

        Raises:
            RemoteProtocolError: not this round's replies, or a stage's log diverged.
        """
        stages = sorted(reply.ack.stage for reply in replies)
        numbers = {(reply.epoch, reply.round_number) for reply in replies}
        if not self.is_out or numbers != {(self._epoch, self.number)}:
            raise RemoteProtocolError(f"replies to {numbers}, expected round {self.number}")
        if stages != list(range(self._num_stages)):
            raise RemoteProtocolError(f"round {self.number} was answered by stages {stages}")
        for reply in replies:
            self._log.acknowledge(reply.ack)
        self.is_out = False

    def _message(
        self, prompts: tuple[PromptRecord, ...], ask: RoundAsk, entries: tuple[LogEntry, ...]
    ) -> RoundMessage:
        return RoundMessage(
            epoch=self._epoch,
            round_number=self.number,
            apply_to=self._log.last,
            entries=entries,
            prompts=prompts,
            ask=ask,
        )


def make_record(state: RequestState, announced: LogNumber) -> PromptRecord:
    """A request's payload. Keys go along, so that no stage hashes."""
    sampling, prompt = state.arrival.sampling, state.prompt
    return PromptRecord(
        request_id=state.request_id,
        announced=announced,
        token_ids=prompt.tokens,
        keys=join_keys(prompt.keys),
        max_tokens=state.arrival.max_tokens,
        namespace=prompt.namespace,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
    )
