"""Carry out an action on several runs, and report how many it worked for and which not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ltui.training.problem import ProblemError
from ltui.training.store.run_directory import RunDir
from ltui.widgets.sanitise import clean_line, clean_name

MAX_NAMES = 3
"""Number of runs that are named for one reason; the others are counted."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one action on several runs."""

    done: tuple[str, ...]
    """Ids of the runs for which it worked."""
    failed: tuple[tuple[str, str], ...]
    """Id and reason of each of the other runs."""

    def sentence(self, text: str) -> str:
        """Return what happened. ``text`` has ``{}`` in place of the runs, as ``Deleted {}``."""
        count = len(self.done) + len(self.failed)
        if not self.failed:
            return f"{text.replace('{}', counted(self.done))}."
        runs = f"{len(self.done) or 'none'} of {count} runs" if count > 1 else "nothing"
        return f"{text.replace('{}', runs)}: {'; '.join(_reasons(self.failed))}."


def counted(run_ids: Sequence[str]) -> str:
    """Return the name of a single run, else the number of runs."""
    return clean_name(run_ids[0]) if len(run_ids) == 1 else f"{len(run_ids)} runs"


def for_each(runs: Sequence[RunDir], action: Callable[[RunDir], object]) -> Outcome:
    """Carry out an action on each run, also after it failed for another one."""
    done: list[str] = []
    failed: list[tuple[str, str]] = []
    for run in runs:
        try:
            action(run)
        except ProblemError as error:
            failed.append((run.id, error.problems[0].what))
        except Exception as error:  # noqa: BLE001 - one run must not keep the action from others
            failed.append((run.id, f"{type(error).__name__}: {error}"))
        else:
            done.append(run.id)
    return Outcome(tuple(done), tuple(failed))


def _reasons(failed: Sequence[tuple[str, str]]) -> list[str]:
    """Return for each reason the runs that have it."""
    runs: dict[str, list[str]] = {}
    for run_id, reason in failed:
        runs.setdefault(clean_line(reason).rstrip("."), []).append(clean_name(run_id))
    return [f"not {_named(names)} ({reason})" for reason, names in runs.items()]


def _named(names: Sequence[str]) -> str:
    if len(names) <= MAX_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[:MAX_NAMES])} and {len(names) - MAX_NAMES} others"
