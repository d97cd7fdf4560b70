"""A run's metrics as CSV or JSON: one row per metric, step and rank.

A row of several steps also has ``first_step``, ``min``, ``max`` and ``count``.
"""

from __future__ import annotations

import csv
import fnmatch
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from ltui.training.problem import Problem, ProblemError
from ltui.training.state.run_snapshot import to_json
from ltui.training.store.export_rows import ExportRow
from ltui.training.store.history_reader import RunStore

COLUMNS = (
    "metric", "step", "epoch", "time", "rank", "value", "first_step", "min", "max", "count",
)  # fmt: skip


@dataclass(slots=True)
class WindowedPart:
    """The part of an export that is stored only as windows, collected while rows are written."""

    first_step: int | None = None
    last_step: int = 0
    longest: int = 0
    """Number of steps of the longest window."""
    metrics: dict[str, None] = field(default_factory=dict)

    def watch(self, rows: Iterable[ExportRow]) -> Iterator[ExportRow]:
        """Yield the rows unchanged and record those that represent several steps."""
        for row in rows:
            if row.first_step is not None:
                self._note(row, row.first_step)
            yield row

    def _note(self, row: ExportRow, first_step: int) -> None:
        previous = self.first_step
        self.first_step = first_step if previous is None else min(previous, first_step)
        self.last_step = max(self.last_step, row.step)
        self.longest = max(self.longest, row.step - first_step + 1)
        self.metrics[row.metric] = None

    def sentence(self) -> str | None:
        """Return a sentence on the steps that are stored as windows; None if there are none."""
        if self.first_step is None:
            return None
        return (
            f"Steps {self.first_step} to {self.last_step} of {', '.join(self.metrics)} are stored "
            f"as windows of up to {self.longest} steps: each of their rows holds a mean (value), "
            "with first_step, min, max and count. All other steps are complete."
        )


def chosen_metrics(store: RunStore, globs: Sequence[str]) -> list[str]:
    """Return the metrics that match any of ``globs``, or all metrics without globs.

    Raise ``ProblemError`` if none matches.
    """
    names = store.metric_names()
    if not globs:
        return names
    chosen = [n for n in names if any(fnmatch.fnmatchcase(n, glob) for glob in globs)]
    if not chosen:
        available = ", ".join(names) or "none yet"
        raise ProblemError(
            Problem(where="--metric", what=f"no metric matches; the run has: {available}.")
        )
    return chosen


def write_csv(rows: Iterable[ExportRow], file: TextIO) -> None:
    """Write rows below a header; unknown values are empty."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(_values(row) for row in rows)


def write_json(rows: Iterable[ExportRow], file: TextIO) -> None:
    """Write a list of objects without holding it in memory."""
    file.write("[")
    for text in _joined(json.dumps(_object(row)) for row in rows):
        file.write(text)
    file.write("]\n")


def _joined(texts: Iterator[str]) -> Iterator[str]:
    for number, text in enumerate(texts):
        yield text if number == 0 else f",\n {text}"


def _values(row: ExportRow) -> tuple[Any, ...]:
    place = (row.metric, row.step, row.epoch, row.time, row.rank, row.value)
    return (*place, row.first_step, row.low, row.high, row.count)


def _object(row: ExportRow) -> dict[str, Any]:
    return {name: to_json(value) for name, value in zip(COLUMNS, _values(row), strict=True)}
