"""Sampling follows its distribution; scores are log softmax with ranks."""

from __future__ import annotations

import random

import pytest
import torch

from wavepp.models.sampling import finite_rows, greedy_tokens, sample_token, score_rows

LOGITS = torch.tensor([1.0, 3.0, 0.0, 2.5, -4.0])


def frequencies(temperature: float, top_p: float, draws: int = 4000) -> torch.Tensor:
    rng = random.Random(1)
    counts = torch.zeros(len(LOGITS))
    for _ in range(draws):
        counts[sample_token(LOGITS, temperature, top_p, rng.random())] += 1
    return counts / draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_scales_the_distribution(temperature):
    expected = torch.softmax(LOGITS / temperature, -1)
    torch.testing.assert_close(frequencies(temperature, 1.0), expected, atol=0.025, rtol=0)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.1, [1]), (0.5, [1]), (0.6, [1, 3]), (0.9, [1, 3, 0])]
)
def test_top_p_keeps_the_likeliest_until_their_mass(top_p, kept):
    """softmax(LOGITS) is 0.554 for 1, 0.336 for 3, 0.075 for 0, ..."""
    expected = torch.zeros(len(LOGITS))
    expected[kept] = torch.softmax(LOGITS[kept], -1)
    torch.testing.assert_close(frequencies(1.0, top_p), expected, atol=0.025, rtol=0)


def test_temperature_zero_is_greedy():
    assert {sample_token(LOGITS, 0.0, 1.0, u) for u in (0.0, 0.5, 0.999)} == {1}


def test_tiny_temperature_does_not_overflow():
    assert sample_token(LOGITS * 1e4, 1e-6, 1.0, 0.999) == 1


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_ends_of_the_unit_interval_give_tokens(uniform):
    for top_p in (1e-9, 0.5, 1.0):
        assert 0 <= sample_token(LOGITS, 1.0, top_p, uniform) < 5


def test_greedy_takes_the_lowest_of_equals():
    assert greedy_tokens(torch.tensor([[0.0, 2.0, 2.0], [5.0, 5.0, 1.0]])).tolist() == [1, 0]


def test_scores_are_log_softmax_with_ranks():
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * 5
    token_ids = torch.tensor([0, 7, 39, 12, 12, 3])
    scored = score_rows(logits, token_ids, 4)
    table = torch.log_softmax(logits.double(), -1)
    expected = table.gather(1, token_ids[:, None]).squeeze(1)
    torch.testing.assert_close(scored.logprobs.double(), expected, atol=1e-5, rtol=0)
    order = table.argsort(dim=-1, descending=True)
    ranks = [order[i].tolist().index(int(t)) + 1 for i, t in enumerate(token_ids)]
    assert scored.ranks.tolist() == ranks
    assert torch.equal(scored.top_ids, order[:, :4])
    top = table.gather(1, order[:, :4]).float()
    torch.testing.assert_close(scored.top_logprobs, top, atol=1e-5, rtol=0)


def test_more_alternatives_than_tokens_is_all_of_them():
    scored = score_rows(torch.tensor([[0.0, 1.0]]), torch.tensor([0]), 20)
    assert scored.top_ids.tolist() == [[1, 0]]


def test_equal_logits_share_the_better_rank():
    scored = score_rows(torch.tensor([[2.0, 3.0, 2.0]]), torch.tensor([2]), 0)
    assert scored.ranks.tolist() == [2]
    assert scored.top_ids.shape == (1, 0)


def test_rows_that_overflowed_are_not_finite():
    inf, nan = float("inf"), float("nan")
    rows = [[0.0, 1.0], [nan, 1.0], [1.0, inf], [-inf, 1.0], [-inf, -inf], [1.0, nan]]
    assert finite_rows(torch.tensor(rows)).tolist() == [True, False, False, True, False, False]
