"""What a fault of the zoo is: how it is made, and what a right verdict on it says.

A verdict is right about the culprit where ``level``, ``culprits`` and ``waiting`` agree, and about
the cause where every pattern is found in its kind, place and cause and, where ``line`` is given,
the file and line of the marked call too. Nothing here looks at the judge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
GRAVE = ("dead", "stalled")


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """One right verdict."""

    levels: tuple[str, ...] = ("stalled",)
    culprits: tuple[int, ...] = (1,)
    also: tuple[tuple[int, ...], ...] = ()
    """Other sets of culprits that are as right."""
    words: tuple[str, ...] = ()
    """Regular expressions, without regard to case."""
    line: str | None = None
    """The name of a ``fault:`` comment in ``scripts``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    id: str
    title: str
    expected: tuple[Expected, ...]
    """All of them at once. Empty: ltui takes the fault away, and the run ends as ``ends`` says."""
    inject: str = ""
    """``ZOO_FAULT``; by default the id."""
    ranks: int = 3
    env: Mapping[str, str] = field(default_factory=dict)
    via: str = "fork"
    """``fork`` (``ltui exec -- python zoo_engine.py``), ``torchrun``, ``preset``."""
    needs: tuple[str, ...] = ()
    """``cgroup``, ``mount``, ``network``, ``shm``: what the machine must permit."""
    bound_s: float = 10.0
    patience_s: float = 30.0
    """How long a right verdict is waited for."""
    ends: str | None = None
    """The state in which the run must end by itself."""
    hold_s: float = 2.0
    """How long the right verdict must then stand."""

    @property
    def zoo_fault(self) -> str:
        return self.inject or self.id


def one(*words: str, **fields: object) -> tuple[Expected, ...]:
    """A single right verdict that holds ``words``."""
    return (Expected(words=words, **fields),)  # type: ignore[arg-type]


def dead(*words: str, **fields: object) -> tuple[Expected, ...]:
    return one(*words, levels=("dead",), **fields)


def line_of(name: str) -> str:
    """``file.py:12`` of the comment ``fault: NAME``."""
    for path in sorted(SCRIPTS.glob("*.py")):
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if text.rstrip().endswith(f"# fault: {name}"):
                return f"{path.name}:{number}"
    raise LookupError(name)
