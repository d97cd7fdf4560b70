"""The value of something optional that a test cannot do without."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def required(value: T | None) -> T:
    """Return ``value``. Fail the test if it is None."""
    assert value is not None
    return value
