"""Watching the queue files of one attempt: records, pulses, and which ranks are alive."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ltui.training.queue.reader import Poll, QueueFileError, QueueReader
from ltui.training.queue.records import Outcome, PulseState
from ltui.training.supervise.alive import is_alive

_QUEUE_NAME = re.compile(r"rank-(\d+)\.queue")
_POLL_RECORDS = 2000
_POLLS_A_TICK = 4
"""A rank far behind is caught up over several ticks, so that no rank starves the others."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What one look at the queues gave."""

    polls: Mapping[int, Poll] = field(default_factory=dict)
    pulses: Mapping[int, PulseState | None] = field(default_factory=dict)
    gone: frozenset[int] = frozenset()
    """Ranks whose process ended without its pulse saying so."""
    behind: bool = False
    """More records stand in the queues than one look may take."""


class QueueWatch:
    """Readers of every rank's queue of one attempt."""

    def __init__(self, queue_dir: Path) -> None:
        self._dir = queue_dir
        self._readers: dict[int, QueueReader] = {}
        self._dir_changed_ns = -1
        self.errors: dict[int, str] = {}
        """Queues that can't be read, and why."""

    def look(self) -> Sight:
        """Poll every queue once."""
        self._discover()
        polls: dict[int, Poll] = {}
        pulses: dict[int, PulseState | None] = {}
        behind = False
        for rank, reader in self._readers.items():
            try:
                polls[rank], more = _drain(reader)
                behind = behind or more
                pulses[rank] = reader.pulse()
            except (OSError, QueueFileError) as error:
                self.errors[rank] = str(error)
                pulses.setdefault(rank, None)
        gone = frozenset(r for r, p in pulses.items() if p is not None and is_gone(p))
        return Sight(polls, pulses, gone, behind)

    def next_seq(self, rank: int) -> int:
        return self._readers[rank].next_seq

    def path(self, rank: int) -> Path:
        return self._dir / f"rank-{rank:05d}.queue"

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def _discover(self) -> None:
        try:
            changed_ns = os.stat(self._dir).st_mtime_ns
        except OSError:
            return
        if changed_ns == self._dir_changed_ns:
            return
        failed = False
        for rank, path in queue_files(self._dir).items():
            if rank in self._readers:
                continue
            try:
                self._readers[rank] = QueueReader(path)
                self.errors.pop(rank, None)
            except (OSError, QueueFileError) as error:
                self.errors[rank] = str(error)
                failed = True
        self._readers = dict(sorted(self._readers.items()))
        # A file that is only being made is looked at again.
        self._dir_changed_ns = -1 if failed else changed_ns


def _drain(reader: QueueReader) -> tuple[Poll, bool]:
    poll = reader.poll(_POLL_RECORDS)
    if len(poll.records) < _POLL_RECORDS:
        return poll, False
    records, missed = list(poll.records), poll.missed
    for _ in range(_POLLS_A_TICK - 1):
        poll = reader.poll(_POLL_RECORDS)
        records += poll.records
        missed += poll.missed
        if len(poll.records) < _POLL_RECORDS:
            return Poll(tuple(records), missed), False
    return Poll(tuple(records), missed), True


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


def is_gone(pulse: PulseState) -> bool:
    """Whether the rank's process ended while its pulse still says that it trains."""
    return pulse.outcome is Outcome.RUNNING and not rank_alive(pulse)


def rank_alive(pulse: PulseState) -> bool:
    return pulse.pid > 0 and is_alive(pulse.pid, pulse.start_ticks)
