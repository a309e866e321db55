"""From tokens to text while they come: what is certain, and where a stop string ends it.

Owns: the text of one answer so far. May not: know a tokenizer; how to decode is handed in. Two
things are held back until more is known: a character whose bytes are not all there, and what may be
the beginning of a stop string.

    tokens   |---- text is certain ----|-- decoded before --|-- new --|
             0                        from                 upto
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from wavepp.requests import Increment, PositionLogprobs, PrefillRequest, PrefillResult, Produced

INCOMPLETE = "\ufffd"
"""What a decoder writes for bytes that are no whole character."""

Decode = Callable[[Sequence[int]], str]


class TextStream:
    """The text of one answer.

    Args:
        decode: text of token ids.
        stops: strings none of which is in the answer: it ends before the first one.

    Attributes:
        text: decoded so far, never beyond a stop string.
        num_tokens: tokens taken so far.
        stop: the string that ended it.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self.text = ""
        self.stop: str | None = None
        self._decode = decode
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._token_ids: list[int] = []
        self._from = 0
        self._upto = 0
        self._given = 0

    @property
    def num_tokens(self) -> int:
        """Tokens taken; none after a stop string."""
        return len(self._token_ids)

    def take(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens add for sure; what follows a stop string is not taken."""
        for token_id in token_ids:
            if self.stop is not None:
                break
            self._token_ids.append(token_id)
            self._grow(self._new_text(is_end=False))
        return self._give(len(self.text) - self._held())

    def finish(self) -> str:
        """The rest of the text: nothing follows."""
        if self.stop is None:
            self._grow(self._new_text(is_end=True))
        return self._give(len(self.text))

    def _new_text(self, *, is_end: bool) -> str:
        """What was not decoded yet. Decoded with the tokens before it: a token's text may depend on
        them."""
        known = self._decode(self._token_ids[self._from : self._upto])
        whole = self._decode(self._token_ids[self._from :])
        if len(whole) <= len(known) or (whole.endswith(INCOMPLETE) and not is_end):
            return ""
        self._from, self._upto = self._upto, len(self._token_ids)
        return whole[len(known) :]

    def _grow(self, more: str) -> None:
        before = len(self.text)
        self.text += more
        if not more or not self._stops:
            return
        search_from = max(before - self._longest + 1, 0)
        found = [(self.text.find(stop, search_from), stop) for stop in self._stops]
        hits = [(at, stop) for at, stop in found if at >= 0]
        if hits:
            at, self.stop = min(hits)
            self.text = self.text[:at]

    def _held(self) -> int:
        """Characters at the end that may turn out to begin a stop string."""
        if self.stop is not None:
            return 0
        longest = min(self._longest - 1, len(self.text))
        for length in range(longest, 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stops):
                return length
        return 0

    def _give(self, end: int) -> str:
        given, self._given = self._given, max(end, self._given)
        return self.text[given : self._given]


class StreamedAnswer:
    """One answer as it grows: its tokens, its text, and its end.

    Attributes:
        num_told: tokens the pipeline has told of, wanted or not.
    """

    def __init__(self, request: PrefillRequest, decode: Decode) -> None:
        self.num_told = 0
        self._wants_scores = request.logprobs is not None
        self._text = TextStream(decode, request.stop)
        self._tokens: list[Produced] = []

    @property
    def is_stopped(self) -> bool:
        """A stop string ended it."""
        return self._text.stop is not None

    def grow(self, more: Sequence[Produced]) -> Increment:
        """Takes tokens; those behind a stop string are nobody's."""
        text = self._text.take([token.token_id for token in more])
        kept = more[: self._text.num_tokens - len(self._tokens)]
        self._tokens += kept
        self.num_told += len(more)
        return Increment(token_ids=_ids(kept), text=text, logprobs=self._scores(kept))

    def end(self, result: PrefillResult) -> Increment:
        """Takes the outcome, with the tokens that were not told yet."""
        scores = result.logprobs or (None,) * len(result.token_ids)
        tokens = [
            Produced(token_id=token_id, logprobs=score)
            for token_id, score in zip(result.token_ids, scores, strict=True)
        ]
        step = self.grow(tokens[self.num_told :])
        text = step.text + self._text.finish()
        result = replace(result, text=self._text.text)
        if self.is_stopped:  # the pipeline went on for a while
            result = replace(
                result,
                finish_reason="stop",
                stop_reason=self._text.stop,
                error=None,
                token_ids=_ids(self._tokens),
                logprobs=self._scores(self._tokens),
            )
        return replace(step, text=text, result=result)

    def _scores(self, tokens: Sequence[Produced]) -> tuple[PositionLogprobs, ...] | None:
        if not self._wants_scores:
            return None
        return tuple(token.logprobs for token in tokens if token.logprobs is not None)


def no_text(token_ids: Sequence[int]) -> str:
    """How to decode without a tokenizer."""
    del token_ids
    return ""


def _ids(tokens: Sequence[Produced]) -> tuple[int, ...]:
    return tuple(token.token_id for token in tokens)
