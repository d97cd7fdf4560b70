"""Errors that a user can cause and correct: where they are, what is wrong, and what to do.

Every user interface shows them; internal errors of ltui are not ``ProblemError``.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

Error = TypeVar("Error", bound="ProblemError")


class Problem(NamedTuple):
    """One error of the user. ``str()`` gives one line for standard error."""

    where: str
    """Place of the error: ``--set trainer.devices``, ``my.yaml:12 trainer.max_epoch``, a path."""
    what: str
    """One sentence that says what is wrong."""
    remedy: str | None = None
    """One sentence that says what to do."""
    excerpt: str | None = None
    """Lines of the input that mark the place; the CLI prints them below the error."""
    code: str | None = None
    """A word for programs, such as ``no-such-run``; None for that of the error."""

    def __str__(self) -> str:
        line = f"{self.where}: {self.what}" + (f" {self.remedy}" if self.remedy else "")
        # A message can contain text of a file or of a library that has lines.
        return " ".join(line.splitlines())


class ProblemError(ValueError):
    """Raised with all problems of the input at once; the CLI prints them and exits with 2."""

    default_code = "bad-input"
    """The code of problems that have none of their own."""

    def __init__(self, *problems: Problem) -> None:
        assert problems
        self.problems = problems
        super().__init__("\n".join(str(p) for p in problems))

    @property
    def code(self) -> str:
        """Return a word for programs that says what kind of error this is."""
        return self.problems[0].code or self.default_code

    @classmethod
    def of(cls: type[Error], *, where: str, what: str, remedy: str | None = None) -> Error:
        """Return the error of one problem."""
        return cls(Problem(where=where, what=what, remedy=remedy))
