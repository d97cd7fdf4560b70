"""One reading on real hardware beside what it should be, and what a section gets to take it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
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


def off(checks: Iterable[Check]) -> list[str]:
    """Return what is off."""
    return [check.what for check in checks if check.ok is False]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """Folders, accelerator and time of one section."""

    folder: Path
    """Where the section writes its files; they stay."""
    home: Path
    """An empty ``$LTUI_HOME`` with a short path, already set in the environment; it is deleted."""
    rehearsal: bool
    """True: on the CPU, as small as possible, to find mistakes in the section itself."""
    deadline: float
    """Monotonic time at which the section is killed."""

    @property
    def accelerator(self) -> str:
        """Return Lightning's name of the accelerator."""
        return "cpu" if self.rehearsal else "cuda"

    def seconds_left(self) -> float:
        """Return the seconds until the section is killed."""
        return self.deadline - time.monotonic()
