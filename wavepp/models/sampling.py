"""Logits -> tokens and log probabilities. All in float32 or better; rows of logits come in tiles.

Owns no state: randomness comes in as one uniform number, so a token depends only on its request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Log probabilities at R positions, natural log.

    Attributes:
        logprobs: float32 [R], of the token that stands there.
        ranks: int64 [R], 1 for the likeliest; equal logits share the better rank.
        top_ids, top_logprobs: [R, n], the n likeliest tokens, likeliest first.
    """

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


def score_rows(logits: Tensor, token_ids: Tensor, top: int) -> ScoredRows:
    """Scores tokens [R] against float32 logits [R, V], with the `top` likeliest beside them.

    log softmax(x)_i = x_i - logsumexp(x); the [R, V] log probabilities are never made.
    """
    total = torch.logsumexp(logits, dim=-1)
    chosen = logits.gather(1, token_ids[:, None])
    ranks = (logits > chosen).sum(dim=-1) + 1
    values, ids = logits.topk(min(top, logits.shape[-1]), dim=-1)
    return ScoredRows(chosen.squeeze(1) - total, ranks, ids, values - total[:, None])


def greedy_tokens(logits: Tensor) -> Tensor:
    """The likeliest token of each row [R]; the lowest id among equals."""
    return logits.argmax(dim=-1)


def finite_rows(logits: Tensor) -> Tensor:
    """Which rows [R] have a likeliest token at all: no NaN, no overflow to infinity."""
    return torch.isfinite(logits.amax(dim=-1))


def sample_token(logits: Tensor, temperature: float, top_p: float, uniform: float) -> int:
    """One token from logits [V] by inverting the cumulative distribution at `uniform` in [0, 1).

    Args:
        temperature: logits are divided by it; 0 is greedy.
        top_p: keep the likeliest tokens until their mass reaches it (the one that crosses stays).
    """
    assert 0.0 <= uniform < 1.0, uniform
    if temperature <= 0.0:
        return int(logits.argmax())
    scaled = logits.double()
    scaled = (scaled - scaled.max()) / temperature
    probabilities, ids = torch.softmax(scaled, dim=-1).sort(descending=True, stable=True)
    before = probabilities.cumsum(0) - probabilities
    kept = int((before < top_p).sum()) if top_p < 1.0 else len(ids)
    mass = probabilities[: max(1, kept)].cumsum(0)
    index = int(torch.searchsorted(mass, mass[-1] * uniform, right=True))
    return int(ids[min(index, len(mass) - 1)])
