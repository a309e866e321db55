"""The smallest stage counts, exchanged at start."""

from __future__ import annotations

import pytest
from cluster import attention, recurrent

from wavepp.errors import ConfigError
from wavepp.protocol.capacity import Capacity, smallest_capacity


def test_row_a5_equal_bytes_on_5_3_4_layers_advertise_the_minimum() -> None:
    bytes_per_stage, bytes_per_layer_block = 60_000, 100
    stages = [
        [attention(bytes_per_stage // (layers * bytes_per_layer_block))] for layers in (5, 3, 4)
    ]
    assert [groups[0].units for groups in stages] == [120, 200, 150]
    capacity = smallest_capacity(stages, block_size=4, headroom_tokens=80)
    assert capacity == Capacity(tokens=480, headroom_tokens=80, oversized_over=400)


def test_headroom_is_at_most_a_quarter_of_the_smallest_pool() -> None:
    stages = [[attention(100)], [attention(10)]]
    capacity = smallest_capacity(stages, block_size=4, headroom_tokens=1000)
    assert capacity == Capacity(tokens=40, headroom_tokens=8, oversized_over=32)


def test_snapshots_are_no_limit_on_tokens() -> None:
    capacity = smallest_capacity([[recurrent(1)]], block_size=4, headroom_tokens=8)
    assert capacity == Capacity(tokens=None, headroom_tokens=0, oversized_over=None)


def test_a_stage_without_a_block_is_named() -> None:
    with pytest.raises(ConfigError, match="stage 1 has no room in its cache group 'kv'"):
        smallest_capacity([[attention(4)], [attention(0, "kv")]], block_size=4, headroom_tokens=0)
