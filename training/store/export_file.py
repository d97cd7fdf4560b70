"""Metrics of runs as one table, CSV, JSON or Parquet: one row per metric, step and rank.

A row of several steps also has ``first_step``, ``min``, ``max`` and ``count``. The table of several
runs begins with a column ``run``.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from msgspec import Struct, field
from msgspec.structs import astuple, replace

from ltui.training.json_codec import json_number
from ltui.training.store.export_rows import ExportRow, valid_text
from ltui.training.store.optional_library import load_library

COLUMNS = (
    "metric", "step", "epoch", "time", "rank", "value", "first_step", "min", "max", "count",
)  # fmt: skip
"""Names of the fields of ``ExportRow``, in their order."""

RunRows = Mapping[str, Iterable[ExportRow]]
"""Rows of each exported run by its id; they may be read only once."""

_PARQUET_TYPES = {
    "run": "string", "metric": "string", "step": "int64", "epoch": "int64", "time": "float64",
    "rank": "int64", "value": "float64", "first_step": "int64", "min": "float64", "max": "float64",
    "count": "int64",
}  # fmt: skip
_PARQUET_BATCH = 65_536
"""Number of rows that are held in memory and become one row group."""


class WindowedPart(Struct):
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


def write_csv(runs: RunRows, file: TextIO) -> None:
    """Write rows below a header; unknown fields are empty, and a logged NaN is ``NaN``."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(_columns(runs))
    writer.writerows(["NaN" if field != field else field for field in row] for row in _rows(runs))


def write_json(runs: RunRows, file: TextIO) -> None:
    """Write a list of objects without holding it in memory; NaN and infinities are texts."""
    columns = _columns(runs)
    separator = "["
    for row in _rows(runs):
        fields = (json_number(f) if isinstance(f, float) else f for f in row)
        file.write(separator + json.dumps(dict(zip(columns, fields, strict=True))))
        separator = ",\n "
    file.write("]\n" if separator != "[" else "[]\n")


def write_parquet(runs: RunRows, path: Path) -> None:
    """Write a Parquet file; NaN stays NaN. Raise ``ProblemError`` if pyarrow is missing."""
    arrow = load_library("pyarrow", "parquet", "--to parquet")
    parquet = load_library("pyarrow.parquet", "parquet", "--to parquet")
    columns = _columns(runs)
    schema = arrow.schema([(name, _PARQUET_TYPES[name]) for name in columns])
    with parquet.ParquetWriter(path, schema) as writer:
        rows = _rows(runs)
        while batch := list(itertools.islice(rows, _PARQUET_BATCH)):
            by_column = [
                arrow.array([valid_text(v) if isinstance(v, str) else v for v in values], kind)
                for values, kind in zip(zip(*batch, strict=True), schema.types, strict=True)
            ]
            writer.write_table(arrow.table(by_column, schema=schema))


def _columns(runs: RunRows) -> tuple[str, ...]:
    return ("run", *COLUMNS) if len(runs) > 1 else COLUMNS


def _rows(runs: RunRows) -> Iterator[tuple[Any, ...]]:
    """Yield the fields of each row; a value that was logged as NaN is NaN."""
    for run_id, rows in runs.items():
        prefix = (run_id,) if len(runs) > 1 else ()
        for row in rows:
            shown = row if row.value is not None else replace(row, value=math.nan)
            yield (*prefix, *astuple(shown))
