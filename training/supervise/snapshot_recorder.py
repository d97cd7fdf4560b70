"""Record the published snapshots, so that a screen can show any moment of the past.

The loop of the supervisor only chooses snapshots; a thread encodes and writes them. If it is too
slow, or the disk is full, snapshots are missing from the record, and nothing waits.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping

import msgspec

from ltui.training.json_codec import WRONG_CONTENT
from ltui.training.state.run_snapshot import RunSnapshot
from ltui.training.store.past.snapshots import document_of, past_folder
from ltui.training.store.past.writer import PastWriter
from ltui.training.store.run_directory import RunDir

PERIOD_S = 0.9
"""Seconds between two recorded snapshots: every fourth tick, also one that comes early."""
FINE_S = 10.0
"""Seconds before and after an event in which every snapshot is recorded."""
_MOST_SKIPPED = 40
_MOST_WAITING = 64
_MOST_LOGS = 1024
_RANKS = 256
"""Number of ranks from which on snapshots are larger, and recorded less often."""
RETRY_S = 5.0
"""Seconds without writing after the disk was full."""
CLOSE_S = 5.0

_Item = tuple[RunSnapshot, bool]
"""A snapshot, and whether it is older than the one before."""


class SnapshotRecorder:
    """Records the snapshots of one attempt."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._writer = PastWriter(past_folder(run_dir))
        self._skipped: deque[RunSnapshot] = deque(maxlen=_MOST_SKIPPED)
        self._signature: object = None
        self._recorded_at = self._fine_until = 0.0
        self._waiting: queue.Queue[_Item | None] = queue.Queue(_MOST_WAITING)
        self._sizes: Mapping[str, int] = {}
        self._closing = False
        self._retry_at = 0.0
        self._thread = threading.Thread(target=self._run, name="past snapshots", daemon=True)
        self._thread.start()

    def add(self, snapshot: RunSnapshot) -> None:
        """Record a snapshot if it is due. Never waits."""
        at = snapshot.taken_at or 0.0
        verdicts = tuple((v.kind, v.culprits) for v in snapshot.verdicts)
        signature = (snapshot.attempt, snapshot.state, verdicts)
        happened = signature != self._signature
        if happened:
            self._signature, self._fine_until = signature, at + FINE_S
            for before in self._skipped:
                if 0 <= at - (before.taken_at or 0.0) <= FINE_S:
                    self._put(before, late=True)
            self._skipped.clear()
        period_s = PERIOD_S * max(1.0, len(snapshot.ranks) / _RANKS)
        # A clock that was set back counts as due.
        if happened or at <= self._fine_until or not 0 <= at - self._recorded_at < period_s:
            self._recorded_at = at
            self._put(snapshot, late=False)
        else:
            self._skipped.append(snapshot)

    def close(self) -> None:
        """Record the last snapshot, and write what waits, for some seconds at most."""
        if self._skipped and (self._skipped[-1].taken_at or 0.0) > self._recorded_at:
            self._put(self._skipped[-1], late=False)
        self._closing = True
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(CLOSE_S)

    def _put(self, snapshot: RunSnapshot, *, late: bool) -> None:
        # A slow disk leaves a gap.
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait((snapshot, late))

    def _run(self) -> None:
        while not (self._closing and self._waiting.empty()):
            item = self._waiting.get()
            if item is not None and time.monotonic() >= self._retry_at:
                self._write(*item)
        self._writer.close()

    def _write(self, snapshot: RunSnapshot, late: bool) -> None:
        try:
            if not late:
                self._sizes = _log_sizes(self._run_dir, snapshot.attempt)
            self._writer.append(snapshot.taken_at or 0.0, document_of(snapshot, self._sizes))
        except OSError:
            self._retry_at = time.monotonic() + RETRY_S
        except (*WRONG_CONTENT, msgspec.MsgspecError) as error:
            # A value that the format does not have: the run must not notice.
            print(f"a snapshot cannot be recorded: {error}", file=sys.stderr)
            self._retry_at = time.monotonic() + 60.0


def _log_sizes(run_dir: RunDir, attempt: int) -> dict[str, int]:
    """Return the bytes of each log of an attempt by file name."""
    try:
        with os.scandir(run_dir.logs_dir(attempt)) as entries:
            logs = [entry for entry in entries if entry.name.endswith(".log")][:_MOST_LOGS]
            return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in logs}
    except OSError:
        return {}
