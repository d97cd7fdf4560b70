"""The runs of a home that match a filter, for commands that act on them."""

from __future__ import annotations

import time

from ltui.app.runs.filter_runs import fields_of, run_filter, unknown_names
from ltui.app.runs.run_entry import RunEntry
from ltui.app.runs.run_list import RunList
from ltui.training.problem import Problem, ProblemError


def matching_runs(runs: RunList, text: str) -> list[RunEntry]:
    """Return the runs that match the filter ``text``.

    Raise ``ProblemError`` if the filter is wrong, or names a field or metric that no run has.
    """
    matches, used = run_filter(text, time.time()), fields_of(text)
    every_run = runs.complete(runs.poll(), used)
    # A misspelt metric behind `not` would match every run.
    if every_run and (sentences := unknown_names(used, every_run)):
        raise ProblemError(*(Problem(where="--filter", what=text) for text in sentences))
    return [entry for entry in every_run if matches(entry)]
