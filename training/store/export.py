"""A run's metrics as CSV or JSON: one row per metric, step and rank."""

from __future__ import annotations

import csv
import fnmatch
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

from ltui.training.problem import Problem, ProblemError
from ltui.training.run.snapshot import to_json
from ltui.training.store.reader import ExportRow, RunStore

COLUMNS = ("metric", "step", "epoch", "time", "rank", "value")


def chosen_metrics(store: RunStore, globs: Sequence[str]) -> list[str]:
    """Metrics that fit any of ``globs``; all without one. ``ProblemError`` where none fits."""
    names = store.metric_names()
    if not globs:
        return names
    chosen = [n for n in names if any(fnmatch.fnmatchcase(n, glob) for glob in globs)]
    if not chosen:
        known = ", ".join(names) or "none yet"
        raise ProblemError(Problem(where="--metric", what=f"no metric fits; the run has: {known}."))
    return chosen


def write_csv(rows: Iterable[ExportRow], file: TextIO) -> None:
    """Rows under a header; what is not known stays empty."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(_values(row) for row in rows)


def write_json(rows: Iterable[ExportRow], file: TextIO) -> None:
    """A list of objects, written as it is read."""
    file.write("[")
    for text in _joined(json.dumps(_object(row)) for row in rows):
        file.write(text)
    file.write("]\n")


def _joined(texts: Iterator[str]) -> Iterator[str]:
    for number, text in enumerate(texts):
        yield text if number == 0 else f",\n {text}"


def _values(row: ExportRow) -> tuple[Any, ...]:
    return (row.metric, row.step, row.epoch, row.time, row.rank, row.value)


def _object(row: ExportRow) -> dict[str, Any]:
    return {name: to_json(value) for name, value in zip(COLUMNS, _values(row), strict=True)}
