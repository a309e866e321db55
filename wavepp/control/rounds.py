"""The driver's rounds: one message to every stage, one reply from each, at most one round out at a
time.

Owns: whether a round is out, its number, and which prompts it announces. May not: decide what is in
the log. Every round includes every stage, even one that it has nothing for (paper, section on
admission). What later steps ask of the stages (hints, lease requests) and what they answer (votes)
rides in the same messages.
"""

from __future__ import annotations

from collections.abc import Sequence

from wavepp.control.log import DecisionLog
from wavepp.control.states import RequestState
from wavepp.errors import RemoteProtocolError
from wavepp.protocol.messages import LogEntry, PromptRecord, RoundMessage, RoundReply
from wavepp.units import LogNumber, StageIndex


class Rounds:
    """Builds round messages and takes their replies."""

    def __init__(self, log: DecisionLog, *, num_stages: int, epoch: int) -> None:
        self._log = log
        self._num_stages = num_stages
        self._epoch = epoch
        self._announcing: tuple[RequestState, ...] = ()
        self.number = 0
        self.is_out = False

    def send(self, announced: Sequence[tuple[RequestState, LogNumber]]) -> tuple[RoundMessage, ...]:
        """Starts a round that carries the log and these requests' prompts."""
        assert not self.is_out, self.number
        self.is_out = True
        self.number += 1
        self._announcing = tuple(state for state, _ in announced)
        prompts = tuple(_record(state, number) for state, number in announced)
        return tuple(
            self._message(prompts, self._log.unacked(StageIndex(stage)))
            for stage in range(self._num_stages)
        )

    def answered(self, replies: Sequence[RoundReply]) -> tuple[RequestState, ...]:
        """Ends the round; returns the requests whose prompts every stage has now.

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
        announced, self._announcing = self._announcing, ()
        return announced

    def _message(
        self, prompts: tuple[PromptRecord, ...], entries: tuple[LogEntry, ...]
    ) -> RoundMessage:
        return RoundMessage(
            epoch=self._epoch,
            round_number=self.number,
            apply_to=self._log.last,
            entries=entries,
            prompts=prompts,
        )


def _record(state: RequestState, announced: LogNumber) -> PromptRecord:
    sampling = state.arrival.sampling
    return PromptRecord(
        request_id=state.request_id,
        announced=announced,
        token_ids=state.tokens,
        max_tokens=state.arrival.max_tokens,
        namespace=state.arrival.namespace,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
    )
