"""Write the record of a run's past snapshots, and thin what is old."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ltui.training.store.past.reader import documents_of, record_files
from ltui.training.store.past.snapshots import MAGIC, NO_CHANGE, SUFFIX, UNCHANGED, changes, frame

INTERVALS_S = (0.0, 15.0, 240.0)
"""Least seconds between two snapshots, by level of thinning."""
BUDGETS = (16 << 20, 10 << 20, 6 << 20)
"""Bytes on the disk by level of thinning, 32 MiB in all. What has more is thinned, then removed."""
FILE_BYTES = 1 << 20
"""Size from which on a new file is begun."""
WHOLE_EVERY = 60
"""Number of frames from one whole document to the next."""


class FrameFile:
    """One file of the record, which is written."""

    def __init__(self, folder: Path, at: float, level: int = 0) -> None:
        """Raises ``OSError``."""
        number = max(0, int(at * 1000))
        while True:
            self.path = folder / f"{number}-{level}{SUFFIX}"
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                handle = os.open(self.path, flags, 0o600)
                break
            except FileExistsError:
                number += 1
        self._file: BinaryIO = os.fdopen(handle, "wb", buffering=0)
        self.size = self._file.write(MAGIC)
        self._before: Any = None
        self._since_whole = 0

    def append(self, at: float, document: Any) -> None:
        """Write a document. Raises ``OSError``; then no more can be written to this file."""
        whole = self._before is None or self._since_whole >= WHOLE_EVERY
        change = document if whole else changes(self._before, document)
        if change is UNCHANGED:
            change = NO_CHANGE
        data = frame(at, change, whole=whole)
        if self._file.write(data) != len(data):
            raise OSError("the disk is full")
        self._before, self._since_whole = document, 1 if whole else self._since_whole + 1
        self.size += len(data)

    def close(self) -> None:
        self._file.close()


class PastWriter:
    """Appends to the record of a run, and thins what is old. Used by one thread."""

    def __init__(self, folder: Path, budgets: tuple[int, ...] = BUDGETS) -> None:
        self._folder, self._budgets = folder, budgets
        self._file: FrameFile | None = None
        self._thinners: dict[int, Thinner] = {}

    def append(self, at: float, document: Any) -> None:
        """Write a document. Raises ``OSError``; the next one then begins a new file."""
        try:
            if self._file is None:
                # Not with parents: a run directory that was removed must not come back.
                self._folder.mkdir(mode=0o700, exist_ok=True)
                self._file = FrameFile(self._folder, at)
            self._file.append(at, document)
        except OSError:
            self.close()
            raise
        if self._file.size >= FILE_BYTES:
            self._file.close()
            self._file = None
            self.make_room()

    def close(self) -> None:
        """End the present files."""
        if self._file is not None:
            self._file.close()
            self._file = None
        for thinner in self._thinners.values():
            thinner.close()

    def make_room(self) -> None:
        """Thin or remove the oldest files of each level that has more than its budget."""
        for level, budget in enumerate(self._budgets):
            files = [file for file in record_files(self._folder) if file.level == level]
            total = sum(file.size for file in files)
            while len(files) > 1 and total > budget:
                oldest = files.pop(0)
                total -= oldest.size
                if level + 1 < len(self._budgets):
                    thinner = self._thinners.setdefault(level + 1, Thinner(self._folder, level + 1))
                    thinner.add(documents_of(oldest.path))
                oldest.path.unlink(missing_ok=True)


class Thinner:
    """Writes some of the snapshots to files of a level: those that are far enough apart, and those
    before and after a change of attempt, state or verdicts."""

    def __init__(self, folder: Path, level: int) -> None:
        self._folder, self._level = folder, level
        self._file: FrameFile | None = None
        self._previous: tuple[float, Any] | None = None
        self._kept: tuple[float, Any] | None = None
        """Time and signature of the snapshot that was written last."""

    def add(self, documents: Iterable[tuple[float, Any]]) -> None:
        """Write some of the documents. Raises ``OSError``."""
        for at, document in sorted(documents, key=lambda pair: pair[0]):
            mark, previous, kept = signature(document["snapshot"]), self._previous, self._kept
            changed = kept is not None and kept[1] != mark
            if changed and previous is not None and kept is not None and previous[0] > kept[0]:
                self._keep(*previous)
            if changed or kept is None or not 0 <= at - kept[0] < INTERVALS_S[self._level]:
                self._keep(at, document)
            self._previous = at, document
        if self._file is not None and self._file.size >= FILE_BYTES:
            self.close()

    def close(self) -> None:
        """End the present file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _keep(self, at: float, document: Any) -> None:
        self._file = self._file or FrameFile(self._folder, at, self._level)
        self._file.append(at, document)
        self._kept = at, signature(document["snapshot"])


def signature(snapshot: Mapping[str, Any]) -> Any:
    """Return what marks an event when it changes: attempt, state and verdicts."""
    verdicts = [(v["kind"], list(v.get("culprits", ()))) for v in snapshot.get("verdicts", ())]
    return snapshot.get("attempt"), snapshot.get("state"), verdicts
