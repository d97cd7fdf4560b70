"""Poll the queue files of one attempt for records, pulses, and the ranks that are alive."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from msgspec import Struct, field

from ltui.training.process.identity import ProcessIdentity, is_alive, is_stopped
from ltui.training.shared.record_types import Outcome, PulseState
from ltui.training.store.history_writer import Cursor, StoreWriter
from ltui.training.store.run_directory import RunDir, write_atomically
from ltui.training.tensor_queue.queue_file import QueueFileError
from ltui.training.tensor_queue.queue_reader import Poll, QueueReader, Record

FILES_FOR_OTHERS = 512
"""Open files of a process besides the queues of ranks."""
_FILES_A_RANK = 3
"""A mirror, its reader, and a reader for records that are read again."""


def allow_queues_of(ranks: int) -> None:
    """Raise the soft limit of open files if the queues of so many ranks need more.

    The hard limit of the system stays. Beyond it, opening a queue fails with an error.
    """
    needed = _FILES_A_RANK * ranks + FILES_FOR_OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


_QUEUE_NAME = re.compile(r"rank-(\d+)\.queue")
_POLL_RECORDS = 2000
"""Maximum number of records that one read of a queue returns."""
DIR_SETTLED_NS = 1_000_000_000
"""Age in ns from which the time of the folder's last change is compared."""
_POLLS_A_TICK = 4
"""Maximum number of reads of one queue in one poll.

A long backlog is read over several ticks, so that one rank does not delay the others.
"""


class QueuePoll(Struct, frozen=True):
    """The result of polling every rank's queue once."""

    polls: Mapping[int, Poll] = field(default_factory=dict)
    pulses: Mapping[int, PulseState | None] = field(default_factory=dict)
    dead_ranks: frozenset[int] = frozenset()
    """Ranks of this machine whose process has exited although their pulse says that they are
    running."""
    stopped_pids: Mapping[int, int] = field(default_factory=dict)
    """rank -> pid of the processes of this machine that are stopped (by SIGSTOP or a debugger)."""
    more_waiting: bool = False
    """True if the queues hold more records than one poll reads."""


class _Tail(Struct):
    """The current queue file of one rank. ``base`` is added to its sequence numbers."""

    reader: QueueReader
    base: int
    inode: int


class QueuePoller:
    """Readers of the queues of all ranks of one attempt.

    A rank that torch elastic restarts creates a new file with the same name. The sequence numbers
    of its records continue those of the previous file.
    """

    def __init__(self, queue_dir: Path, stored_cursors: Mapping[int, Cursor]) -> None:
        """``stored_cursors``: the cursors that a previous supervisor of the attempt stored."""
        self._dir = queue_dir
        self._stored_cursors = stored_cursors
        self._tails: dict[int, _Tail] = {}
        self._dir_changed_ns = -1
        self.errors: dict[int, str] = {}
        """rank -> reason, for queues that cannot be read."""

    def poll(self) -> QueuePoll:
        """Poll every queue once, and open the queues of new ranks."""
        folder_changed = self._discover()
        polls: dict[int, Poll] = {}
        pulses: dict[int, PulseState | None] = {}
        behind = False
        for rank, tail in self._tails.items():
            try:
                replaced = folder_changed and tail.reader.replaced()
                polls[rank], more = _drain(tail)
                pulses[rank] = tail.reader.pulse()
                if replaced and more:
                    self._dir_changed_ns = -1  # The new file is opened by a later poll.
                elif replaced:
                    self._reopen(rank, tail)
                behind = behind or more or replaced
            except (OSError, QueueFileError) as error:
                self._dir_changed_ns = -1
                self.errors[rank] = str(error)
                pulses.setdefault(rank, None)
        gone = frozenset(r for r, p in pulses.items() if p is not None and is_dead(p))
        held = {
            rank: process.pid
            for rank, process in local_processes(pulses).items()
            if is_stopped(process.pid)
        }
        return QueuePoll(polls, pulses, gone, held, behind)

    def cursor(self, rank: int, next_seq: int) -> Cursor:
        """Return the cursor to store, so that a later poller continues at ``next_seq``."""
        tail = self._tails[rank]
        return Cursor(next_seq, tail.base, tail.inode)

    def open_reader(self, rank: int, from_seq: int) -> tuple[QueueReader, int]:
        """Return another reader of the current file, at ``from_seq``, and the base of the file."""
        tail = self._tails[rank]
        return QueueReader(tail.reader.path, from_seq=max(0, from_seq - tail.base)), tail.base

    def close(self) -> None:
        for tail in self._tails.values():
            tail.reader.close()
        self._tails.clear()

    def _reopen(self, rank: int, tail: _Tail) -> None:
        reader = QueueReader(tail.reader.path)
        base = tail.base + tail.reader.next_seq
        tail.reader.close()
        self._tails[rank] = _Tail(reader, base, _inode(reader.path))

    def _open(self, rank: int, path: Path) -> _Tail:
        reader, inode = QueueReader(path), _inode(path)
        cursor = self._stored_cursors.get(rank)
        if cursor is None:
            return _Tail(reader, 0, inode)
        return _Tail(reader, cursor.base if cursor.inode == inode else cursor.next_seq, inode)

    def _discover(self) -> bool:
        """Open the queues of new ranks. Return False if no file can have been replaced."""
        try:
            changed_ns = os.stat(self._dir).st_mtime_ns
        except OSError:
            return True
        if changed_ns == self._dir_changed_ns:
            return False
        failed = False
        files = queue_files(self._dir)
        allow_queues_of(len(files))
        for rank, path in files.items():
            if rank in self._tails:
                continue
            try:
                self._tails[rank] = self._open(rank, path)
                self.errors.pop(rank, None)
            except (OSError, QueueFileError) as error:
                self.errors[rank] = str(error)
                failed = True
        self._tails = dict(sorted(self._tails.items()))
        # A file that is still being created is opened by a later poll. Another change within the
        # same tick of the clock would not change the time of the folder.
        settled = time.time_ns() - changed_ns > DIR_SETTLED_NS
        self._dir_changed_ns = changed_ns if settled and not failed else -1
        return True


