"""What is known of a command whose ranks send no telemetry, from its processes alone.

Reads ``/proc`` only. A program that uses PyTorch without Lightning's Trainer never sends telemetry;
one that uses the Trainer sends none until it has started it. From outside the two look alike, so
the words say only what was seen.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ltui.training.process.identity import ProcessIdentity, environment
from ltui.training.process.rank_usage import ProcessTable

_MOST_PROCESSES = 64
"""Processes of one command that are looked into."""
_COMMAND_S = 6.0
"""Seconds after which a command without a Python process counts as running."""
_PYTHON_S = 20.0
"""The same for a Python program: importing PyTorch and Lightning takes that long on a busy disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What the processes of a command show."""

    python: bool = False
    torch: bool = False
    """Whether one of them has loaded PyTorch's library."""
    ranks: int = 0
    """Processes that have a rank of their own in their environment."""
    world_size: int | None = None

    def runs_after_s(self) -> float:
        """Seconds after the start from which the command counts as running, not as starting."""
        return _PYTHON_S if self.python else _COMMAND_S

    def describe(self) -> str:
        """Why there are no steps and no rates, in one line."""
        if not self.torch:
            who = "the program has" if self.python else "the command has"
            return f"no telemetry: {who} not loaded PyTorch"
        if self.ranks > 1:
            return (
                f"no telemetry: its {self.ranks} ranks use PyTorch, but have not started a"
                " Lightning Trainer"
            )
        return "no telemetry: the program uses PyTorch, but has not started a Lightning Trainer"


class ProgramReader:
    """Reads the processes of one command, each until it is known to have loaded PyTorch."""

    def __init__(self) -> None:
        self._torch: set[ProcessIdentity] = set()

    def read(
        self, table: ProcessTable, engine: ProcessIdentity, found: Mapping[int, ProcessIdentity]
    ) -> Program:
        """``found``: the processes that stand for ranks."""
        marks = [table.identity(pid) for pid in table.tree(engine.pid)[:_MOST_PROCESSES]]
        living = {mark for mark in marks if mark is not None}
        self._torch &= living
        self._torch |= {mark for mark in living - self._torch if _has_torch(mark.pid)}
        environments = [environment(mark.pid) for mark in found.values() if mark != engine]
        sizes = [e["WORLD_SIZE"] for e in environments if e.get("WORLD_SIZE", "").isdigit()]
        return Program(
            python=any(_is_python(mark.pid) for mark in living),
            torch=bool(self._torch),
            ranks=len(environments),
            world_size=max(map(int, sizes), default=None),
        )


def _has_torch(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            return any("/libtorch" in line for line in file)
    except OSError:
        return False


def _is_python(pid: int) -> bool:
    try:
        name = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False
    return name.startswith(("python", "pypy"))
