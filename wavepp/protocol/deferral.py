"""Who computes a prefix that another request lacks. Pure functions over the leader's records.

A request whose missing prefix an admitted request is computing may wait for it: it becomes a hit
instead of computing the same again. A request that is about to be admitted counts as well, else a
burst of equal prompts would all compute at once. Owns the choice of donor and target; may not:
decide how long to wait. Block keys are chained, so one equal key means an equal prefix; if a
collision fools us, the later walk compares tokens and all that was lost is time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from wavepp.protocol.record import Record
from wavepp.protocol.states import UNDECIDED


def shared_tokens(ours: Sequence[bytes], theirs: Sequence[bytes], block_size: int) -> int:
    """Length of the common prefix of two prompts, in tokens of full blocks. O(log n)."""
    count = min(len(ours), len(theirs))
    differs = bisect_left(range(count), True, key=lambda block: ours[block] != theirs[block])
    return differs * block_size


Donor = tuple[Record, int]
"""Who computes a prefix, and up to where others share it, in tokens."""


def find_donor(record: Record, holders: Iterable[Record], *, block_size: int) -> Donor | None:
    """The request that computes most of what this one lacks, and up to where (in tokens).

    With recurrent windows the donor must still be able to keep a snapshot there: the target is
    ahead of every span planned so far.
    """
    best: Donor | None = None
    reached = record.best_hint()
    cap = min(record.arrival.reuse_cap, record.claim.reuse_max)
    for donor in holders:
        shared = shared_tokens(record.arrival.keys, donor.arrival.keys, block_size)
        target = min(shared, cap)
        if target > reached and _will_compute(donor, target, snapshot=record.has_snapshots):
            best, reached = (donor, target), target
    return best


def has_computed(donor: Record, target: int) -> bool:
    """Every stage has published the donor's blocks up to the target."""
    return donor.phase not in UNDECIDED and donor.run.computed >= target


def _will_compute(donor: Record, target: int, *, snapshot: bool) -> bool:
    if donor.phase in UNDECIDED:
        return donor.claim.limit < target
    return (donor.run.planned if snapshot else donor.run.computed) < target
