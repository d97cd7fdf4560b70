"""``ltui import``: make runs of metrics that other tools have written."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from ltui.app.exit_codes import EXIT_DONE
from ltui.training.lifecycle.import_run import import_run
from ltui.training.problem import Problem, ProblemError
from ltui.training.store.foreign_metrics import find_foreign_runs, read_foreign_run
from ltui.training.store.run_directory import ltui_home
from ltui.widgets.sanitise import clean_line, clean_name


def import_all(options: Namespace) -> int:
    """Run ``ltui import FOLDER...``. A folder that cannot be read does not keep back the others."""
    home = ltui_home()
    problems: list[Problem] = []
    for path in options.folders:
        try:
            folders = find_foreign_runs(Path(path))
        except ProblemError as error:
            problems += error.problems
            continue
        for folder in folders:
            try:
                _import(folder, home, options.name)
            except ProblemError as error:
                problems += error.problems
    if problems:
        raise ProblemError(*problems)
    sys.stderr.write(
        "The steps are the logger's. Lightning's loggers count them from 0, ltui from 1.\n"
    )
    return EXIT_DONE


def _import(folder: Path, home: Path, name: str | None) -> None:
    run = read_foreign_run(folder)
    run_dir = import_run(run, home, name)
    count = sum(len(points) for points in run.points.values())
    values = f"{count} value{'' if count == 1 else 's'}"
    metrics = f"{len(run.points)} metric{'' if len(run.points) == 1 else 's'}"
    print(f"{run_dir.id}: {values} of {metrics}, imported from {clean_line(str(folder))}")
    for column, number in run.not_numbers.items():
        sys.stderr.write(
            f"{run_dir.id}: {number} values of {clean_name(column)} are not numbers and were "
            "left out.\n"
        )
