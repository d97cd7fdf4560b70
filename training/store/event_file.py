"""Event files of TensorBoard, written by the modules of the package ``tensorboard`` itself.

A value is stored as ``simple_value``, a 32-bit number, as PyTorch's and Lightning's writers do,
because most readers of event files know only these.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ltui.training.store.export_rows import ExportRow
from ltui.training.store.optional_library import load_library

_BUFFER_BYTES = 1 << 20
"""Bytes of one file that are collected before they are written."""


class EventFile:
    """An event file to which scalars are appended. It is open only while its buffer is written.

    So an export with a file for each of a thousand ranks needs no thousand open files.
    """

    def __init__(self, path: Path, began: float, where: str) -> None:
        """Begin a file whose first event has the unix time ``began``.

        Raise ``ProblemError`` with the place ``where`` if TensorBoard is not installed.
        """
        package = "tensorboard.compat.proto"
        self._event_proto = load_library(f"{package}.event_pb2", "tensorboard", where)
        self._summary_proto = load_library(f"{package}.summary_pb2", "tensorboard", where)
        records = load_library("tensorboard.summary.writer.record_writer", "tensorboard", where)
        self._path = path
        self._buffer = bytearray()
        self._records = records.RecordWriter(self)
        self._add_event(wall_time=began, file_version="brain.Event:2")

    def add(self, tag: str, step: int, time: float, value: float) -> None:
        """Append one scalar."""
        # Protocol buffers hold only text that UTF-8 can encode.
        name = tag.encode("utf-8", "replace").decode("utf-8")
        scalar = self._summary_proto.Summary.Value(tag=name, simple_value=value)
        summary = self._summary_proto.Summary(value=[scalar])
        self._add_event(wall_time=time, step=step, summary=summary)

    def _add_event(self, **fields: object) -> None:
        self._records.write(self._event_proto.Event(**fields).SerializeToString())
        if len(self._buffer) > _BUFFER_BYTES:
            self.flush()

    def write(self, data: bytes) -> None:
        """Take the bytes of one record from TensorBoard's ``RecordWriter``."""
        self._buffer += data

    def flush(self) -> None:
        """Append what was collected to the file. Raise ``OSError``."""
        if not self._buffer:
            return
        with self._path.open("ab") as file:
            file.write(self._buffer)
        self._buffer.clear()


def event_file_name(began: float) -> str:
    """Return the name of a run's event file; the same run always has the same name."""
    return f"events.out.tfevents.{int(began):010d}.ltui"


def rank_folder(folder: Path, rank: int) -> Path:
    """Return the folder of a rank, which TensorBoard shows as a run of its own; 0 is the run."""
    return folder if rank == 0 else folder / f"rank-{rank}"


class FollowedEvents:
    """Event files of the ranks of a run that goes on. They replace those of an earlier export."""

    def __init__(self, folder: Path, began: float) -> None:
        self._folder, self._began = folder, began
        self._files: dict[int, EventFile] = {}

    def append(self, rows: Iterable[ExportRow]) -> None:
        """Append rows, which can be read when this returns. Raise ``OSError``."""
        for row in rows:
            file = self._files.get(row.rank)
            if file is None:
                target = rank_folder(self._folder, row.rank)
                target.mkdir(parents=True, exist_ok=True)
                path = target / event_file_name(self._began)
                path.unlink(missing_ok=True)
                file = self._files[row.rank] = EventFile(path, self._began, "--to tensorboard")
            _add_row(file, row, self._began)
        for file in self._files.values():
            file.flush()


def export_events(rows: Iterable[ExportRow], folder: Path, began: float) -> None:
    """Write an event file for each rank below ``folder``; each replaces that of an earlier export.

    ``began`` is the unix time of the run's start, used where a row has no time. Raise ``OSError``,
    or ``ProblemError`` if TensorBoard is not installed.
    """
    files: dict[int, EventFile] = {}
    temporary_name = f".new.{event_file_name(began).replace('tfevents', 'incomplete')}"
    try:
        for row in rows:
            file = files.get(row.rank)
            if file is None:
                target = rank_folder(folder, row.rank)
                target.mkdir(parents=True, exist_ok=True)
                (target / temporary_name).unlink(missing_ok=True)
                file = EventFile(target / temporary_name, began, "--to tensorboard")
                files[row.rank] = file
            _add_row(file, row, began)
        for rank, file in files.items():
            file.flush()
            target = rank_folder(folder, rank)
            (target / temporary_name).replace(target / event_file_name(began))
    finally:
        for rank in files:
            (rank_folder(folder, rank) / temporary_name).unlink(missing_ok=True)


def _add_row(file: EventFile, row: ExportRow, began: float) -> None:
    time = began if row.time is None else row.time
    file.add(row.metric, row.step, time, float("nan") if row.value is None else row.value)
