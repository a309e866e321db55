"""What a simulation reports when the system is wrong."""

from __future__ import annotations


class Violation(Exception):
    """A checker saw something that must never be.

    Args:
        checker: its name, as in the documentation.
    """

    def __init__(self, checker: str, message: str) -> None:
        super().__init__(f"{checker}: {message}")
        self.checker = checker
