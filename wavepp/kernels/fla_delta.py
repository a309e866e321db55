"""The recurrent operations for CUDA, by the kernels of flash-linear-attention (fla-core 0.6).

Not run on a GPU: under Triton's interpreter it equals `torch_delta`, whose signatures it has. A
span is cut where its state is to be saved; one call takes the first piece of every span, the next
call the second pieces, which start from what the first ones saved:

    span 0   |-- first --|--- second ---|- third -|
    span 1   |--------------- first --------------|
    span 2   |---- first ----|------ second ------|

    Shapes: T rows, N pieces of a call, H heads, K key and V value channels, C channels, W taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from wavepp.kernels.api import DeltaInputs
from wavepp.kernels.recurrent_plan import StateSpan


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows [row, row + length); state from slot `read` (None: from nothing) to slot `write`."""

    row: int
    length: int
    read: int | None
    write: int


@dataclass(frozen=True, slots=True)
class _Call:
    """Pieces of one call. `rows`: the flat rows, None: all of them, in order.

    Attributes:
        ends: int64 [N + 1], where pieces begin and end among the call's rows.
        reads: int64 [N], slots; any one where `fresh` [N, 1, 1] says that there is no state.
        writes: int64 [N], slots.
    """

    rows: Tensor | None
    ends: Tensor
    reads: Tensor
    fresh: Tensor
    writes: Tensor


@dataclass(frozen=True, slots=True)
class _Tails:
    """Where the last W - 1 inputs before each saved position are.

    Attributes:
        from_rows: int64 [M * (W - 1)], flat rows; any one where they are before the span.
        from_state: the same in the states the spans start from, [N * (W - 1)] rows of them.
        is_row: bool [M * (W - 1), 1], which of the two.
        writes: int64 [M], slots.
    """

    from_rows: Tensor
    from_state: Tensor
    is_row: Tensor
    writes: Tensor


class FlaDelta:
    """`short_conv` and `delta_rule`. Keeps the layout of the last wave, which its layers share.

    Raises:
        ImportError: fla-core or triton is not installed.
    """

    def __init__(self) -> None:
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda

        self._causal_conv1d = causal_conv1d
        self._chunk_gated_delta_rule = chunk_gated_delta_rule
        self._chunk_kda = chunk_kda
        self._spans: Sequence[StateSpan] = ()
        self._calls: list[_Call] = []
        self._whole: _Call | None = None
        self._tails: dict[int, _Tails] = {}

    def short_conv(
        self, x: Tensor, weight: Tensor, pool: Tensor, spans: Sequence[StateSpan]
    ) -> Tensor:
        """As `torch_delta.short_conv`."""
        self._lay_out(spans, x.device)
        taps = weight.shape[1] - 1
        whole = self._whole
        assert whole is not None
        if taps not in self._tails:
            self._tails[taps] = _tails_of(spans, taps, x.device)
        before = pool.index_select(0, whole.reads).masked_fill_(whole.fresh, 0.0)  # [N, W - 1, C]
        convolved: tuple[Tensor, Tensor | None] = self._causal_conv1d(
            x.unsqueeze(0).contiguous(),
            weight,
            initial_state=F.pad(before.transpose(1, 2), (1, 0)).to(x.dtype).contiguous(),
            activation="silu",
            cu_seqlens=whole.ends,
        )
        tails = self._tails[taps]
        rows = x.index_select(0, tails.from_rows).to(pool.dtype)
        older = before.reshape(-1, before.shape[-1]).index_select(0, tails.from_state)
        kept = torch.where(tails.is_row, rows, older)
        pool.index_copy_(0, tails.writes, kept.view(-1, taps, kept.shape[-1]))
        return convolved[0].squeeze(0)

    def delta_rule(self, inputs: DeltaInputs, pool: Tensor, spans: Sequence[StateSpan]) -> Tensor:
        """As `torch_delta.delta_rule`."""
        self._lay_out(spans, inputs.v.device)
        if len(self._calls) == 1 and self._calls[0].rows is None:
            out = self._call(inputs, pool, self._calls[0])
        else:
            out = torch.empty_like(inputs.v)
            for call in self._calls:
                result = self._call(_take(inputs, call.rows), pool, call)
                if call.rows is None:
                    out.copy_(result)
                else:
                    out.index_copy_(0, call.rows, result)
        for span in spans:  # a snapshot at the very end is a copy of the working slot
            for offset, unit in span.slots.snapshots:
                if offset == span.length:
                    pool[unit] = pool[span.slots.write_slot]
        return out

    def _call(self, inputs: DeltaInputs, pool: Tensor, call: _Call) -> Tensor:
        """Results [R, H, V] of one call's rows; moves the pool on."""
        by_channel = inputs.log_decay.shape[-1] > 1 or inputs.k.shape[-1] == 1
        kernel = self._chunk_kda if by_channel else self._chunk_gated_delta_rule
        decay = inputs.log_decay if by_channel else inputs.log_decay.squeeze(-1)
        moved: tuple[Tensor, Tensor] = kernel(
            *(x.unsqueeze(0).contiguous() for x in (inputs.q, inputs.k, inputs.v)),
            decay.unsqueeze(0).contiguous(),
            inputs.beta.unsqueeze(0).contiguous(),
            initial_state=pool.index_select(0, call.reads).masked_fill_(call.fresh[..., None], 0.0),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=call.ends,
        )
        pool.index_copy_(0, call.writes, moved[1])
        return moved[0].squeeze(0).to(inputs.v.dtype)

    def _lay_out(self, spans: Sequence[StateSpan], device: torch.device) -> None:
        """Looks at a wave's spans once; all its layers hand in the same ones."""
        if spans is self._spans:
            return
        pieces = [_pieces(span) for span in spans]
        whole = [
            _Piece(span.row, span.length, span.slots.read_slot, span.slots.write_slot)
            for span in spans
        ]
        self._whole = _call_of(whole, sum(span.length for span in spans), device)
        self._calls = [
            _call_of(
                [own[turn] for own in pieces if len(own) > turn],
                sum(span.length for span in spans),
                device,
            )
            for turn in range(max(map(len, pieces)))
        ]
        self._tails = {}
        self._spans = spans


