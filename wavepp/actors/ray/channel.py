"""Channels for compiled graphs whose readers nap.

Ray's own readers poll shared memory in a tight loop: an idle stage burns 0.15 to 0.6 of a core, and
when cores are scarce the pollers take theirs from the stages that compute. Here a reader looks,
and naps between looks, longer the longer nothing has come.

Owns: how a reader waits. May not: change what travels.
"""

from __future__ import annotations

import time
from typing import Any

from ray.exceptions import RayChannelTimeoutError
from ray.experimental.channel.shared_memory_channel import CompositeChannel, SharedMemoryType

NAP_S_MIN = 50e-6
NAP_S_MAX = 8e-3
NAP_SHARE = 1 / 16  # of the time waited so far: what a nap may add to it


class NappingChannel(CompositeChannel):
    """A CompositeChannel whose `read` looks without waiting, and naps between looks."""

    _waiting_since_s: float | None = None

    def read(self, timeout: float | None = None) -> Any:
        """As CompositeChannel.read. `timeout` in seconds; None or -1: none."""
        started_s = time.monotonic()
        if self._waiting_since_s is None:
            self._waiting_since_s = started_s
        while True:
            try:
                value = super().read(0)
            except RayChannelTimeoutError:
                now_s = time.monotonic()
                if timeout is not None and 0 <= timeout <= now_s - started_s:
                    raise
                waited_s = now_s - self._waiting_since_s
                time.sleep(min(max(waited_s * NAP_SHARE, NAP_S_MIN), NAP_S_MAX))
            else:
                self._waiting_since_s = None
                return value

    def __reduce__(self) -> tuple[Any, ...]:
        """Readers get this class, not the base."""
        _, state = super().__reduce__()  # type: ignore[no-untyped-call]
        return NappingChannel, state


class NappingType(SharedMemoryType):
    """Shared memory with napping readers; set as a graph node's `type_hint`.

    Args:
        buffers: messages a channel holds before its writer waits.
    """

    def __init__(self, *, buffers: int) -> None:
        super().__init__(num_shm_buffers=buffers)

    def create_channel(  # type: ignore[override]  # Ray's own says Channel and returns a composite
        self,
        writer: Any,
        reader_and_node_list: list[tuple[Any, str]],
        driver_actor_id: str | None = None,
    ) -> NappingChannel:
        """As SharedMemoryType.create_channel."""
        return NappingChannel(writer, reader_and_node_list, self._num_shm_buffers, driver_actor_id)
