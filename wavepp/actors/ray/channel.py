"""Channels for compiled graphs whose readers nap, with as many buffers between nodes as on one.

Ray's own readers poll shared memory in a tight loop: an idle stage burns 0.15 to 0.6 of a core, and
when cores are scarce the pollers take theirs from the stages that compute. Here a reader looks,
and naps between looks, longer the longer nothing has come.

Ray's own channels hold one message between nodes. The raylet that brings the next one before this
one was read waits, and with it all that this node hears from others: of the ring's schedules the
third would keep the first activation out for ever. Here each wave in flight has a buffer.

Owns: how a reader waits, how much is buffered. May not: change what travels.
"""

from __future__ import annotations

import time
from typing import Any

from ray.exceptions import RayChannelTimeoutError
from ray.experimental.channel import utils
from ray.experimental.channel.intra_process_channel import IntraProcessChannel
from ray.experimental.channel.shared_memory_channel import (
    BufferedSharedMemoryChannel,
    CompositeChannel,
    SharedMemoryType,
)

NAP_S_MIN = 50e-6
NAP_S_MAX = 8e-3
NAP_SHARE = 1 / 16  # of the time waited so far: what a nap may add to it


Readers = list[tuple[Any, str]]
"""Actors, each with the id of the node it is on."""


class NappingChannel(CompositeChannel):
    """A CompositeChannel whose `read` looks without waiting, and naps between looks."""

    _waiting_since_s: float | None = None

    @classmethod
    def create(
        cls, writer: Any, readers: Readers, *, local: int, remote: int, driver_actor_id: str | None
    ) -> NappingChannel:
        """A new channel, made by its writer.

        Args:
            writer: an actor; None: the driver.
            readers: with the nodes they are on.
            local, remote: messages that are buffered for readers on the writer's node, on others.
        """
        away, own = utils.split_readers_by_locality(writer, readers)
        near, far = utils.split_actors_by_node_locality(utils.get_actor_node(writer), away)
        parts: list[tuple[Any, list[str]]] = []
        if own:
            # Several readers in the writer's process share what one of them took out.
            parts.append((IntraProcessChannel(num_readers=1), [writer._actor_id.hex()]))
        for group, buffers in ((near, local), (far, remote)):
            if group:
                part = BufferedSharedMemoryChannel(writer, group, buffers)
                parts.append((part, [reader._actor_id.hex() for reader, _ in group]))
        # By the actors' ids as text, whatever Ray's own signature says.
        channels: Any = {name: part for part, names in parts for name in names}
        given = {part for part, _ in parts}
        return cls(writer, readers, local, driver_actor_id, channels, given)

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
        local: messages a channel holds on its writer's node before the writer waits.
        remote: the same for readers on other nodes; never fewer than can be under way.
    """

    def __init__(self, *, local: int, remote: int) -> None:
        super().__init__(num_shm_buffers=local)
        self._num_remote_buffers = remote

    def create_channel(  # type: ignore[override]  # Ray's own says Channel and returns a composite
        self,
        writer: Any,
        reader_and_node_list: Readers,
        driver_actor_id: str | None = None,
    ) -> NappingChannel:
        """As SharedMemoryType.create_channel."""
        return NappingChannel.create(
            writer,
            reader_and_node_list,
            local=self._num_shm_buffers,
            remote=self._num_remote_buffers,
            driver_actor_id=driver_actor_id,
        )