def _pieces(span: StateSpan) -> list[_Piece]:
    """A span cut where its state is saved inside."""
    inner = [(offset, unit) for offset, unit in span.slots.snapshots if offset < span.length]
    pieces, begin, read = [], 0, span.slots.read_slot
    for end, write in (*inner, (span.length, span.slots.write_slot)):
        pieces.append(_Piece(span.row + begin, end - begin, read, write))
        begin, read = end, write
    return pieces


def _call_of(pieces: Sequence[_Piece], rows_total: int, device: torch.device) -> _Call:
    lengths = [piece.length for piece in pieces]
    rows = None
    if sum(lengths) < rows_total:
        own = [np.arange(piece.row, piece.row + piece.length) for piece in pieces]
        rows = torch.from_numpy(np.concatenate(own)).to(device)
    ends = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int64).to(device)
    reads = [0 if piece.read is None else piece.read for piece in pieces]
    fresh = torch.tensor([piece.read is None for piece in pieces]).to(device)
    writes = [piece.write for piece in pieces]
    return _Call(
        rows,
        ends,
        torch.tensor(reads).to(device),
        fresh[:, None, None],
        torch.tensor(writes).to(device),
    )


def _tails_of(spans: Sequence[StateSpan], taps: int, device: torch.device) -> _Tails:
    rows, states, is_row, writes = [], [], [], []
    for index, span in enumerate(spans):
        saved = (*span.slots.snapshots, (span.length, span.slots.write_slot))
        for offset, unit in saved:
            writes.append(unit)
            for at in range(offset - taps, offset):
                is_row.append(at >= 0)
                rows.append(span.row + max(at, 0))
                states.append(index * taps + min(taps + at, taps - 1))
    return _Tails(
        torch.tensor(rows).to(device),
        torch.tensor(states).to(device),
        torch.tensor(is_row)[:, None].to(device),
        torch.tensor(writes).to(device),
    )


def _take(inputs: DeltaInputs, rows: Tensor | None) -> DeltaInputs:
    if rows is None:
        return inputs
    return DeltaInputs(
        q=inputs.q.index_select(0, rows),
        k=inputs.k.index_select(0, rows),
        v=inputs.v.index_select(0, rows),
        log_decay=inputs.log_decay.index_select(0, rows),
        beta=inputs.beta.index_select(0, rows),
    )
