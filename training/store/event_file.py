"""Event files of TensorBoard, written by the modules of the package ``tensorboard`` itself.

A value is stored as ``simple_value``, a 32-bit number, as PyTorch's and Lightning's writers do,
because most readers of event files know only these.
"""

from __future__ import annotations

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
        name = valid_text(tag)
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

    def __init__(self, folder: Path, began: float, name: str | None = None) -> None:
        """``began`` is the unix time of the run's start, used where a row has no time.

        ``name`` is the name of the files if it is not ``event_file_name(began)``.
        """
        self._folder, self._began = folder, began
        self._name = name or event_file_name(began)
        self._files: dict[int, EventFile] = {}

    def append(self, rows: Iterable[ExportRow]) -> None:
        """Append rows, which can be read when this returns. Raise ``OSError``."""
        for row in rows:
            file = self._files.get(row.rank)
            if file is None:
                path = self._path(row.rank)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)
                file = self._files[row.rank] = EventFile(path, self._began, "--to tensorboard")
            _add_row(file, row, self._began)
        for file in self._files.values():
            file.flush()

    def paths(self) -> list[Path]:
        """Return the files that were begun."""
        return [self._path(rank) for rank in self._files]

    def _path(self, rank: int) -> Path:
        return rank_folder(self._folder, rank) / self._name


def export_events(rows: Iterable[ExportRow], folder: Path, began: float) -> None:
    """Write an event file for each rank below ``folder``; each replaces that of an earlier export.

    ``began`` is the unix time of the run's start, used where a row has no time. Raise ``OSError``,
    or ``ProblemError`` if TensorBoard is not installed.
    """
    name = event_file_name(began)
    events = FollowedEvents(folder, began, f".new.{name.replace('tfevents', 'incomplete')}")
    try:
        events.append(rows)
        for path in events.paths():
            path.replace(path.with_name(name))
    finally:
        for path in events.paths():
            path.unlink(missing_ok=True)


def _add_row(file: EventFile, row: ExportRow, began: float) -> None:
    time = began if row.time is None else row.time
    file.add(row.metric, row.step, time, float("nan") if row.value is None else row.value)
