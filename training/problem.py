"""The one error that a person can cause and every front end shows: what, where, what to do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One mistake. ``str()`` gives one line fit for standard error."""

    where: str
    """The place: ``--set trainer.devices``, ``my.yaml:12 trainer.max_epoch``, a path."""
    what: str
    """One sentence, what is wrong."""
    remedy: str | None = None
    """One sentence, what to do."""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" + (f" {self.remedy}" if self.remedy else "")


class ProblemError(ValueError):
    """Raised at a door with every problem found at once; the CLI prints them and exits with 2."""

    def __init__(self, *problems: Problem) -> None:
        assert problems
        self.problems = problems
        super().__init__("\n".join(str(p) for p in problems))
