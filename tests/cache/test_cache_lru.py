"""EvictionOrder against a plain list."""

from __future__ import annotations

import random

import numpy as np
import pytest

from wavepp.cache import lru
from wavepp.cache.lru import EvictionOrder


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_order_takes_the_least_recently_used_first() -> None:
    order = EvictionOrder(8)
    order.push(ids(3, 2))
    order.push(ids(1, 0))
    assert order.take(3).tolist() == [3, 2, 1]
    assert order.listed().tolist() == [0]


def test_order_forgets_the_old_place_of_a_unit_used_again() -> None:
    order = EvictionOrder(8)
    order.push(ids(3, 2, 1))
    order.remove(ids(2, 3))
    order.push(ids(3))
    assert order.listed().tolist() == [1, 3]


def test_order_restores_units_where_their_last_use_puts_them() -> None:
    order = EvictionOrder(8)
    order.push(ids(5, 4))
    order.push(ids(3, 2))
    taken = order.take(3)
    order.push(ids(1))
    order.restore(taken[::-1].copy())
    assert order.listed().tolist() == [5, 4, 3, 2, 1]


def test_order_takes_fewer_when_there_are_fewer() -> None:
    order = EvictionOrder(4)
    order.push(ids(1))
    assert order.take(3).tolist() == [1]
    assert order.take(3).tolist() == []


def test_order_refuses_broken_contracts() -> None:
    order = EvictionOrder(4)
    order.push(ids(1))
    with pytest.raises(AssertionError, match="twice"):
        order.push(ids(1))
    with pytest.raises(AssertionError, match="not in the eviction order"):
        order.remove(ids(2))
    with pytest.raises(AssertionError, match="back twice"):
        order.restore(ids(1))


@pytest.mark.parametrize("seed", range(30))
def test_order_equals_a_list(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lru, "SEGMENT_UNITS", 4 if seed % 2 else 32)
    rng = random.Random(seed)
    order, units = EvictionOrder(60), 60
    stamp: dict[int, int] = {}
    model: set[int] = set()
    clock = 0
    taken: list[int] = []
    for _ in range(300):
        match rng.randrange(4):
            case 0:
                idle = [unit for unit in range(units) if unit not in model and unit not in taken]
                chosen = rng.sample(idle, min(len(idle), rng.randrange(1, 12)))
                order.push(np.array(chosen, dtype=np.int32))
                for unit in chosen:
                    clock += 1
                    stamp[unit] = clock
                model.update(chosen)
            case 1 if model:
                chosen = rng.sample(sorted(model), rng.randrange(1, len(model) + 1))
                order.remove(np.array(chosen, dtype=np.int32))
                model.difference_update(chosen)
            case 2:
                count = rng.randrange(8)
                got = order.take(count).tolist()
                assert got == sorted(model, key=stamp.__getitem__)[:count]
                model.difference_update(got)
                taken += got
            case 3 if taken:
                back = rng.sample(taken, rng.randrange(1, len(taken) + 1))
                order.restore(np.array(back, dtype=np.int32))
                model.update(back)
                taken = [unit for unit in taken if unit not in back]
        assert order.listed().tolist() == sorted(model, key=stamp.__getitem__)
        assert len(order) == len(model)


def test_order_keeps_its_lists_short_however_often_a_path_is_used() -> None:
    order = EvictionOrder(5000)
    path = np.arange(5000, dtype=np.int32)
    order.push(path)
    for _ in range(200):
        order.remove(path[1:])
        order.push(path[1:])
    assert sum(len(segment.ids) for segment in order._segments) <= 4 * 5000


def test_what_is_put_back_does_not_pile_up_in_one_segment() -> None:
    """Many escrows that are undone give everything back, into an order that they had emptied."""
    order, units = EvictionOrder(50_000), np.arange(50_000, dtype=np.int32)
    for path in np.split(units, 16):
        order.push(path)
    taken = [order.take(3125) for _ in range(16)]
    assert len(order) == 0
    for victims in taken[::-1]:
        order.restore(victims)
    assert order.listed().tolist() == units.tolist()
    assert max(len(segment.ids) for segment in order._segments) <= 2 * lru.SEGMENT_UNITS
