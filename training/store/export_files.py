"""Files of metrics for other programs: CSV, JSON, Parquet, and event files of TensorBoard.

A table has one row per metric, step and rank. A row of several steps also has ``first_step``,
``min``, ``max`` and ``count``. The table of several runs begins with a column ``run``.

Event files are written by the modules of the package ``tensorboard`` itself. A value is stored as
``simple_value``, a 32-bit number, as PyTorch's and Lightning's writers do, because most readers of
event files know only these. Event files can also follow a run, over several attempts and processes.
A file says itself what it holds: every attempt begins with an event that makes TensorBoard discard
the steps which the attempt repeats. So a process that begins later continues the files, and nothing
is lost or written twice.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from msgspec import Struct, field
from msgspec.structs import astuple, replace

from ltui.training.json_codec import json_number
from ltui.training.process.python_environment import load_library
from ltui.training.store.history_queries import (
    ExportRow,
    Span,
    first_replaced_step,
    newest_trained,
    valid_text,
)
from ltui.training.store.history_reader import RunStore
from ltui.training.store.run_directory import RunDir

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


_BUFFER_BYTES = 1 << 20
"""Bytes of one file that are collected before they are written."""


class EventFile:
    """An event file to which scalars are appended. It is open only while its buffer is written.

    So an export with a file for each of a thousand ranks needs no thousand open files.
    """

    def __init__(self, path: Path, began: float, where: str, *, exists: bool = False) -> None:
        """Begin a file whose first event has the unix time ``began``, or continue one that exists.

        Raise ``ProblemError`` with the place ``where`` if TensorBoard is not installed.
        """
        package = "tensorboard.compat.proto"
        self._event_proto = load_library(f"{package}.event_pb2", "tensorboard", where)
        self._summary_proto = load_library(f"{package}.summary_pb2", "tensorboard", where)
        records = load_library("tensorboard.summary.writer.record_writer", "tensorboard", where)
        self._path = path
        self._buffer = bytearray()
        self._records = records.RecordWriter(self)
        if not exists:
            self._add_event(wall_time=began, file_version="brain.Event:2")

    def add(self, tag: str, step: int, time: float, value: float) -> None:
        """Append one scalar."""
        name = valid_text(tag)
        scalar = self._summary_proto.Summary.Value(tag=name, simple_value=value)
        summary = self._summary_proto.Summary(value=[scalar])
        self._add_event(wall_time=time, step=step, summary=summary)

    def begin_attempt(self, attempt: int, first_step: int, time: float) -> None:
        """Append an event that makes TensorBoard discard all values from ``first_step`` on."""
        session = self._event_proto.SessionLog
        start = session(status=session.START, msg=f"attempt {attempt}")
        self._add_event(wall_time=time, step=first_step, session_log=start)

    def _add_event(self, **fields: object) -> None:
        self._records.write(self._event_proto.Event(**fields).SerializeToString())
        if len(self._buffer) > _BUFFER_BYTES:
            self.flush()

    def write(self, data: bytes) -> None:
        """Take the bytes of one record from TensorBoard's ``RecordWriter``."""
        self._buffer += data

    def flush(self) -> None:
        """Append what was collected to the file, completely or not at all. Raise ``OSError``."""
        if not self._buffer:
            return
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, 0o666)
        size = os.fstat(descriptor).st_size
        try:
            with memoryview(self._buffer) as rest:
                written = 0
                while written < len(rest):
                    written += os.write(descriptor, rest[written:])
        except OSError:
            # Otherwise a reader would wait for the rest of the last record.
            os.ftruncate(descriptor, size)
            raise
        finally:
            os.close(descriptor)
        self._buffer.clear()


def event_file_name(began: float) -> str:
    """Return the name of a run's event file; the same run always has the same name."""
    return f"events.out.tfevents.{int(began):010d}.ltui"


def rank_folder(folder: Path, rank: int) -> Path:
    """Return the folder of a rank, which TensorBoard shows as a run of its own; 0 is the run."""
    return folder if rank == 0 else folder / f"rank-{rank}"


class EventFolder:
    """Event files of the ranks of a run."""

    def __init__(self, folder: Path, name: str, began: float, where: str) -> None:
        """``name`` is the name of the files; ``where`` is the option or setting that needs them.

        ``began`` is the unix time of the run's start, used where a row has no time.
        """
        self.folder, self.name, self.began, self.where = folder, name, began, where
        self.files: dict[int, EventFile] = {}

    def append(self, rows: Iterable[ExportRow]) -> None:
        """Append rows, which can be read when this returns. Raise ``OSError``."""
        for row in rows:
            file = self.files.get(row.rank or 0) or self.begin_file(row.rank or 0)
            time = self.began if row.time is None else row.time
            file.add(row.metric, row.step, time, math.nan if row.value is None else row.value)
        for file in self.files.values():
            file.flush()

    def begin_file(self, rank: int) -> EventFile:
        """Return a new file for a rank, which replaces one of that name."""
        path = self.path(rank)
        # Nothing is made on disk before it is known that TensorBoard is installed.
        file = EventFile(path, self.began, self.where)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self.files[rank] = file
        return file

    def path(self, rank: int) -> Path:
        """Return the file of a rank."""
        return rank_folder(self.folder, rank) / self.name


