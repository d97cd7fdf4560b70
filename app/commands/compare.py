"""``ltui compare``: what differs between runs, and how their metrics compare."""

from __future__ import annotations

import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ltui.app.command_output import EXIT_DONE, EXIT_FAILED, print_json
from ltui.app.commands.dashboard import require_terminal
from ltui.app.compare.comparison import Comparison, Grouping, check_grouping
from ltui.app.compare.comparison_report import comparison_json, report_lines
from ltui.app.compare.read_run import read_runs
from ltui.app.open_dashboard import open_app
from ltui.app.runs.filter_runs import matching_runs
from ltui.app.runs.run_list import RunList
from ltui.training.lifecycle.run_status import current_snapshot
from ltui.training.problem import Problem, ProblemError
from ltui.training.store.find_run import named_run
from ltui.training.store.run_directory import RunDir, list_runs, ltui_home

if TYPE_CHECKING:
    from ltui.app.textual_app import LtuiApp


def compare(options: Namespace) -> int:
    """Run ``ltui compare RUN RUN...``."""
    if options.group_by and options.ignore:
        raise ProblemError.of(
            where="--ignore",
            what="it cannot be used with --group-by, which names the only settings that count.",
            remedy="Give one of the two.",
        )
    run_dirs = find_runs(options.runs, options.filter)
    grouping = Grouping(by=tuple(options.group_by), ignored=tuple(options.ignore))
    if options.watch:
        return _watch(options, run_dirs, grouping)
    read = read_runs(run_dirs, options.metric, current_snapshot)
    comparison = Comparison(
        runs=read.runs,
        metrics=read.metrics,
        axis=options.by,
        band=options.band,
        grouping=grouping,
    )
    if options.json:
        print_json(comparison_json(comparison))
    else:
        print("\n".join(report_lines(comparison, shutil.get_terminal_size().columns)))
    for problem in read.problems:
        sys.stderr.write(f"{problem}\n")
    return EXIT_FAILED if read.problems else EXIT_DONE


def _watch(options: Namespace, run_dirs: Sequence[RunDir], grouping: Grouping) -> int:
    """Open the comparison in the dashboard."""
    require_terminal("ltui compare --watch", "Without --watch the comparison is printed.")
    # A key or a metric that does not exist is an error before the dashboard opens.
    read = read_runs(run_dirs, options.metric, current_snapshot)
    check_grouping(grouping, [run.settings for run in read.runs])

    def make() -> LtuiApp:
        # Local: importing Textual takes half a second, which the errors above need not wait for.
        from ltui.app.compare.comparison_charts import ViewSettings
        from ltui.app.presentation.metric_charts import ChartSettings
        from ltui.app.screens.compare import CompareScreen
        from ltui.app.textual_app import LtuiApp

        settings = ViewSettings(
            chart=ChartSettings(axis=options.by),
            band=options.band,
            grouped=bool(options.group_by or options.ignore),
        )

        def first() -> CompareScreen:
            return CompareScreen(
                run_dirs, globs=options.metric, settings=settings, grouping=grouping
            )

        return LtuiApp(ltui_home(to_write=False), first=first)

    return open_app(make)


def find_runs(texts: Sequence[str], filter_text: str | None = None) -> list[RunDir]:
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
