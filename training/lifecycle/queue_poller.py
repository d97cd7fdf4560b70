"""Watching the queue files of one attempt: records, pulses, and which ranks are alive."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ltui.training.process.identity import is_alive, is_stopped
from ltui.training.store.history_writer import Cursor
from ltui.training.tensor_queue.queue_reader import Poll, QueueFileError, QueueReader, Record
from ltui.training.tensor_queue.record_types import Outcome, PulseState

_QUEUE_NAME = re.compile(r"rank-(\d+)\.queue")
_POLL_RECORDS = 2000
_POLLS_A_TICK = 4
"""A rank far behind is caught up over several ticks, so that no rank starves the others."""


@dataclass(frozen=True, slots=True)
class QueuePoll:
    """What one look at the queues gave."""

    polls: Mapping[int, Poll] = field(default_factory=dict)
    pulses: Mapping[int, PulseState | None] = field(default_factory=dict)
    dead_ranks: frozenset[int] = frozenset()
    """Ranks whose process ended without its pulse saying so."""
    stopped_pids: Mapping[int, int] = field(default_factory=dict)
    """rank -> pid, where the process is stopped (SIGSTOP, a debugger)."""
    more_waiting: bool = False
    """More records stand in the queues than one look may take."""


@dataclass(slots=True)
class _Tail:
    """One rank's present queue file; ``base`` goes on top of its sequence numbers."""

    reader: QueueReader
    base: int
    inode: int


class QueuePoller:
    """Readers of every rank's queue of one attempt.

    A rank that starts anew (torch elastic restarts it) makes another file under the same name; its
    records are counted on from the file before.
    """

    def __init__(self, queue_dir: Path, known: Mapping[int, Cursor]) -> None:
        """``known``: how far a supervisor before this one was."""
        self._dir = queue_dir
        self._known = known
        self._tails: dict[int, _Tail] = {}
        self._dir_changed_ns = -1
        self.errors: dict[int, str] = {}
        """Queues that can't be read, and why."""

    def poll(self) -> QueuePoll:
        """Poll every queue once."""
        self._discover()
        polls: dict[int, Poll] = {}
        pulses: dict[int, PulseState | None] = {}
        behind = False
        for rank, tail in self._tails.items():
            try:
                replaced = tail.reader.replaced()
                polls[rank], more = _drain(tail)
                pulses[rank] = tail.reader.pulse()
                if replaced and not more:
                    self._reopen(rank, tail)
                behind = behind or more or replaced
            except (OSError, QueueFileError) as error:
                self.errors[rank] = str(error)
                pulses.setdefault(rank, None)
        gone = frozenset(r for r, p in pulses.items() if p is not None and is_dead(p))
        held = {
            r: p.pid for r, p in pulses.items() if p is not None and p.pid and is_stopped(p.pid)
        }
        return QueuePoll(polls, pulses, gone, held, behind)

    def cursor(self, rank: int, next_seq: int) -> Cursor:
        """What to keep so that a later watch goes on at ``next_seq``."""
        tail = self._tails[rank]
        return Cursor(next_seq, tail.base, tail.inode)

    def open_reader(self, rank: int, from_seq: int) -> tuple[QueueReader, int]:
        """Another reader of the present file from ``from_seq`` on, and the file's base."""
        tail = self._tails[rank]
        return QueueReader(tail.reader.path, from_seq=max(0, from_seq - tail.base)), tail.base

    def close(self) -> None:
        for tail in self._tails.values():
            tail.reader.close()
        self._tails.clear()

    def _reopen(self, rank: int, tail: _Tail) -> None:
        fresh = QueueReader(tail.reader.path)
        base = tail.base + tail.reader.next_seq
        tail.reader.close()
        self._tails[rank] = _Tail(fresh, base, _inode(fresh.path))

    def _open(self, rank: int, path: Path) -> _Tail:
        reader, inode = QueueReader(path), _inode(path)
        known = self._known.get(rank)
        if known is None:
            return _Tail(reader, 0, inode)
        return _Tail(reader, known.base if known.inode == inode else known.next_seq, inode)

    def _discover(self) -> None:
        try:
            changed_ns = os.stat(self._dir).st_mtime_ns
        except OSError:
            return
        if changed_ns == self._dir_changed_ns:
            return
        failed = False
        for rank, path in queue_files(self._dir).items():
            if rank in self._tails:
                continue
            try:
                self._tails[rank] = self._open(rank, path)
                self.errors.pop(rank, None)
            except (OSError, QueueFileError) as error:
                self.errors[rank] = str(error)
                failed = True
        self._tails = dict(sorted(self._tails.items()))
        # A file that is only being made is looked at again.
        self._dir_changed_ns = -1 if failed else changed_ns


def _inode(path: Path) -> int:
    return path.stat().st_ino


def _drain(tail: _Tail) -> tuple[Poll, bool]:
    """Everything new up to a limit, and whether there is more."""
    records: list[Record] = []
    missed = 0
    for _ in range(_POLLS_A_TICK):
        poll = tail.reader.poll(_POLL_RECORDS)
        records += poll.records
        missed += poll.missed
        if len(poll.records) < _POLL_RECORDS:
            return _moved(records, missed, tail.base), False
    return _moved(records, missed, tail.base), True


def _moved(records: list[Record], missed: int, base: int) -> Poll:
    if base:
        records = [replace(record, seq=record.seq + base) for record in records]
    return Poll(tuple(records), missed)


def queue_files(queue_dir: Path) -> dict[int, Path]:
    """rank -> queue file, by rank."""
    try:
        names = os.listdir(queue_dir)
    except OSError:
        return {}
    found = {int(m[1]): queue_dir / name for name in names if (m := _QUEUE_NAME.fullmatch(name))}
    return dict(sorted(found.items()))


def read_pulses(queue_dir: Path) -> dict[int, PulseState | None]:
    """Every rank's pulse, for watchers that read no records."""
    pulses: dict[int, PulseState | None] = {}
    for rank, path in queue_files(queue_dir).items():
        try:
            reader = QueueReader(path)
        except (OSError, QueueFileError):
            pulses[rank] = None
            continue
        try:
            pulses[rank] = reader.pulse()
        except (OSError, QueueFileError):
            pulses[rank] = None
        finally:
            reader.close()
    return pulses


def is_dead(pulse: PulseState) -> bool:
    """Whether the rank's process ended while its pulse still says that it trains."""
    return pulse.outcome is Outcome.RUNNING and not rank_alive(pulse)


def rank_alive(pulse: PulseState) -> bool:
    return pulse.pid > 0 and is_alive(pulse.pid, pulse.start_ticks)