def export_events(rows: Iterable[ExportRow], folder: Path, began: float) -> None:
    """Write an event file for each rank below ``folder``; each replaces that of an earlier export.

    ``began`` is the unix time of the run's start, used where a row has no time. Raise ``OSError``,
    or ``ProblemError`` if TensorBoard is not installed.
    """
    name = event_file_name(began)
    temporary = f".new.{name.replace('tfevents', 'incomplete')}"
    events = EventFolder(folder, temporary, began, "--to tensorboard")
    try:
        events.append(rows)
        for path in map(events.path, events.files):
            path.replace(path.with_name(name))
    finally:
        for path in map(events.path, events.files):
            path.unlink(missing_ok=True)


_FRAME_BYTES = 16
"""Bytes of a record beside its data: the length and two checksums."""


class FollowedEvents(EventFolder):
    """Event files to which the new values of a run are appended again and again.

    An object that has raised an error must not be used again. A new one continues the files.
    """

    def __init__(self, folder: Path, began: float, where: str) -> None:
        """Continue the files in ``folder``, or begin them with the first values.

        Raise ``OSError``, or ``ProblemError`` if TensorBoard is not installed.
        """
        super().__init__(folder, event_file_name(began), began, where)
        self._attempt = 1
        """The newest attempt of the history."""
        self._attempts: dict[int, int] = {}
        """The attempt that the file of each rank has reached."""
        self._newest: dict[tuple[str, int], int] = {}
        """The last step in the files of each metric and rank."""
        for path in (folder / self.name, *folder.glob(f"rank-*/{self.name}")):
            name = re.fullmatch(r"rank-(\d+)", path.parent.name)
            if path.exists():
                self._continue_file(path, int(name[1]) if name and path.parent != folder else 0)

    def _continue_file(self, path: Path, rank: int) -> None:
        """Read what a file holds, and cut off a record that is not complete."""
        loader = load_library(
            "tensorboard.backend.event_processing.event_file_loader", "tensorboard", self.where
        )
        event_proto = load_library("tensorboard.compat.proto.event_pb2", "tensorboard", self.where)
        attempt, size = 0, 0
        for record in loader.RawEventFileLoader(str(path)).Load():
            size += len(record) + _FRAME_BYTES
            event = event_proto.Event.FromString(record)
            if event.HasField("session_log"):
                attempt = int(event.session_log.msg.rpartition(" ")[2])
                self._discard(rank, event.step)
            for value in event.summary.value:
                self._newest[value.tag, rank] = event.step
        if attempt == 0:
            # A complete export has written it.
            self._discard(rank, 0)
            return
        os.truncate(path, size)
        self._attempts[rank] = attempt
        self.files[rank] = EventFile(path, self.began, self.where, exists=True)

    def update(
        self, run_dir: RunDir, select: Callable[[RunStore], Sequence[str]] = RunStore.exported_names
    ) -> None:
        """Append what is new in the history of the series that ``select`` names.

        Raise ``OSError`` or ``ProblemError``.
        """
        with RunStore(run_dir) as store:
            spans = store.spans()
            self._attempt = newest_trained(spans)
            for rank in self.files:
                self._reach_attempt(rank, spans)
            self.append(map(self._noted, store.export_new(select(store), self._newest)))

    def _reach_attempt(self, rank: int, spans: Sequence[Span]) -> None:
        """Begin the newest attempt in the file of a rank unless that was done."""
        before = self._attempts[rank]
        if before < self._attempt:
            first_step = first_replaced_step(spans, before)
            self.files[rank].begin_attempt(self._attempt, first_step, self.began)
            self._attempts[rank] = self._attempt
            self._discard(rank, first_step)

    def begin_file(self, rank: int) -> EventFile:
        file = super().begin_file(rank)
        file.begin_attempt(self._attempt, 0, self.began)
        self._attempts[rank] = self._attempt
        return file

    def _noted(self, row: ExportRow) -> ExportRow:
        self._newest[row.metric, row.rank or 0] = row.step
        return row

    def _discard(self, rank: int, first_step: int) -> None:
        """Forget the steps of a rank from ``first_step`` on."""
        for key, step in self._newest.items():
            if key[1] == rank and step >= first_step:
                self._newest[key] = first_step - 1
