"""What a supervisor is started for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptPlan:
    """A new attempt of a run, unless ``adopt``: then the one that lost its supervisor."""

    recover: bool = False
    resume_from: Path | None = None
    resume_step: int | None = None
    spec_path: Path | None = None
    """A specification that replaces the run's own."""
    changes: tuple[str, ...] = ()
    """What ``--set`` changed in it, for people."""
    skipped: tuple[str, ...] = ()
    """Newer checkpoints that are not whole, each with what is wrong."""
    restarted_because: str | None = None
    """Set where nobody asked for the attempt: ``restart 2 of 3, after: ...``."""

    def event_text(self, attempt: int) -> str:
        """The event that an attempt begins with."""
        parts = [f"Attempt {attempt} begins"]
        if self.restarted_because:
            parts.append(f"({self.restarted_because})")
        if self.resume_from is not None:
            parts.append(f"from step {self.resume_step} ({self.resume_from.name})")
        elif attempt > 1:
            parts.append("from the beginning, as there is no checkpoint")
        text = " ".join(parts)
        if self.changes:
            text += f", with {', '.join(self.changes)}"
        if self.skipped:
            text += f"; skipped: {'; '.join(self.skipped)}"
        return f"{text}."

    def event_fields(self) -> dict[str, object]:
        """The event's data."""
        return {
            "path": None if self.resume_from is None else str(self.resume_from),
            "global_step": self.resume_step,
            "changes": list(self.changes),
            "skipped": list(self.skipped),
            "restarted_because": self.restarted_because,
        }
