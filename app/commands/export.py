"""``ltui export``: write the metrics of runs as a table or as TensorBoard event files."""

from __future__ import annotations

import difflib
import fnmatch
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ltui.app.commands.output_file import output, replaced_file
from ltui.app.exit_codes import EXIT_DONE
from ltui.training.problem import Problem, ProblemError
from ltui.training.state.run_snapshot import LIVE
from ltui.training.store.database_schema import NoHistoryError
from ltui.training.store.event_file import export_events
from ltui.training.store.export_file import WindowedPart, write_csv, write_json, write_parquet
from ltui.training.store.export_rows import ExportRow
from ltui.training.store.history_reader import STEP_SERIES, RunStore
from ltui.training.store.run_directory import RunDir, find_runs, ltui_home
from ltui.widgets.sanitise import clean_line

FOLLOW_S = 5.0
"""Seconds between two looks for new values with ``--follow``."""


def export(options: Namespace) -> int:
    """Run ``ltui export RUN...``."""
    if options.to in ("tensorboard", "parquet") and options.output in (None, "-"):
        raise ProblemError.of(
            where=f"--to {options.to}",
            what="this format cannot be printed.",
            remedy=f"Name a {'folder' if options.to == 'tensorboard' else 'file'} with -o.",
        )
    runs = {run.id: run for run in find_runs(ltui_home(to_write=False), options.run)}
    if options.follow:
        return _follow(options, list(runs.values()))
    metrics = _select_metrics(runs, options.metric)
    thinned = {run_id: WindowedPart() for run_id in runs}
    rows = {run_id: thinned[run_id].watch(_rows(runs[run_id], metrics[run_id])) for run_id in runs}
    if options.to == "tensorboard":
        _export_events(runs, rows, Path(options.output))
    elif options.to == "parquet":
        with replaced_file(options.output) as path:
            write_parquet(rows, path)
    else:
        with output(options.output) as stream:
            (write_json if options.to == "json" else write_csv)(rows, stream)
    for run_id, part in thinned.items():
        if (sentence := part.sentence()) is not None:
            place = f"{run_id}: " if len(runs) > 1 else ""
            sys.stderr.write(f"{place}{clean_line(sentence, 1000)}\n")
    return EXIT_DONE


def _follow(options: Namespace, runs: Sequence[RunDir]) -> int:
    """Append to the event files of one run until it ends, with the lowest priority."""
    if options.to != "tensorboard" or len(runs) != 1:
        raise ProblemError.of(
            where="--follow",
            what="only the event files of one run can follow it.",
            remedy="Use --to tensorboard, and a command for each run.",
        )
    # Imported here: an export of a run that has ended does not need them.
    from ltui.training.lifecycle.run_status import resolve_snapshot
    from ltui.training.store.followed_events import FollowedEvents

    def select(store: RunStore) -> list[str]:
        return _selected(_metrics(store, selected=bool(options.metric)), options.metric)

    os.nice(19)
    run_dir, folder = runs[0], Path(options.output)
    began = run_dir.read_spec().created_at
    live = True
    with _folder_errors(folder):
        events = FollowedEvents(folder / run_dir.id, began, "--to tensorboard")
        while live:
            # The state is read first, so that the last pass has everything.
            live = resolve_snapshot(run_dir).state in LIVE
            with suppress(NoHistoryError):
                events.update(run_dir, select)
            if live:
                time.sleep(FOLLOW_S)
    return EXIT_DONE


@contextmanager
def _folder_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ProblemError.of(
            where=f"-o {folder}",
            what=f"the folder cannot be written ({error.strerror or error}).",
            remedy="Choose a directory that you can write to.",
        ) from error


def _export_events(
    runs: dict[str, RunDir], rows: dict[str, Iterator[ExportRow]], folder: Path
) -> None:
    for run_id, run_dir in runs.items():
        with _folder_errors(folder):
            export_events(rows[run_id], folder / run_id, run_dir.read_spec().created_at)


def _rows(run_dir: RunDir, metrics: Sequence[str]) -> Iterator[ExportRow]:
    with RunStore(run_dir) as store:
        yield from store.export(metrics)


def _select_metrics(runs: dict[str, RunDir], globs: Sequence[str]) -> dict[str, list[str]]:
    """Return the metrics to export of each run. Raise ``ProblemError`` if no run has a metric."""
    available: dict[str, list[str]] = {}
    problems: list[Problem] = []
    for run_id, run_dir in runs.items():
        try:
            with RunStore(run_dir) as store:
                available[run_id] = _metrics(store, selected=bool(globs))
        except ProblemError as error:
            problems += error.problems
    if not problems:
        names = list(dict.fromkeys(name for names in available.values() for name in names))
        problems = [_unknown_metric(g, names) for g in globs if not fnmatch.filter(names, g)]
    if problems:
        raise ProblemError(*problems)
    return {run_id: _selected(names, globs) for run_id, names in available.items()}


def _selected(names: Sequence[str], globs: Sequence[str]) -> list[str]:
    """Return the names that match one of ``globs``; all of them if there are none."""
    matches = [name for name in names if any(fnmatch.fnmatchcase(name, g) for g in globs)]
    return matches if globs else list(names)


def _metrics(store: RunStore, *, selected: bool) -> list[str]:
    names = store.exported_names()
    return list(dict.fromkeys([*names, *STEP_SERIES])) if selected else names


def _unknown_metric(glob: str, names: Sequence[str]) -> Problem:
    close_matches = difflib.get_close_matches(glob, names, n=1)
    logged = (
        f"Logged metrics: {', '.join(names)}." if names else "It has not logged any metric yet."
    )
    return Problem(
        where=f"--metric {glob}",
        what="the run has no such metric.",
        remedy=f"Did you mean `{close_matches[0]}`?" if close_matches else logged,
    )
