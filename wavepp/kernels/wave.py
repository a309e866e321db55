"""One wave as the kernels see it: flat tokens of several spans, and where their cache is.

    flat rows   |-- span 0 --|-- span 1 --|- span 2 -|        T rows, in schedule order
    span i      tokens [start, start + length) of a sequence; [0, start) is in the cache already

Everything that depends only on the spans (positions, cache slots, attention batches) is built once
per wave, here, and shared by all layers. Owns no cache and no weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wavepp.kernels.attention_plan import AttentionPlan, plan_attention
from wavepp.kernels.recurrent_plan import RecurrentSlots, StateSpan, plan_states

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """`length` tokens of one sequence from position `start`.

    Attributes:
        tables: group name -> block ids, for groups that keep blocks.
        states: group name -> slots, for recurrent groups.
    """

    start: int
    length: int
    tables: Mapping[str, Int32Array]
    states: Mapping[str, RecurrentSlots] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWindow:
    """A cache group as a wave needs it.

    Attributes:
        window: sliding window in tokens; None sees everything.
        recurrent: its layers keep a state a sequence instead of blocks a token.
        top_k: tokens that sparse attention selects; rows that see no more are dense.
    """

    name: str
    window: int | None = None
    recurrent: bool = False
    top_k: int | None = None


@dataclass(frozen=True, slots=True)
class Wave:
    """The spans of one wave, ready for the kernels.

    Attributes:
        positions: int64 [T], position of every row in its sequence.
        plans: group name -> cache slots and attention batches.
        states: recurrent group name -> the spans with their state slots.
    """

    spans: tuple[Span, ...]
    positions: Tensor
    plans: Mapping[str, AttentionPlan]
    states: Mapping[str, tuple[StateSpan, ...]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.positions.shape[0])


def build_wave(
    spans: Sequence[Span], groups: Sequence[GroupWindow], block_size: int, device: torch.device
) -> Wave:
    """Positions and plans of a wave. Block tables are only read where a group's rule needs them."""
    assert spans, "a wave has at least one span"
    assert all(span.length > 0 for span in spans)
    positions = np.concatenate(
        [np.arange(span.start, span.start + span.length, dtype=np.int64) for span in spans]
    )
    extents = [(span.start, span.length) for span in spans]
    plans, states = {}, {}
    for group in groups:
        if group.recurrent:
            states[group.name] = plan_states(extents, [span.states[group.name] for span in spans])
            continue
        tables = [span.tables[group.name] for span in spans]
        plans[group.name] = plan_attention(
            extents, tables, block_size, window=group.window, top_k=group.top_k, device=device
        )
    return Wave(tuple(spans), torch.from_numpy(positions).to(device), plans, states)
