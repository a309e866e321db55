"""The gated delta rule and the short convolution before it, in torch: the definition of correct.

    S_t = Diag(a_t) S_{t-1} + beta_t k_t (v_t - S_{t-1}^T Diag(a_t) k_t)^T        o_t = S_t^T q_t

with log decay g = log a per key channel (KDA) or per head (Gated DeltaNet). In chunks of 64 tokens,
with G the running sum of g in the chunk (arXiv 2510.26692, 2412.06464):

    A_ij = beta_i (k_i e^(G_i - G_j)) . k_j   (j < i)      P_ij = (q_i e^(G_i - G_j)) . k_j (j <= i)
    (I + A) [U | W] = beta [v | k e^G]         v' = U - W S
    o = (q e^G) S + P v'                       S <- Diag(e^G_last) S + (k e^(G_last - G))^T v'

All that does not need S is made for many chunks at once, a bounded number of them. Exponents are
never positive: pairs inside a sub-chunk of 16 are taken one by one, others through the sub-chunk's
first row. State and arithmetic are float32.

    Shapes: T rows, N chunks, C = 64 rows a chunk, H heads, K key and V value channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from wavepp.kernels.api import DeltaInputs
from wavepp.kernels.recurrent_plan import CHUNK, Chunk, StateSpan, chunks_of

SUB = 16
TILE_ELEMENTS = 1 << 21  # elements of one [N, H, 64, K] tensor that are worked on at once
NORM_EPS = 1e-6

# Of a chunk: U and W, query and key weights, decay of the state: all that the recurrence needs.
_Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def short_conv(x: Tensor, weight: Tensor, pool: Tensor, spans: Sequence[StateSpan]) -> Tensor:
    """SiLU of a causal depthwise convolution along every sequence.

    Args:
        x: [T, C].
        weight: [C, W]; the last column meets the row itself.
        pool: the W - 1 inputs before a position, [slots, W - 1, C]; read and updated.

    Returns:
        [T, C].
    """
    width = weight.shape[1]
    columns = weight.t().contiguous()
    out = torch.empty_like(x)
    for span in spans:
        extended = x.new_zeros((width - 1 + span.length, x.shape[1]))
        if span.slots.read_slot is not None:
            extended[: width - 1] = pool[span.slots.read_slot]
        extended[width - 1 :] = x[span.row : span.row + span.length]
        result = out[span.row : span.row + span.length]
        torch.mul(extended[: span.length], columns[0], out=result)
        for j in range(1, width):
            result.addcmul_(extended[j : j + span.length], columns[j])
        for offset, unit in (*span.slots.snapshots, (span.length, span.slots.write_slot)):
            pool[unit] = extended[offset : offset + width - 1]
    return F.silu(out, inplace=True)


def delta_rule(inputs: DeltaInputs, pool: Tensor, spans: Sequence[StateSpan]) -> Tensor:
    """The gated delta rule along every sequence.

    Args:
        inputs: see DeltaInputs.
        pool: states, float32 [slots, H, K, V]; read and updated.

    Returns:
        [T, H, V] in the dtype of v.
    """
    out = torch.empty_like(inputs.v)
    steps = [span for span in spans if span.length == 1]
    if steps:
        _one_step(inputs, pool, steps, out)
    longer = [span for span in spans if span.length > 1]
    chunks = chunks_of(longer)
    heads, key_dim = inputs.v.shape[1], inputs.k.shape[-1]
    step = max(1, TILE_ELEMENTS // (heads * CHUNK * key_dim))
    state = torch.empty(pool.shape[1:], dtype=torch.float32, device=pool.device)
    for begin in range(0, len(chunks), step):
        tile = chunks[begin : begin + step]
        parts = _inside(inputs, tile)
        for n, chunk in enumerate(tile):
            slots = longer[chunk.span].slots
            if chunk.is_first:
                state = _initial(state, pool, slots.read_slot)
            result, state = _step(parts, n, state)
            rows = slice(chunk.row, chunk.row + chunk.length)
            out[rows] = result.transpose(0, 1)[: chunk.length]
            if chunk.keep is not None:
                pool[chunk.keep] = state
            if chunk.is_last:
                pool[slots.write_slot] = state
    return out


def _one_step(inputs: DeltaInputs, pool: Tensor, spans: Sequence[StateSpan], out: Tensor) -> None:
    """Spans of one row, all at once, by the recurrence itself."""
    device = pool.device
    rows = torch.tensor([span.row for span in spans], device=device)
    reads = [span.slots.read_slot for span in spans]
    states = pool.index_select(0, torch.tensor([slot or 0 for slot in reads], device=device))
    fresh = torch.tensor([slot is None for slot in reads], device=device)
    states.masked_fill_(fresh[:, None, None, None], 0.0)
    group = inputs.v.shape[1] // inputs.q.shape[1]
    q, k = (unit_length(x.index_select(0, rows).float()) for x in (inputs.q, inputs.k))
    q, k = (x.repeat_interleave(group, dim=1).unsqueeze(2) for x in (q, k))  # [N, H, 1, K]
    v = inputs.v.index_select(0, rows).float().unsqueeze(2)
    states.mul_(inputs.log_decay.index_select(0, rows).exp().unsqueeze(-1))
    fresh_value = (v - torch.matmul(k, states)) * inputs.beta.index_select(0, rows)[..., None, None]
    states.add_(torch.matmul(k.transpose(2, 3), fresh_value))
    result = torch.matmul(q * q.shape[-1] ** -0.5, states).squeeze(2)
    out.index_copy_(0, rows, result.to(out.dtype))
    for state, span in zip(states, spans, strict=True):
        for unit in (*(unit for _, unit in span.slots.snapshots), span.slots.write_slot):
            pool[unit] = state


def _initial(like: Tensor, pool: Tensor, slot: int | None) -> Tensor:
    return torch.zeros_like(like) if slot is None else pool[slot].clone()


def _step(parts: _Parts, n: int, state: Tensor) -> tuple[Tensor, Tensor]:
    """Results [H, C, V] of chunk n, and the state [H, K, V] after it."""
    u, w, query, pairs, key, decay = (part[n] for part in parts)
    fresh = torch.baddbmm(u, w, state, alpha=-1.0)
    result = torch.baddbmm(torch.bmm(query, state), pairs, fresh)
    return result, torch.baddbmm(state * decay, key.transpose(1, 2), fresh)


def _inside(inputs: DeltaInputs, chunks: Sequence[Chunk]) -> _Parts:
    """All that N chunks need but the state; rows beyond a chunk's end change nothing."""
    device = inputs.v.device
    first = torch.tensor([chunk.row for chunk in chunks], device=device)
    length = torch.tensor([chunk.length for chunk in chunks], device=device)
    offset = torch.arange(CHUNK, device=device)
    real = offset < length[:, None]
    rows = first[:, None] + torch.minimum(offset, length[:, None] - 1)

    def take(x: Tensor) -> Tensor:
        """[N, H, C, D] of [T, H, D], float32, zero beyond a chunk's end."""
        taken = x.index_select(0, rows.view(-1)).float()
        taken = taken.view(len(chunks), CHUNK, *x.shape[1:])
        return (taken * real[:, :, None, None]).transpose(1, 2)

    group = inputs.v.shape[1] // inputs.q.shape[1]
    q, k = (unit_length(take(x)) for x in (inputs.q, inputs.k))
    q = q * q.shape[-1] ** -0.5
    if group > 1:
        q, k = (x.repeat_interleave(group, dim=1) for x in (q, k))
    q, k = q.contiguous(), k.contiguous()
    beta = take(inputs.beta.unsqueeze(-1))
    total = take(inputs.log_decay).cumsum(2)
    decayed = total.exp()
    among, pairs = _pairs(q, k, total)
    right = torch.cat([take(inputs.v), k * decayed], dim=-1) * beta
    solved = torch.linalg.solve_triangular(among * beta, right, upper=False, unitriangular=True)
    value_dim = inputs.v.shape[-1]
    last = total[:, :, -1:]
    key = k * (last - total).exp()
    decay = last.exp().transpose(2, 3)
    return solved[..., :value_dim], solved[..., value_dim:], q * decayed, pairs, key, decay


