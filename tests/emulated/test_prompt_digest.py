"""Digests of prompts: the same however a prompt is cut, copied or reused."""

from __future__ import annotations

import numpy as np
import pytest

from wavepp.cache.types import BringBack, Offload, RestoreSnapshot, SnapshotOrder, ZeroSlot
from wavepp.control.work import GroupFacts, SpanWork
from wavepp.emulated.prompt_digest import PromptDigests, digest_of
from wavepp.units import RequestId

B = 8
GROUPS = (
    GroupFacts(name="attention", kind="attention", units=16, bytes_per_unit=1, host_units=4),
    GroupFacts(name="recurrent", kind="recurrent", units=4, bytes_per_unit=1, host_units=2),
)
PROMPT = np.random.default_rng(5).integers(0, 2**31 - 1, size=53).astype(np.int32)


def span(start: int, end: int, table: list[int], slot: int = 0, **more: object) -> SpanWork:
    return SpanWork(
        request_id=RequestId("r"),
        start=start,
        length=end - start,
        token_ids=PROMPT[start:end],
        block_tables={"attention": np.array(table[: -(-end // B)], dtype=np.int32)},
        slot=slot,
        **more,  # type: ignore[arg-type]
    )


def digests() -> PromptDigests:
    return PromptDigests(GROUPS, block_size=B, slots=2)


def whole(tokens: np.ndarray) -> int:
    return digest_of(tokens.tolist())


@pytest.mark.parametrize("cuts", [[], [8], [1, 2, 3], [7, 8, 9, 40], list(range(1, 53))])
def test_cuts_do_not_matter(cuts: list[int]) -> None:
    kept, table = digests(), [3, 0, 7, 9, 1, 15, 2]
    for start, end in zip([0, *cuts], [*cuts, 53], strict=True):
        assert kept.extend(span(start, end, table)) == whole(PROMPT[:end])


def test_a_prefix_is_taken_over_from_blocks_and_a_snapshot() -> None:
    kept = digests()
    order = SnapshotOrder(position=16, slot=0, units={"recurrent": 2})
    kept.extend(span(0, 24, [3, 0, 7], snapshots=(order,)))
    kept.materialize(RestoreSnapshot(group="recurrent", snapshot=2, slot=1))
    assert kept.extend(span(16, 53, [3, 0, 8, 9, 10, 11, 12], slot=1)) == whole(PROMPT)


def test_copies_to_the_host_and_back_keep_it() -> None:
    kept, ids = digests(), np.array([3, 0], dtype=np.int32)
    order = SnapshotOrder(position=16, slot=0, units={"recurrent": 2})
    kept.extend(span(0, 16, [3, 0], snapshots=(order,)))
    host = np.array([1, 2], dtype=np.int32)
    kept.materialize(Offload(group="attention", device=ids, host=host))
    kept.materialize(
        Offload(group="recurrent", device=np.array([2]), host=np.array([1]))  # type: ignore[arg-type]
    )
    kept.extend(span(0, 16, [3, 0], slot=1))
    kept.materialize(BringBack(group="attention", host=host, device=np.array([5, 6], np.int32)))
    kept.materialize(RestoreSnapshot(group="recurrent", snapshot=1, slot=0, from_host=True))
    assert kept.extend(span(16, 53, [5, 6, 8, 9, 10, 11, 12])) == whole(PROMPT)


def test_a_wrong_state_is_noticed() -> None:
    kept = digests()
    kept.extend(span(0, 16, [3, 0]))
    kept.materialize(ZeroSlot(group="recurrent", slot=0))
    with pytest.raises(RuntimeError, match="before token 16 differs by group"):
        kept.extend(span(16, 24, [3, 0, 1]))


def test_a_wrong_table_changes_the_digest() -> None:
    kept = PromptDigests(GROUPS[:1], block_size=B, slots=2)
    kept.extend(span(0, 16, [3, 0]))
    assert kept.extend(span(16, 24, [0, 3, 1])) != whole(PROMPT[:24])
