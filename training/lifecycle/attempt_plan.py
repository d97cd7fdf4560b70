"""The plan of one attempt: what a supervisor is started to do."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct


class AttemptPlan(Struct, frozen=True, kw_only=True):
    """A new attempt of a run or, with ``recover``, the attempt whose supervisor died."""

    number: int | None = None
    """Number of the attempt; None for the one after the last."""
    recover: bool = False
    resume_from: Path | None = None
    resume_step: int | None = None
    spec_path: Path | None = None
    """A specification that replaces the stored one of the run."""
    changes: tuple[str, ...] = ()
    """The overrides (``--set``) that are new in this specification, as shown to people."""
    skipped: tuple[str, ...] = ()
    """Newer checkpoints that are incomplete or damaged, each with the reason."""
    restarted_because: str | None = None
    """The reason of an automatic restart, for example ``restart 2 of 3, after: ...``."""
    left_out: tuple[int, ...] | None = None
    """Nodes without which a restart continues; None for those of the specification."""

    def event_text(self, attempt: int) -> str:
        """Return the text of the event that marks the start of the attempt."""
        parts = [f"Attempt {attempt} begins"]
        if self.restarted_because:
            parts.append(f"({self.restarted_because})")
        if self.left_out:
            parts.append(f"without node {', '.join(map(str, self.left_out))}")
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
        """Return the data of that event."""
        return {
            "path": None if self.resume_from is None else str(self.resume_from),
            "global_step": self.resume_step,
            "changes": list(self.changes),
            "skipped": list(self.skipped),
            "restarted_because": self.restarted_because,
        }
