"""What streamed requests have produced, on its way to their readers.

Owns: the tokens of one request, until its reader is gone. A stage that dies takes nothing from it.
"""

from __future__ import annotations

import asyncio

from wavepp.requests import Produced


class TokenStream:
    """What a request has produced so far, for one reader."""

    def __init__(self) -> None:
        self._tokens: list[Produced] = []
        self._changed = asyncio.Event()
        self._is_over = False

    def put(self, produced: Produced) -> None:
        """One token more."""
        self._tokens.append(produced)
        self._changed.set()

    def close(self) -> None:
        """No more come."""
        self._is_over = True
        self._changed.set()

    async def after(self, known: int) -> tuple[Produced, ...]:
        """What follows the first `known` tokens, once there is something; empty at the end."""
        while len(self._tokens) <= known and not self._is_over:
            self._changed.clear()
            await self._changed.wait()
        return tuple(self._tokens[known:])
