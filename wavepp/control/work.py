"""The work one stage is given for one wave, and what comes of it.

Paper, section on the execution ring.

Plain data between the pure control (which decides) and a stage executor (which computes): numpy and
ints, no tensors. A span is [start, start + length) of one request's tokens. Its block table covers
[0, start + length):

    |---- cached or computed before ----|---- this span ----|
    0                                 start            start+length

table[i] holds tokens [iB, (i+1)B); before a sliding window it holds NO_UNIT.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from wavepp.cache.types import Effect, Refusal, SnapshotOrder
from wavepp.requests import PositionLogprobs
from wavepp.units import RequestId, StageIndex, WaveNumber

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to turn the last position's logits into a token."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanWork:
    """One span of one request on one stage.

    Attributes:
        token_ids: int32 [length], the span's tokens.
        next_token_id: the prompt token after the span, None when the span is the prompt's end
            (prompt_logprobs scores each token from the position before it).
        block_tables: name of an attention or sliding group -> int32 [ceil((start + length) / B)]
            physical block ids on this stage.
        sample: produce a token from the span's last position (the prompt ends here and
            max_tokens > 0).
        slot: the working slot of recurrent layers, the same number in each recurrent group; None
            without such groups.
        snapshots: save the working slot when the recurrent state stands exactly at
            `order.position` tokens, at `order.position - start` of the span: at its end, or at a
            multiple of 64. Ascending.
    """

    request_id: RequestId
    start: int
    length: int
    token_ids: Int32Array
    block_tables: Mapping[str, Int32Array]
    next_token_id: int | None = None
    sample: bool = False
    sampling: Sampling = Sampling()
    slot: int | None = None
    snapshots: tuple[SnapshotOrder, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """All spans of one wave on one stage, in schedule order; at most one of a request.

    `effects` are copies between tiers and into working slots, to be performed in their order
    before the first span is computed (and also when none is).
    """

    wave: WaveNumber
    spans: tuple[SpanWork, ...]
    effects: tuple[Effect, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanOutput:
    """What the last stage says of one span: the sampled token, and what scores were asked for.

    `prompt_logprobs` scores the prompt tokens start+1 .. start+length (the last only if there is
    one), in order. `error` says why there is no answer: the request fails alone, for good.
    """

    request_id: RequestId
    token_id: int | None = None
    logprobs: PositionLogprobs | None = None
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """Why an admitted request that had reserved too little could not be materialised.

    Attributes:
        releases: the stage's count of releases then.
        alone: nobody else held anything there, so no release will help.
    """

    refusal: Refusal
    releases: int
    alone: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRecord:
    """A failure that travels beside the activations instead of being raised.

    `guilty` is False for requests that only shared the wave with the failure: they are admitted
    again. `rollback`: nothing failed, there was no room for it: it is admitted again, too.
    """

    request_id: RequestId
    stage: StageIndex
    message: str
    guilty: bool
    rollback: Rollback | None = None


GroupKind = Literal["attention", "sliding", "recurrent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """One cache group of one stage: its rule for reuse and how much of it there is.

    For attention and sliding groups a unit is a block of B tokens; for recurrent ones it is one
    snapshot (working slots are apart: `max_num_seqs` of them). `host_units`: the same on the host.
    """

    name: str
    kind: GroupKind
    units: int
    bytes_per_unit: int
    window: int | None = None
    host_units: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """What a stage tells the driver when it starts: topology and capacities, once."""

    stage: StageIndex
    layers: tuple[int, int]
    block_size: int
    vocab_size: int
    max_model_len: int
    groups: tuple[GroupFacts, ...]
    eos_token_ids: tuple[int, ...] = ()
    weight_bytes: int = 0
