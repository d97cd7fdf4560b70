"""Faults of the catalogue: how each is injected, and the right verdict on it.

A verdict is right about the culprit if its level and culprits are expected. It is right about the
cause if every pattern occurs in its kind, place and cause, and, if ``line`` is given, the file and
line of the marked call too. This module does not depend on the judge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
GRAVE = ("dead", "stalled")


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """One right verdict."""

    levels: tuple[str, ...] = ("stalled",)
    culprits: tuple[int, ...] = (1,)
    also: tuple[tuple[int, ...], ...] = ()
    """Other sets of culprits that are right too."""
    words: tuple[str, ...] = ()
    """Regular expressions, without regard to case."""
    line: str | None = None
    """The name of a ``fault:`` comment in ``scripts``."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of the catalogue."""

    id: str
    title: str
    _: KW_ONLY
    expected: tuple[Expected, ...]
    """All verdicts that are expected at once. Empty if ltui removes the fault; see ``ends``."""
    inject: str = ""
    """``ZOO_FAULT``; by default the id."""
    ranks: int = 3
    env: Mapping[str, str] = field(default_factory=dict)
    via: str = "fork"
    """``fork`` (``ltui exec -- python zoo_engine.py``), ``torchrun``, ``preset``."""
    needs: tuple[str, ...] = ()
    """Permissions that are needed: ``cgroup``, ``mount``, ``network``, ``shm``."""
    bound_s: float = 10.0
    patience_s: float = 30.0
    """Seconds to wait for the right verdict."""
    ends: str | None = None
    """The state in which the run must end by itself."""
    hold_s: float = 2.0
    """Seconds for which the right verdict must then stay active."""

    @property
    def zoo_fault(self) -> str:
        return self.inject or self.id


def one(*words: str, **fields: object) -> tuple[Expected, ...]:
    """Expect a single verdict that contains ``words``."""
    return (Expected(words=words, **fields),)  # type: ignore[arg-type]


def dead(*words: str, **fields: object) -> tuple[Expected, ...]:
    return one(*words, levels=("dead",), **fields)


def line_of(name: str) -> str:
    """Return ``file.py:12`` of the comment ``fault: NAME``."""
    for path in sorted(SCRIPTS.glob("*.py")):
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if text.rstrip().endswith(f"# fault: {name}"):
                return f"{path.name}:{number}"
    raise LookupError(name)
