"""Which replica a request goes to: the one that computed its prefix before, unless it is loaded.

Owns: a bounded memory of which replica got which block of which prefix, by block keys, and how many
requests each replica has. Nothing is asked of the replicas: what was sent to one is what its cache
most likely holds, and being wrong costs time only. The choice is pure (`PrefixMemory`); the router
around it speaks to Ray Serve.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from wavepp.cache.keys import chain_keys, encode_namespace
from wavepp.requests import PrefillRequest

KEYS_MAX = 1_000_000
ROUTES_MAX = 10_000
AHEAD_MAX = 8
"""So many more requests than the least loaded replica one may have and still be preferred."""

Name = TypeVar("Name")


class PrefixMemory(Generic[Name]):
    """Who got which prefix, and who is busy.

    Args:
        ahead_max: how much more loaded than the least loaded one a preferred replica may be.
        keys_max: blocks remembered; the ones that were used longest ago go first.
    """

    def __init__(self, *, ahead_max: int = AHEAD_MAX, keys_max: int = KEYS_MAX) -> None:
        self._ahead_max = ahead_max
        self._keys_max = keys_max
        self._owners: OrderedDict[bytes, Name] = OrderedDict()
        self._owned: Counter[Name] = Counter()
        self._load: Counter[Name] = Counter()

    def ranks(self, keys: Sequence[bytes], names: Collection[Name]) -> list[list[Name]]:
        """The replicas in the order they should be tried; equals stand together.

        Args:
            keys: of the prompt's blocks, in order.
            names: the replicas there are.
        """
        least = min((self._load[name] for name in names), default=0)
        free = [name for name in names if self._load[name] == least]
        fewest = min((self._owned[name] for name in free), default=0)
        ranks = [[name for name in free if self._owned[name] == fewest], list(names)]
        owner = self._owner(keys, names)
        if owner is not None and self._load[owner] - least <= self._ahead_max:
            ranks.insert(0, [owner])
        return ranks

    def sent(self, keys: Sequence[bytes], name: Name) -> None:
        """A request with these blocks went to this replica."""
        self._load[name] += 1
        for key in reversed(keys):  # the beginning of a prefix is worth most: it goes last
            before = self._owners.pop(key, None)
            if before is not None:
                self._owned[before] -= 1
            self._owners[key] = name
            self._owned[name] += 1
        while len(self._owners) > self._keys_max:
            _, forgotten = self._owners.popitem(last=False)
            self._owned[forgotten] -= 1

    def ended(self, name: Name) -> None:
        """A request that was sent there has ended."""
        self._load[name] = max(self._load[name] - 1, 0)

    def keep(self, names: Collection[Name]) -> None:
        """Only these replicas are left."""
        for gone in set(self._load) | set(self._owned):
            if gone not in names:
                del self._load[gone], self._owned[gone]
        for key in [key for key, owner in self._owners.items() if owner not in names]:
            del self._owners[key]

    def _owner(self, keys: Sequence[bytes], names: Collection[Name]) -> Name | None:
        """Who got the longest beginning of the prompt."""
        for key in reversed(keys):
            owner = self._owners.get(key)
            if owner is not None and owner in names:
                return owner
        return None


class PrefixRouter(RequestRouter):
    """Serve's router for pipelines, by `PrefixMemory`."""

    def initialize_state(self, **kwargs: Any) -> None:
        """As Serve asks, with `request_router_kwargs`: the pipelines' block_size."""
        self._block_size = int(kwargs["block_size"])
        self._memory: PrefixMemory[ReplicaID] = PrefixMemory()
        self._keys: OrderedDict[str, Sequence[bytes]] = OrderedDict()  # of requests on their way

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """As Serve asks."""
        found = {replica.replica_id: replica for replica in candidate_replicas}
        self._memory.keep(set(self.curr_replicas))
        keys = () if pending_request is None else self._keys_of(pending_request)
        return [[found[name] for name in rank] for rank in self._memory.ranks(keys, found)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """As Serve tells."""
        del result
        self._memory.sent(self._keys_of(pending_request), replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """As Serve tells."""
        del internal_request_id
        self._memory.ended(replica_id)

    def _keys_of(self, pending: PendingRequest) -> Sequence[bytes]:
        """The block keys of a request, made once; none for calls that are no requests."""
        request = pending.args[0] if pending.args else None
        if not isinstance(request, PrefillRequest):
            return ()
        known = self._keys.get(request.request_id)
        if known is not None:
            return known
        keys = request_keys(request, self._block_size)
        self._keys[request.request_id] = keys
        while len(self._keys) > ROUTES_MAX:
            self._keys.popitem(last=False)
        return keys


def request_keys(request: PrefillRequest, block_size: int) -> Sequence[bytes]:
    """The block keys of a prompt, as its pipeline will make them."""
    raw = np.asarray(request.prompt_token_ids, dtype="<i4").tobytes()
    return chain_keys(raw, block_size, encode_namespace(request.cache_salt))
