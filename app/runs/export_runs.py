"""Write the metrics of runs as one table, or as TensorBoard event files."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO, cast

from msgspec.structs import replace

from ltui.app.command_output import FOLDER_FORMAT, PlainText, folder_errors, output, replaced_file
from ltui.training.problem import Problem, ProblemError
from ltui.training.state.metric_name_patterns import THROUGHPUT, TOTAL_RANK
from ltui.training.store.export_files import (
    WindowedPart,
    export_events,
    write_csv,
    write_json,
    write_parquet,
)
from ltui.training.store.history_queries import ExportRow
from ltui.training.store.history_reader import STEP_SERIES, RunStore
from ltui.training.store.run_directory import RunDir
from ltui.widgets.sanitise import clean_line


def export_runs(
    runs: Mapping[str, RunDir], form: str, target: str | None, globs: Sequence[str] = ()
) -> list[str]:
    """Write the metrics that match ``globs``, or all, and return sentences about rows that are
    means of several steps.

    ``target``: a file, or a folder for event files; None for standard output. Raises
    ``ProblemError`` if a run cannot be read, no run has one of the metrics, or the target cannot be
    written.
    """
    metrics = select_metrics(runs, globs)
    thinned = {run_id: WindowedPart() for run_id in runs}
    rows = {run_id: thinned[run_id].watch(_rows(runs[run_id], metrics[run_id])) for run_id in runs}
    if form == FOLDER_FORMAT:
        _export_events(runs, rows, Path(target or "."))
    elif form == "parquet":
        with replaced_file(target or "") as path:
            write_parquet(rows, path)
    else:
        with output(target) as stream:
            # A pipe gets the names of metrics as they are, a terminal nothing that it would obey.
            shown = cast("TextIO", PlainText(stream)) if stream.isatty() else stream
            (write_json if form == "json" else write_csv)(rows, shown)
    sentences = []
    for run_id, part in thinned.items():
        if (sentence := part.sentence()) is not None:
            place = f"{run_id}: " if len(runs) > 1 else ""
            sentences.append(f"{place}{clean_line(sentence, 1000)}")
    return sentences


def _export_events(
    runs: Mapping[str, RunDir], rows: dict[str, Iterator[ExportRow]], folder: Path
) -> None:
    for run_id, run_dir in runs.items():
        with folder_errors(folder):
            export_events(rows[run_id], folder / run_id, run_dir.read_spec().created_at)


def _rows(run_dir: RunDir, metrics: Sequence[str]) -> Iterator[ExportRow]:
    with RunStore(run_dir) as store:
        yield from store.export([name for name in metrics if name != THROUGHPUT])
        if THROUGHPUT in metrics:
            for row in store.export([THROUGHPUT], only_ranks=[TOTAL_RANK]):
                yield replace(row, rank=None)


def select_metrics(runs: Mapping[str, RunDir], globs: Sequence[str]) -> dict[str, list[str]]:
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
    return {run_id: _matching(names, globs) for run_id, names in available.items()}


def metrics_to_export(store: RunStore, globs: Sequence[str]) -> list[str]:
    """Return the metrics of a run that match one of ``globs``, or all that are exported."""
    names = _metrics(store, selected=bool(globs))
    # A followed history has the rows of ranks, and the throughput is a figure of the run.
    return _matching([name for name in names if name != THROUGHPUT], globs)


def _matching(names: Sequence[str], globs: Sequence[str]) -> list[str]:
    """Return the names that match one of ``globs``; all of them if there are none."""
    matches = [name for name in names if any(fnmatch.fnmatchcase(name, g) for g in globs)]
    return matches if globs else list(names)


def _metrics(store: RunStore, *, selected: bool) -> list[str]:
    names = store.exported_names()
    return list(dict.fromkeys([*names, *STEP_SERIES, THROUGHPUT])) if selected else names


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
