"""Whether the engine lives, known at any moment without asking it.

Owns: a task that looks at the engine again and again. What it saw last is the answer to a health
check, so that no check waits behind work. The engine itself watches progress (`watchdog_s`): it is
dead when something is out and nothing comes back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from wavepp.engine import Engine
from wavepp.errors import WavePPError

LOOK_EVERY_S = 0.5
SILENT_S_MAX = 30.0
"""An engine whose driver has not answered for so long counts as stuck."""


class HealthWatch:
    """Looks at one engine.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, engine: Engine, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._dead: str | None = None
        self._well_s = clock()

    @property
    def problem(self) -> str | None:
        """Why the engine can't serve, or None."""
        if self._dead is not None:
            return self._dead
        silent_s = self._clock() - self._well_s
        if silent_s > SILENT_S_MAX:
            return f"the engine's driver has not answered for {silent_s:.0f} s"
        return None

    async def watch(self) -> None:
        """Looks until it is cancelled, or the engine is dead for good."""
        while self._dead is None:
            await self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """One look."""
        try:
            async with asyncio.timeout(SILENT_S_MAX):
                await self._engine.check_health()
        except WavePPError as error:
            self._dead = str(error)
        except TimeoutError:
            return
        else:
            self._well_s = self._clock()
