"""Inspect the processes of a user command whose ranks send no telemetry.

Reads ``/proc`` only. A program that uses PyTorch sends no telemetry before Lightning's Trainer
starts, or before the first step of an optimizer. A program that trains nothing never sends any.
From outside the two cannot be distinguished, so the description states only what was observed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ltui.training.process.identity import ProcessIdentity
from ltui.training.process.proc_files import environment, read_text
from ltui.training.process.process_table import ProcessTable

_MAX_PROCESSES = 64
"""Maximum number of processes of one command that are inspected."""
_COMMAND_S = 6.0
"""Seconds after which a command without a Python process counts as running."""
_PYTHON_S = 20.0
"""Seconds after which a Python program counts as running.

Importing PyTorch and Lightning can take this long on a busy disk.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Observations about the processes of a command."""

    python: bool = False
    torch: bool = False
    """True if one of the processes has loaded the PyTorch library."""
    ranks: int = 0
    """Number of processes with a rank in their environment variables."""
    world_size: int | None = None

    def runs_after_s(self) -> float:
        """Return the seconds after its start at which the command counts as running."""
        return _PYTHON_S if self.python else _COMMAND_S

    def describe(self) -> str:
        """Return one line that explains why there are no steps and no rates."""
        if not self.torch:
            who = "the program has" if self.python else "the command has"
            return f"no telemetry: {who} not loaded PyTorch"
        if self.ranks > 1:
            return f"no telemetry: its {self.ranks} ranks use PyTorch, but no optimizer has stepped"
        return "no telemetry: the program uses PyTorch, but no optimizer has stepped"


class ProgramReader:
    """Inspects the processes of one command. Processes that have loaded PyTorch are cached."""

    def __init__(self) -> None:
        self._torch: set[ProcessIdentity] = set()

    def read(
        self,
        table: ProcessTable,
        engine: ProcessIdentity,
        rank_processes: Mapping[int, ProcessIdentity],
    ) -> Program:
        """Return what the processes show. ``rank_processes`` are those that count as ranks."""
        processes = [table.identity(pid) for pid in table.tree(engine.pid)[:_MAX_PROCESSES]]
        live = {process for process in processes if process is not None}
        self._torch &= live
        self._torch |= {
            process
            for process in live - self._torch
            if "/libtorch" in read_text(f"/proc/{process.pid}/maps")
        }
        environments = [
            environment(process.pid) for process in rank_processes.values() if process != engine
        ]
        sizes = [e["WORLD_SIZE"] for e in environments if e.get("WORLD_SIZE", "").isdigit()]
        return Program(
            python=any(_is_python(process.pid) for process in live),
            torch=bool(self._torch),
            ranks=len(environments),
            world_size=max(map(int, sizes), default=None),
        )


def _is_python(pid: int) -> bool:
    try:
        name = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False
    return name.startswith(("python", "pypy"))
