"""The runs that a user names: by an id, its beginning, a name, or ``last``."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

from ltui.training.problem import Problem, ProblemError
from ltui.training.store.labels_file import read_labels
from ltui.training.store.run_directory import RunDir, list_runs

MOST_LISTED = 12
"""Number of runs that an ambiguous name lists; the others are counted."""


def find_run(home: Path, text: str) -> RunDir:
    """Return the run that ``text`` names: an id, a name, a unique prefix of an id, or ``last``.
    A name that was given later counts if no id begins with it.

    Raise ``ProblemError`` with the most similar id if there is none, or with the ids if several
    runs match.
    """
    return named_run(list_runs(home), text)


def find_runs(home: Path, texts: Iterable[str]) -> list[RunDir]:
    """Return the run that each text names. Raise ``ProblemError`` with every text that is wrong."""
    runs = list_runs(home)
    chosen: list[RunDir] = []
    problems: list[Problem] = []
    for text in texts:
        try:
            chosen.append(named_run(runs, text))
        except ProblemError as error:
            problems += error.problems
    if problems:
        raise ProblemError(*problems)
    return chosen


def named_run(runs: Sequence[RunDir], text: str) -> RunDir:
    """Return the run of ``list_runs`` that ``text`` names, as ``find_run`` does."""
    if text == "last":
        if runs:
            return runs[0]
        raise ProblemError.of(
            where="RUN", what="there is no run yet.", remedy="Start one: ltui run quickstart"
        )
    for matches in (
        [run for run in runs if run.id == text],
        [run for run in runs if run.id[:-5] == text],
        [run for run in runs if text and run.id.startswith(text)],
    ):
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise _ambiguous(text, matches)
    named = [run for run in runs if text and read_labels(run).name.lower() == text.lower()]
    if len(named) == 1:
        return named[0]
    if named:
        raise _ambiguous(text, named)
    raise ProblemError.of(where=text, what="there is no such run.", remedy=_nearest_run(runs, text))


def name_note(runs: Sequence[RunDir], run: RunDir, name: str) -> str:
    """Return what to say if ``name``, which a person gave ``run``, does not name it alone."""
    try:
        named = named_run(runs, name) if name else run
    except ProblemError:
        named = None
    if named == run:
        return ""
    if named is not None and name not in (named.id, named.id[:-5]):
        return f"The id of {named.id} begins with this name: use the id {run.id}."
    return f"Another run has this name too: use the id {run.id}."


def _ambiguous(text: str, matches: Sequence[RunDir]) -> ProblemError:
    ids = ", ".join(run.id for run in matches[:MOST_LISTED])
    more = f" and {len(matches) - MOST_LISTED} more" if len(matches) > MOST_LISTED else ""
    return ProblemError.of(
        where=text, what=f"several runs match: {ids}{more}.", remedy="Give the full id."
    )


def _nearest_run(runs: Sequence[RunDir], text: str) -> str:
    near = difflib.get_close_matches(text, [run.id for run in runs], n=1, cutoff=0.5)
    near = near or difflib.get_close_matches(text, [run.id[:-5] for run in runs], n=1, cutoff=0.5)
    return f"Did you mean {near[0]}?" if near else "ltui runs lists them."