def unit_length(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) along the last dim."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def _pairs(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Decayed k_i . k_j below the diagonal, and q_i . k_j up to it: [N, H, C, C] each."""
    if total.shape[-1] == 1:
        decay = (total - total.transpose(2, 3)).clamp(max=0.0).exp()
        turned = k.transpose(2, 3)
        among, pairs = torch.matmul(k, turned) * decay, torch.matmul(q, turned) * decay
    else:
        among, pairs = _pairs_by_channel(q, k, total)
    return among.tril_(-1), pairs.tril_()


def _pairs_by_channel(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """The products for a decay per channel; above the diagonal of a sub-chunk is left undefined."""
    n, heads, size, dim = q.shape
    both = torch.stack([k, q])  # [2, N, H, C, K]
    result = q.new_zeros((2, n, heads, size, size))
    blocks = (n, heads, size // SUB, SUB, dim)
    diagonal = q.new_empty((2, *blocks[:-1], SUB))
    k_blocks, g_blocks, both_blocks = k.view(blocks), total.view(blocks), both.view(2, *blocks)
    for j in range(SUB):
        at, down = slice(j, j + 1), slice(j, None)
        decayed = (g_blocks[..., down, :] - g_blocks[..., at, :]).clamp_(max=0.0).exp_()
        decayed.mul_(k_blocks[..., at, :])
        diagonal[..., down, j] = (both_blocks[..., down, :] * decayed).sum(-1)
    for block in range(size // SUB):
        begin, end = block * SUB, (block + 1) * SUB
        result[..., begin:end, begin:end] = diagonal[:, :, :, block]
        if begin:
            reference = total[:, :, begin : begin + 1]
            left = both[..., begin:end, :] * (total[:, :, begin:end] - reference).exp()
            right = k[:, :, :begin] * (reference - total[:, :, :begin]).exp()
            result[..., begin:end, :begin] = torch.matmul(left, right.transpose(2, 3))
    return result[0], result[1]
