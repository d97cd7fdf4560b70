"""``ltui export`` and ``import``: write the metrics of runs, make runs of foreign ones."""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ltui.app.command_output import (
    EXIT_DONE,
    FOLDER_FORMAT,
    PRINTED_FORMATS,
    folder_errors,
    refuse_existing,
)
from ltui.app.runs.export_runs import export_runs, metrics_to_export
from ltui.training.problem import Problem, ProblemError
from ltui.training.state.run_snapshot import LIVE
from ltui.training.store.database_schema import NoHistoryError
from ltui.training.store.find_run import find_runs
from ltui.training.store.history_reader import RunStore
from ltui.training.store.run_directory import RunDir, ltui_home
from ltui.widgets.sanitise import clean_line, clean_name

FOLLOW_S = 5.0
"""Seconds between two looks for new values with ``--follow``."""


def export(options: Namespace) -> int:
    """Run ``ltui export RUN...``."""
    if options.to not in PRINTED_FORMATS and options.output in (None, "-"):
        raise ProblemError.of(
            where=f"--to {options.to}",
            what="this format cannot be printed.",
            remedy=f"Name a {'folder' if options.to == FOLDER_FORMAT else 'file'} with -o.",
        )
    refuse_existing(options.output, force=options.force)
    runs = {run.id: run for run in find_runs(ltui_home(to_write=False), options.runs)}
    if options.follow:
        return _follow(options, list(runs.values()))
    for sentence in export_runs(runs, options.to, options.output, options.metric):
        sys.stderr.write(f"{sentence}\n")
    return EXIT_DONE


def _follow(options: Namespace, runs: Sequence[RunDir]) -> int:
    """Append to the event files of one run until it ends, with the lowest priority."""
    if options.to != FOLDER_FORMAT or len(runs) != 1:
        raise ProblemError.of(
            where="--follow",
            what="only the event files of one run can follow it.",
            remedy="Use --to tensorboard, and a command for each run.",
        )
    # Imported here: an export of a run that has ended does not need them.
    from ltui.training.lifecycle.run_status import resolve_snapshot
    from ltui.training.store.export_files import FollowedEvents

    def select(store: RunStore) -> list[str]:
        return metrics_to_export(store, options.metric)

    os.nice(19)
    run_dir, folder = runs[0], Path(options.output)
    began = run_dir.read_spec().created_at
    live = True
    with folder_errors(folder):
        events = FollowedEvents(folder / run_dir.id, began, "--to tensorboard")
        while live:
            # The state is read first, so that the last pass has everything.
            live = resolve_snapshot(run_dir).state in LIVE
            with suppress(NoHistoryError):
                events.update(run_dir, select)
            if live:
                time.sleep(FOLLOW_S)
    return EXIT_DONE


def import_all(options: Namespace) -> int:
    """Run ``ltui import FOLDER...``. A folder that cannot be read does not keep back the others."""
    # Imported here, as in ``_import``: an export needs none of it.
    from ltui.training.lifecycle.import_run import find_foreign_runs

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
    from ltui.training.lifecycle.import_run import import_run, read_foreign_run

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
