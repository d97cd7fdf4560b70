"""Event files of TensorBoard that follow a run, also over several attempts and processes.

A file says itself what it holds: every attempt begins with an event that makes TensorBoard discard
the steps which the attempt repeats. So a process that begins later continues the files, and
nothing is lost or written twice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ltui.training.store.attempt_spans import Span, first_replaced_step, newest_trained
from ltui.training.store.event_file import EventFile, EventFolder, event_file_name
from ltui.training.store.export_rows import ExportRow
from ltui.training.store.history_reader import RunStore
from ltui.training.store.optional_library import load_library
from ltui.training.store.run_directory import RunDir

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
