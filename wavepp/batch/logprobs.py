"""Log probabilities as OpenAI's completions, OpenAI's chat and vLLM's prompt_logprobs write them.

Pure: what to call a token is handed in. Infinities, which JSON can't hold, become -9999.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from wavepp.requests import PositionLogprobs, TokenLogprob

LOGPROB_MIN = -9999.0
TokenText = Callable[[int], str]


def completion_logprobs(
    positions: Sequence[PositionLogprobs | None],
    token_ids: Sequence[int],
    asked: int,
    token_text: TokenText,
) -> dict[str, Any]:
    """The `logprobs` of a completion's choice; a position of None is one nothing predicts.

    `top_logprobs` holds the `asked` likeliest tokens and the one that stands there, by their text;
    where two tokens have the same text the likelier one stays.
    """
    assert len(positions) == len(token_ids), (len(positions), len(token_ids))
    tokens = [token_text(token_id) for token_id in token_ids]
    offsets, offset = [], 0
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "text_offset": offsets,
        "token_logprobs": [
            None if position is None else _number(position.chosen) for position in positions
        ],
        "tokens": tokens,
        "top_logprobs": [
            None if position is None else _top_by_text(position, asked, token_text)
            for position in positions
        ],
    }


def chat_logprobs(
    positions: Iterable[PositionLogprobs], asked: int, token_text: TokenText
) -> dict[str, Any]:
    """The `logprobs` of a chat's choice, with `asked` alternatives a position."""
    return {
        "content": [
            {
                **_chat_token(position.chosen, token_text),
                "top_logprobs": [_chat_token(token, token_text) for token in position.top[:asked]],
            }
            for position in positions
        ]
    }


def prompt_logprobs(
    positions: Iterable[PositionLogprobs | None], asked: int, token_text: TokenText
) -> list[dict[str, Any] | None]:
    """vLLM's form: for each prompt token (None for the first) token id -> logprob, rank, text."""
    return [
        None
        if position is None
        else {
            str(token.token_id): {
                "logprob": _number(token),
                "rank": token.rank,
                "decoded_token": token_text(token.token_id),
            }
            for token in _with_chosen(position, asked)
        }
        for position in positions
    ]


def _number(token: TokenLogprob) -> float:
    return max(token.logprob, LOGPROB_MIN)


def _with_chosen(position: PositionLogprobs, asked: int) -> list[TokenLogprob]:
    """The likeliest tokens in order, and the chosen one if it is not among them."""
    top = list(position.top[:asked])
    if all(token.token_id != position.chosen.token_id for token in top):
        top.append(position.chosen)
    return top


def _top_by_text(position: PositionLogprobs, asked: int, token_text: TokenText) -> dict[str, float]:
    by_text: dict[str, float] = {}
    for token in _with_chosen(position, asked):
        by_text.setdefault(token_text(token.token_id), _number(token))
    return by_text


def _chat_token(token: TokenLogprob, token_text: TokenText) -> dict[str, Any]:
    text = token_text(token.token_id)
    return {
        "token": text,
        "logprob": _number(token),
        "bytes": list(text.encode("utf-8", errors="replace")),
    }
