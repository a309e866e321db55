"""Every world a test builds is checked when the test ends: all sums, and that every key names
what its unit holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from cache_world import World


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    built: list[World] = []

    def build(*groups, **options) -> World:
        built.append(World(*groups, **options))
        return built[-1]

    yield build
    for each in built:
        each.check()
