"""Typed access to the keys of a config file; every complaint names file, key and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wavepp.errors import ConfigError


class JsonConfig:
    """A JSON object whose values are checked as they are read."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self._values = values
        self.name = name

    def fail(self, key: str, why: str) -> ConfigError:
        """The error for a key: `raise config.fail("hidden_act", "is not supported")`."""
        return ConfigError(f"{self.name}: {key} {self._values.get(key)!r} {why}")

    def raw(self, key: str) -> Any:
        """The value as it is; None when absent."""
        return self._values.get(key)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._values.get(key, default)
        if not isinstance(value, str):
            raise self.fail(key, "is not a string")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number above 0; `default` stands in when the key is absent or null."""
        value = self._values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.fail(key, "is not a positive integer")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number of 0 or more; `default` stands in when the key is absent or null."""
        value = self._values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.fail(key, "is not a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0; `default` stands in when the key is absent or null."""
        value = self._values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.fail(key, "is not a positive number")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A number above 0, or None when absent or null."""
        return None if self._values.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean; `default` stands in when the key is absent or null."""
        value = self._values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.fail(key, "is not true or false")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        """An object; empty when absent or null."""
        value = self._values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.fail(key, "is not an object")
        return value

    def child(self, key: str) -> JsonConfig:
        """A nested object; its complaints name it. Empty when absent or null."""
        return JsonConfig(self.mapping(key), f"{self.name}: {key}")

    def replaced(self, **values: Any) -> JsonConfig:
        """The same object with other values under some keys."""
        return JsonConfig({**self._values, **values}, self.name)

    def int_list(self, key: str) -> tuple[int, ...]:
        """An integer or a list of integers, as a tuple; empty when absent or null."""
        value = self._values.get(key)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
            raise self.fail(key, "is not an integer or a list of integers")
        return tuple(values)
