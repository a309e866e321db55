"""Pledges: what stands for a lease where nothing is pinned before materialisation.

Owns an endpoint that was usable when the tree was walked, and nothing else: whatever the others do,
it may be gone when it is wanted. The baseline that leases are compared with.
"""

from __future__ import annotations

from dataclasses import dataclass

from wavepp.cache import lease as leases
from wavepp.cache.lease import Lease
from wavepp.cache.parts import Parts
from wavepp.cache.types import Prompt, Refusal, ReuseVote


@dataclass(slots=True)
class Pledge:
    """`endpoint` is in blocks."""

    attempt: int
    prompt: Prompt
    endpoint: int


def make(parts: Parts, attempt: int, prompt: Prompt, limit: int) -> tuple[Pledge, ReuseVote]:
    """Walks up to `limit` blocks; the highest usable endpoint is pledged."""
    vote = leases.look(parts, prompt, limit)
    most = min(limit * parts.block_size, prompt.reuse_cap)
    return Pledge(attempt, prompt, vote.highest(most) // parts.block_size), vote


def lower(parts: Parts, pledge: Pledge, limit: int) -> ReuseVote:
    """Walks again, for an endpoint of at most `limit` blocks."""
    most = min(limit, pledge.endpoint)
    vote = leases.look(parts, pledge.prompt, most)
    pledge.endpoint = vote.highest(most * parts.block_size) // parts.block_size
    return vote


def redeem(parts: Parts, pledge: Pledge) -> Lease | Refusal:
    """Walks a last time and pins: a lease at the endpoint, or word that it is gone."""
    lease, _ = leases.acquire(parts, pledge.attempt, pledge.prompt, pledge.endpoint)
    found = lease.endpoint
    if found == pledge.endpoint:
        return lease
    leases.release(parts, lease)
    return Refusal(reason="gone", group="prefix", needed=pledge.endpoint, available=found)
