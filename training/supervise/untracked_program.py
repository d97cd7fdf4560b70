"""Inspect the processes of a run whose ranks send no telemetry yet, or never will.

Reads ``/proc``, and the empty files by which a process says that it has imported a library
(``training/rank/program/attach.py``). A program that uses PyTorch sends no telemetry before
Lightning's Trainer starts, or before the first step of an optimizer. A program that trains
nothing, or without an optimizer of torch, never sends any. From outside the two cannot be
distinguished, so the description states only what was observed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ltui.training.process.identity import ProcessIdentity
from ltui.training.process.proc_files import environment, read_text
from ltui.training.process.process_table import ProcessTable

_MAX_PROCESSES = 64
"""Maximum number of processes of one command that are inspected."""
_COMMAND_S = 6.0
"""Seconds after which a command without a Python process counts as running."""
_PYTHON_S = 20.0
"""Seconds after which a Python program that has not begun to import PyTorch counts as running."""
_IMPORT_S = 180.0
"""Maximum seconds for the import of PyTorch; an old PyTorch does not say that it is over."""
_FIRST_STEP_S = 60.0
"""Seconds after the import of PyTorch in which the first step is expected."""
_HELP = "ltui_rank.log and --metrics-pattern show its values"


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Observations about the processes of a command."""

    python: bool = False
    torch: bool = False
    """True if one of the processes has loaded the PyTorch library, also if it has ended."""
    keras: bool = False
    """True if one of the processes has imported Keras with PyTorch as its backend."""
    importing_s: float | None = None
    """Seconds for which a process has been importing PyTorch; None if none is."""
    imported_s: float | None = None
    """Seconds since the last process has imported PyTorch; None if none has."""
    ranks: int = 0
    """Number of processes with a rank in their environment variables."""
    world_size: int | None = None

    def runs(self, elapsed_s: float) -> bool:
        """Return True if the command counts as running ``elapsed_s`` after its start."""
        if self.importing_s is not None:
            return False
        if self.imported_s is not None:
            return self.imported_s > _FIRST_STEP_S
        return self.torch or elapsed_s > (_PYTHON_S if self.python else _COMMAND_S)

    def stage(self) -> str | None:
        """Return what the program does before it trains: ``importing torch (12 s)``."""
        if self.importing_s is not None:
            return f"importing torch ({self.importing_s:.0f} s)"
        return "no training step yet" if self.imported_s is not None else None

    def describe(self, *, logs: bool = False) -> str:
        """Return one line that explains why there are no steps and no rates.

        ``logs``: the values that the program logs are known.
        """
        remedy = "" if logs else f"; {_HELP}"
        if not self.torch:
            return f"no steps: the {'program' if self.python else 'command'} does not use PyTorch"
        if self.keras:
            return f"no steps: Keras trains by optimizers that ltui does not see{remedy}"
        who = f"on its {self.ranks} ranks " if self.ranks > 1 else ""
        return f"no steps: {who}no optimizer of torch.optim has stepped{remedy}"


class ProgramReader:
    """Inspects the processes of one attempt, and remembers which have loaded PyTorch."""

    def __init__(self, queue_dir: Path) -> None:
        """``queue_dir``: the folder in which processes say what they have imported."""
        self._queue_dir = queue_dir
        self._loaded: dict[ProcessIdentity, float] = {}
        """Monotonic second at which the PyTorch library was first seen in a process."""
        self._imported: dict[int, float] = {}
        """pid -> monotonic second at which its import of PyTorch was first seen to be over."""
        self._torch = self._keras = False

    def read(
        self,
        table: ProcessTable,
        engine: ProcessIdentity,
        rank_processes: Mapping[int, ProcessIdentity],
    ) -> Program:
        """Return what the processes show. ``rank_processes`` are those that count as ranks."""
        now = time.monotonic()
        processes = [table.identity(pid) for pid in table.tree(engine.pid)[:_MAX_PROCESSES]]
        live = {process for process in processes if process is not None}
        self._read_imported(now)
        self._loaded = {process: at for process, at in self._loaded.items() if process in live}
        for process in live - self._loaded.keys():
            if "/libtorch" in read_text(f"/proc/{process.pid}/maps"):
                self._loaded[process] = now
        self._torch = self._torch or bool(self._loaded)
        begun = [at for process, at in self._loaded.items() if process.pid not in self._imported]
        importing_s = now - min(begun) if begun else None
        environments = [
            environment(process.pid) for process in rank_processes.values() if process != engine
        ]
        sizes = [e["WORLD_SIZE"] for e in environments if e.get("WORLD_SIZE", "").isdigit()]
        return Program(
            python=any(_is_python(process.pid) for process in live),
            torch=self._torch,
            keras=self._keras,
            importing_s=None if importing_s is None or importing_s > _IMPORT_S else importing_s,
            imported_s=now - max(self._imported.values()) if self._imported else None,
            ranks=len(environments),
            world_size=max(map(int, sizes), default=None),
        )

    def _read_imported(self, now: float) -> None:
        try:
            names = os.listdir(self._queue_dir)
        except OSError:
            return
        for name in names:
            library, _, pid = name.removesuffix(".imported").rpartition("-")
            if name.endswith(".imported") and pid.isdigit():
                self._keras = self._keras or library == "keras"
                self._torch = True
                self._imported.setdefault(int(pid), now)


def _is_python(pid: int) -> bool:
    try:
        name = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False
    return name.startswith(("python", "pypy"))
