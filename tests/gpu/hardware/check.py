"""One reading on real hardware beside what it should be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report of ``make gpu``."""

    what: str
    measured: Any
    """A value that JSON can hold; None if the machine does not offer it."""
    expected: str = ""
    """The bound or the other instrument's value, in words; empty if there is none."""
    ok: bool | None = None
    """None: nothing was compared; the value is for information."""


def above(what: str, value: float | None, bound: float) -> Check:
    """Check that ``value`` is greater than ``bound``."""
    return Check(what, value, f"> {bound:g}", None if value is None else value > bound)


def below(what: str, value: float | None, bound: float) -> Check:
    """Check that ``value`` is less than ``bound``."""
    return Check(what, value, f"< {bound:g}", None if value is None else value < bound)


def holds(what: str, ok: bool, measured: Any = None) -> Check:
    """Check that a statement is true. ``measured``: what led to the answer."""
    return Check(what, ok if measured is None else measured, "yes", ok)