def _inode(path: Path) -> int:
    return path.stat().st_ino


def _drain(tail: _Tail) -> tuple[Poll, bool]:
    """Read new records up to a limit. Return them, and True if there are more."""
    records: list[Record] = []
    missed = 0
    for _ in range(_POLLS_A_TICK):
        poll = tail.reader.poll(_POLL_RECORDS)
        records += poll.records
        missed += poll.missed
        if len(poll.records) < _POLL_RECORDS:
            return _with_base(records, missed, tail.base), False
    return _with_base(records, missed, tail.base), True


def _with_base(records: list[Record], missed: int, base: int) -> Poll:
    if base:
        records = [replace(record, seq=record.seq + base) for record in records]
    return Poll(tuple(records), missed)


def queue_files(queue_dir: Path) -> dict[int, Path]:
    """Return the queue file of each rank, ordered by rank."""
    try:
        names = os.listdir(queue_dir)
    except OSError:
        return {}
    files = {
        int(match[1]): queue_dir / name for name in names if (match := _QUEUE_NAME.fullmatch(name))
    }
    return dict(sorted(files.items()))


def remove_stored_queues(run_dir: RunDir, store: StoreWriter) -> None:
    """Remove the queue files of ended attempts of which the history has every record.

    An attempt has ended when its end is in the history too. Until then the pulses in its queues are
    the only trace of how the ranks ended. Afterwards ``end.json`` is, if the history is damaged.
    """
    document = store.snapshot_document()
    if document is not None:
        try:
            write_atomically(run_dir.end_path, document.encode())
        except OSError:
            return
    for attempt in store.ended_attempts():
        cursors = store.cursors(attempt)
        for rank, path in queue_files(run_dir.queue_dir(attempt)).items():
            with contextlib.suppress(OSError, QueueFileError):  # a damaged file is evidence
                if _is_stored(path, cursors.get(rank)):
                    path.unlink()


def _is_stored(path: Path, cursor: Cursor | None) -> bool:
    """Return True if the file has no record after the cursor."""
    next_seq = 0
    if cursor is not None:
        is_current = cursor.inode == _inode(path)
        next_seq = cursor.next_seq - cursor.base if is_current else 0
    with closing(QueueReader(path, from_seq=next_seq)) as reader:
        return not reader.poll(limit=1).records


def read_pulses(queue_dir: Path) -> dict[int, PulseState | None]:
    """Return the pulse of each rank, for callers that need no records."""
    pulses: dict[int, PulseState | None] = {}
    for rank, path in queue_files(queue_dir).items():
        pulses[rank] = None
        with contextlib.suppress(OSError, QueueFileError), closing(QueueReader(path)) as reader:
            pulses[rank] = reader.pulse()
    return pulses


def is_dead(pulse: PulseState) -> bool:
    """Return True if the rank's process has exited although its pulse says that it is running.

    Only the agent of its node knows this of a rank of another node: the result is False.
    """
    return pulse.node == 0 and pulse.outcome is Outcome.RUNNING and not rank_alive(pulse)


def rank_alive(pulse: PulseState) -> bool:
    """Return True if the process that wrote the pulse is alive on this machine."""
    return pulse.node == 0 and pulse.pid > 0 and is_alive(pulse.pid, pulse.start_ticks)


def local_processes(pulses: Mapping[int, PulseState | None]) -> dict[int, ProcessIdentity]:
    """Return the processes of this machine that wrote the pulses.

    Only these may be read in ``/proc`` or receive a signal. The pid of a rank of another node
    belongs to some other process here.
    """
    return {
        rank: ProcessIdentity(pulse.pid, pulse.start_ticks)
        for rank, pulse in pulses.items()
        if pulse is not None and pulse.pid > 0 and pulse.node == 0
    }
