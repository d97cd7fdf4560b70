"""A run's metrics as CSV or JSON: one row per metric, step and rank.

A row of several steps also has ``first_step``, ``min``, ``max`` and ``count``.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

from ltui.training.state.run_snapshot import to_json
from ltui.training.store.export_rows import ExportRow

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
            if (first := row.first_step) is not None:
                self.first_step = first if self.first_step is None else min(self.first_step, first)
                self.last_step = max(self.last_step, row.step)
                self.longest = max(self.longest, row.step - first + 1)
                self.metrics[row.metric] = None
            yield row

    def sentence(self) -> str | None:
        """Return a sentence on the steps that are stored as windows; None if there are none."""
        if self.first_step is None:
            return None
        return (
            f"Steps {self.first_step} to {self.last_step} of {', '.join(self.metrics)} are stored "
            f"as windows of up to {self.longest} steps: each of their rows holds a mean (value), "
            "with first_step, min, max and count. All other steps are complete."
        )


def write_csv(rows: Iterable[ExportRow], file: TextIO) -> None:
    """Write rows below a header; unknown values are empty."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(_values(row) for row in rows)


def write_json(rows: Iterable[ExportRow], file: TextIO) -> None:
    """Write a list of objects without holding it in memory."""
    separator = "["
    for row in rows:
        values = zip(COLUMNS, _values(row), strict=True)
        file.write(separator + json.dumps({name: to_json(value) for name, value in values}))
        separator = ",\n "
    file.write("]\n" if separator != "[" else "[]\n")


def _values(row: ExportRow) -> tuple[Any, ...]:
    place = (row.metric, row.step, row.epoch, row.time, row.rank, row.value)
    return (*place, row.first_step, row.low, row.high, row.count)
