"""Copies of the step consensus table between machines (``rank/coordination/step_consensus.py``).

Each machine has a table of its own with the rows of all ranks. Its ranks write their rows; the rows
of other machines, and rank 0's request, are copied into it. The copies come late, which may delay a
decision but never makes two ranks act at different places, because of three rules:

- Every word of a row only grows, and a copy never makes it smaller. So a copy that is late,
  repeated or out of order changes nothing.
- A rank stores first that it acted and then that it passed the boundary. So a copy reads a rank's
  state before its acted word and stores them the other way round: a machine that sees a rank past a
  boundary also sees that it acted there.
- The request is read before all rows and stored after all of them. So no rank sees a request
  together with rows that are older than it, in which rank 0 may still wait at the boundary where it
  acted on the previous request.

``tests/rank/test_delayed_views.py`` simulates them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import threading
from pathlib import Path
from struct import Struct
from typing import NamedTuple

_NAME = re.compile(r"agree-(\d+)-(\d+)\.bin")
_ROW_WORDS = 8
_STATE, _ACTED, _RESULT, _PID = 0, 1, 2, 3
_REQUEST, _CONTROL_ID, _STOP_AT, _STOP_EPOCHS = 0, 1, 2, 3
_HEAD = Struct("<iiiqqqq")
"""Restarts and world size of the table, 1 if the request follows, then the request's four words."""
_ROW = Struct("<iqqq")
"""Rank, state, acted, save result."""


class RequestWords(NamedTuple):
    """The words that rank 0 writes for all ranks."""

    request: int
    control_id: int
    stop_at: int
    stop_epochs: int


class _Table:
    """One table file, mapped."""

    def __init__(self, path: Path, restarts: int, world_size: int) -> None:
        self.restarts, self.world_size = restarts, world_size
        size = 8 * _ROW_WORDS * (1 + world_size)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_size < size:
                os.ftruncate(descriptor, size)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self.words = memoryview(self._map).cast("q")

    def column(self, offset: int) -> list[int]:
        """Return one word of every row."""
        return self.words[_ROW_WORDS + offset :: _ROW_WORDS].tolist()

    def request(self) -> RequestWords:
        """Return the words of rank 0."""
        return RequestWords(*self.words[:4].tolist())

    def close(self) -> None:
        self.words.release()
        self._map.close()


class BarrierMirror:
    """The table of one machine, as a source and a target of copies. Safe to use from threads.

    A row belongs to this machine if one of its ranks has stored its pid there.
    """

    def __init__(self, queue_dir: Path) -> None:
        """``queue_dir`` is the folder of the attempt's queues, in which the ranks have the table.

        The table need not exist yet.
        """
        self._dir = queue_dir
        self._table: _Table | None = None
        self._changed_ns = -1
        self._lock = threading.Lock()

    def request(self) -> RequestWords | None:
        """Return the current words of rank 0; None if there is no table."""
        with self._lock:
            table = self._newest()
            return None if table is None else table.request()

    def is_open(self) -> bool:
        """Return True if ranks may be waiting for copies, so that these should be fast.

        This is the case while a rank has not acted on the request or not saved what others saved,
        and while a rank waits at a planned stop.
        """
        with self._lock:
            table = self._newest()
            return table is not None and _is_open(table)

    def export(self) -> bytes:
        """Return a copy of the rows of this machine; on the machine of rank 0, of all rows.

        Empty if there is no table.
        """
        with self._lock:
            table = self._newest()
            if table is None:
                return b""
            request = table.request()
            states = table.column(_STATE)
            rows = zip(states, table.column(_ACTED), table.column(_RESULT), strict=True)
            pids = table.column(_PID)
            leads = bool(pids[0])
            head = _HEAD.pack(table.restarts, table.world_size, leads, *request)
            return head + b"".join(
                _ROW.pack(rank, *row)
                for rank, row in enumerate(rows)
                if pids[rank] or (leads and any(row))
            )

    def merge(self, copied: bytes) -> None:
        """Store a copy that ``export`` returned on another machine.

        Raises ``ValueError`` if it is damaged, and ``OSError``.
        """
        if not copied:
            return
        if len(copied) < _HEAD.size or (len(copied) - _HEAD.size) % _ROW.size:
            raise ValueError("a copy of the table of boundaries is truncated")
        restarts, world_size, leads, *request = _HEAD.unpack_from(copied)
        if not 0 < world_size <= 1 << 20 or restarts < 0:
            raise ValueError("a copy of the table of boundaries is damaged")
        with self._lock:
            table = self._newest()
            if table is None or (table.restarts, table.world_size) < (restarts, world_size):
                table = self._open(restarts, world_size)
            if (table.restarts, table.world_size) != (restarts, world_size):
                return  # of workers that were restarted meanwhile
            words = table.words
            for rank, state, acted, result in _ROW.iter_unpack(copied[_HEAD.size :]):
                at = _ROW_WORDS * (1 + rank)
                if not 0 <= rank < world_size or words[at + _PID]:
                    continue
                words[at + _RESULT] = max(words[at + _RESULT], result)
                words[at + _ACTED] = max(words[at + _ACTED], acted)
                words[at + _STATE] = max(words[at + _STATE], state)
            if leads and not words[_ROW_WORDS + _PID]:
                words[_STOP_AT], words[_STOP_EPOCHS] = request[_STOP_AT], request[_STOP_EPOCHS]
                if request[_REQUEST] > words[_REQUEST]:
                    words[_CONTROL_ID] = request[_CONTROL_ID]
                    words[_REQUEST] = request[_REQUEST]

    def close(self) -> None:
        """Unmap the table. A second call has no effect."""
        with self._lock:
            if self._table is not None:
                self._table.close()
                self._table = None

    def _newest(self) -> _Table | None:
        """Return the table of the workers that were started last."""
        with contextlib.suppress(OSError):
            changed_ns = self._dir.stat().st_mtime_ns
            if changed_ns != self._changed_ns:
                names = [_NAME.fullmatch(name) for name in os.listdir(self._dir)]
                found = [(int(name[1]), int(name[2])) for name in names if name is not None]
                self._changed_ns = changed_ns
                if found:
                    return self._open(*max(found))
        return self._table

    def _open(self, restarts: int, world_size: int) -> _Table:
        table = self._table
        if table is not None and (table.restarts, table.world_size) == (restarts, world_size):
            return table
        path = self._dir / f"agree-{restarts}-{world_size}.bin"
        opened = _Table(path, restarts, world_size)
        if table is not None:
            table.close()
        self._table = opened
        return opened


def _is_open(table: _Table) -> bool:
    request = table.request()
    acted = table.column(_ACTED)
    saves = [result >> 1 for result in table.column(_RESULT)]
    if request.request >> 4 > min(acted) or max(saves) != min(saves):
        return True
    planned = request.stop_at > 0 or request.stop_epochs > 0
    return planned and any(state > 0 and state % 2 == 0 for state in table.column(_STATE))
