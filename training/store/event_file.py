"""Event files of TensorBoard, written by the modules of the package ``tensorboard`` itself.

A value is stored as ``simple_value``, a 32-bit number, as PyTorch's and Lightning's writers do,
because most readers of event files know only these.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

from ltui.training.store.export_rows import ExportRow, valid_text
from ltui.training.store.optional_library import load_library

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
