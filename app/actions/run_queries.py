"""Read runs: list, status, metrics as arrays, comparison, diagnosis. Nothing here changes a run.

``ltui runs`` must start fast, so each function imports only what it needs itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from msgspec import Struct

from ltui.app.actions.check_arguments import check, texts
from ltui.app.runs.filter_runs import fields_of, matching_runs, run_filter, unknown_names
from ltui.app.runs.run_entry import RunEntry
from ltui.app.runs.run_fields import SETTING
from ltui.app.runs.run_list import RunList, recovered_snapshot
from ltui.app.runs.run_rows import sort_key, sorted_runs
from ltui.training.problem import Problem, ProblemError
from ltui.training.state.run_snapshot import RunSnapshot
from ltui.training.store.find_run import find_run, named_run
from ltui.training.store.run_directory import RunDir, list_runs, ltui_home

if TYPE_CHECKING:
    from ltui.app.compare.comparison import Comparison, Grouping
    from ltui.app.diagnosis.request_diagnosis import DiagnosisResult
    from ltui.training.store.curve_reader import Curve

MOST_POINTS = 100_000
"""Default of the maximum number of points of a metric."""


class SelectedRuns(Struct, frozen=True, kw_only=True):
    """The runs that match a filter."""

    runs: tuple[RunEntry, ...]
    total: int
    """Number of all runs."""
    notes: tuple[str, ...]
    """Sentences about names that no run has."""


def select_runs(
    run_list: RunList, filter_text: str = "", sort: str | None = None, columns: Sequence[str] = ()
) -> SelectedRuns:
    """Return the runs that match, sorted by a field (``-field``: highest first), newest first
    without one. They have the values of ``columns``. Raises ``ProblemError`` for a wrong filter."""
    matches = run_filter(filter_text, time.time())
    order = None if sort is None else sort_key(sort)
    used = {*fields_of(filter_text), *columns, *([order[0]] if order else [])}
    every_run = run_list.poll()
    # The settings of all runs are needed to know whether a name is that of a setting.
    settings = {name for name in used if name.startswith(SETTING)}
    every_run = run_list.complete(every_run, settings | fields_of(filter_text))
    shown = list(run_list.complete([entry for entry in every_run if matches(entry)], used))
    if order is not None:
        shown = sorted_runs(shown, order[0], reverse=order[1])
    notes = tuple(unknown_names(used, every_run)) if every_run else ()
    return SelectedRuns(runs=tuple(shown), total=len(every_run), notes=notes)


def runs(filter_text: str = "", *, sort: str | None = None) -> tuple[RunEntry, ...]:
    """Return the runs that match a filter (``ltui runs --help``), newest first or sorted."""
    check("filter_text", filter_text, str)
    check("sort", sort, str, type(None))
    with closing(RunList(ltui_home(to_write=False))) as run_list:
        return select_runs(run_list, filter_text, sort).runs


def status(run: str) -> RunSnapshot:
    """Return how a run is: state, steps, ranks, last metrics, checkpoints, verdicts."""
    return recovered_snapshot(find_run(ltui_home(to_write=False), run))


def metrics(
    run: str, names: str | Sequence[str] = (), *, rank: int = 0, max_points: int = MOST_POINTS
) -> dict[str, Curve]:
    """Return the curves of the metrics whose name matches, by default of every logged one.

    A curve has NumPy arrays: ``steps``, ``epochs``, ``times``, ``mean``, ``low``, ``high`` and
    ``count``. Each point is one logged value, unless there are more than ``max_points``, or the
    history has only windows of old steps: then it is the mean of ``count`` values between ``low``
    and ``high``. Raises ``ProblemError`` for a name that matches nothing.
    """
    # Imported here: they load NumPy and what writes exports.
    from ltui.app.runs.export_runs import select_metrics
    from ltui.training.state.metric_name_patterns import THROUGHPUT, TOTAL_RANK
    from ltui.training.store.history_reader import RunStore

    run_dir = find_run(ltui_home(to_write=False), run)
    globs = texts("names", names, may_be_empty=True)
    check("rank", rank, int)
    check("max_points", max_points, int)
    chosen = select_metrics({run_dir.id: run_dir}, globs)[run_dir.id]
    with RunStore(run_dir) as store:
        return {
            name: store.curve(
                name,
                rank=TOTAL_RANK if name == THROUGHPUT else rank,
                max_points=max_points,
                max_rows=max_points,
            )
            for name in chosen
        }


class ComparisonResult(Struct, frozen=True, kw_only=True):
    """A comparison, and what was wrong with runs that are left out of it."""

    comparison: Comparison
    problems: tuple[Problem, ...] = ()


def compare(
    runs: Sequence[str],
    *,
    filter_text: str | None = None,
    metrics: Sequence[str] = (),
    axis: str = "step",
    band: str = "minmax",
    grouping: Grouping | None = None,
) -> ComparisonResult:
    """Compare the runs that are named or match a filter: metrics, speed, settings.

    ``sweep-*`` names all runs whose id matches. Raises ``ProblemError`` if there are fewer than two
    runs, or if none can be read.
    """
    # Imported here: they load NumPy.
    from ltui.app.compare.alignment import AXES, BAND_NAMES
    from ltui.app.compare.comparison import Comparison, Grouping
    from ltui.app.compare.read_run import read_runs

    for where, value, values in (("axis", axis, AXES), ("band", band, BAND_NAMES)):
        if value not in values:
            remedy = f"Choose from: {', '.join(values)}."
            raise ProblemError.of(where=f"{where} {value}", what="unknown.", remedy=remedy)
    names = texts("runs", runs, may_be_empty=True)
    check("filter_text", filter_text, str, type(None))
    globs = texts("metrics", metrics, may_be_empty=True)
    read = read_runs(compared_runs(names, filter_text), globs, recovered_snapshot)
    comparison = Comparison(
        runs=read.runs,
        metrics=read.metrics,
        axis=axis,
        band=band,
        grouping=grouping or Grouping(),
    )
    return ComparisonResult(comparison=comparison, problems=read.problems)


def diagnose(run: str, *, sample: bool = False) -> DiagnosisResult:
    """Return which rank stalls, where, why and what to do, or why a run has ended.

    Of a live run every rank is examined, which takes some seconds. ``sample``: the stacks of a slow
    and a normal rank are sampled before, for ten seconds; the run must be training.
    """
    # Imported here: a list of runs needs none of it.
    from ltui.app.diagnosis.request_diagnosis import request_diagnosis

    return request_diagnosis(find_run(ltui_home(), run), sample=sample)


def compared_runs(texts: Sequence[str], filter_text: str | None = None) -> list[RunDir]:
    """Return the runs that ``texts`` name, then those that match a filter, each once.

    ``sweep-*`` names all runs that match. Raise ``ProblemError`` with every name that is wrong, or
    if there are fewer than two runs.
    """
    home = ltui_home(to_write=False)
    runs = list_runs(home)
    found: dict[str, RunDir] = {}
    problems: list[Problem] = []
    for text in texts:
        try:
            matches = [run for run in runs if fnmatchcase(run.id, text)]
            matches.sort(key=lambda run: run.id)
            for run_dir in matches or [named_run(runs, text)]:
                found.setdefault(run_dir.id, run_dir)
        except ProblemError as error:
            problems += error.problems
    if problems:
        raise ProblemError(*problems)
    if filter_text is not None:
        with closing(RunList(home)) as run_list:
            entries = matching_runs(run_list, filter_text)
        for entry in sorted(entries, key=lambda entry: entry.id):
            found.setdefault(entry.id, entry.run_dir)
    if len(found) < 2:
        given = f"only one run is given: {next(iter(found))}" if found else "no run is given"
        raise ProblemError.of(
            where="RUN" if filter_text is None else "--filter",
            what=f"{given}.",
            remedy="Give two runs or more; `ltui runs` lists them.",
        )
    return list(found.values())
