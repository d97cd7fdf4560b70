"""Under which conditions a section of ``make gpu`` runs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path


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
