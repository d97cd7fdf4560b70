"""The heartbeat table: a small mapped file to which a thread of every rank writes heartbeats.

The file ``queue/<attempt>/witness.bin`` has a header with the supervisor's last request for
evidence and one slot for every rank. Each word is stored atomically by a single writer: the header
by the supervisor, a slot by the rank's heartbeat thread, the barrier in the slot by the rank's main
thread. Standard library only.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from struct import Struct
from struct import error as StructError  # noqa: N812 - an exception by its role
from typing import Final, NamedTuple

TABLE_FILE_NAME: Final = "witness.bin"
BEAT_S: Final = 0.5
"""Seconds between the heartbeats of a rank."""
LATE_S: Final = 3 * BEAT_S + 0.1
"""Seconds since the last heartbeat after which its thread counts as not running: three beats are
missing, and a busy machine has been given a tenth of a second."""
_SLOT_BYTES: Final = 512
_WORDS: Final = Struct("<8q")
"""Heartbeat time, pid, thread id, last enqueued, last completed, time of the last enqueued,
answered request, flags."""
_BEAT, _PID, _THREAD, _ENQUEUED, _COMPLETED, _ENQUEUED_NS, _ANSWERED, _FLAGS = range(8)
"""Indices of the words."""
_HEADER: Final = Struct("<qq")
"""Magic, number of the last request for evidence."""
_SAMPLE: Final = Struct("<3q")
"""Number of the last request for samples of stacks, and the two ranks that it is for."""
_SAMPLE_AT: Final = _HEADER.size
_BARRIER_AT: Final = 128
_BARRIER: Final = Struct("<qH")
"""Time when the rank entered the barrier (0: it is in none), length of the barrier's name."""
_NAME_BYTES: Final = 120
_ACTIVITY: Final = Struct("<5q")
"""Heartbeats with known collectives, those in which the rank waits in one, looks at its training
thread, those in which it had moved on, and looks in which it slept. Counts since the start of the
process."""
_ACTIVITY_AT: Final = 64
_MAGIC: Final = int.from_bytes(b"LTUIWIT1", "little")

STACK_SIGNAL: Final = 57
"""Signal on which faulthandler dumps the stack of the thread that gets it, at once. This and the
next are registered by ``rank/stack_dump_setup.py``."""
INTERPRETER_STACK_SIGNAL: Final = 58
"""Signal on which the interpreter dumps the main thread's stack, when it next runs Python."""
SIGNAL_HANDLER_OURS: Final = 1
"""Flag: the stack dump signals still have the handlers that ltui installed."""
JOINED: Final = 2
"""Flag: ``init_process_group`` has returned."""
RECORDED: Final = 4
"""Flag: the installed torch has a flight recorder for the back end in use."""


class HeartbeatState(NamedTuple):
    """Last values that the heartbeat thread of one rank wrote. Times are CLOCK_MONOTONIC in ns.

    The first fields are in the order of the words in the slot.
    """

    beat_ns: int
    pid: int
    thread_id: int
    enqueued: int
    """Sequence number of the last collective of the default group, -1 if unknown."""
    completed: int
    enqueued_ns: int
    answered: int
    signal_ours: bool
    joined: bool
    recorded: bool
    barrier: str | None
    barrier_ns: int


class RankActivity(NamedTuple):
    """Counts of a heartbeat thread, in the order of ``_ACTIVITY``."""

    beats: int
    waiting: int
    looks: int
    moved: int
    slept: int


class HeartbeatSlot:
    """A rank's writer for its slot of the table. It never blocks and takes no lock."""

    def __init__(self, queue_dir: Path, rank: int) -> None:
        """Open or create the table of the queue folder ``queue_dir``. Raises ``OSError``."""
        end = (rank + 2) * _SLOT_BYTES
        fd = os.open(queue_dir / TABLE_FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size < end:
                os.pwrite(fd, b"\0", end - 1)  # lengthens the file and never shortens it
            self._mapped = mmap.mmap(fd, end)
        finally:
            os.close(fd)
        self._at = (rank + 1) * _SLOT_BYTES
        view = memoryview(self._mapped)
        self._request_word = view[: _WORDS.size].cast("q")
        self._words = view[self._at : self._at + _WORDS.size].cast("q")
        at = self._at + _ACTIVITY_AT
        self._activity = view[at : at + _ACTIVITY.size].cast("q")
        self._activity[:] = memoryview(_ACTIVITY.pack(0, 0, 0, 0, 0)).cast("q")
        self._words[:] = memoryview(_WORDS.pack(0, os.getpid(), 0, -1, -1, 0, 0, 0)).cast("q")
        self.leave_barrier()

    def evidence_request(self) -> int:
        """Return the number of the supervisor's last request for evidence; 0 if there is none."""
        return self._request_word[1] if self._request_word[0] == _MAGIC else 0

    def sample_request(self) -> tuple[int, frozenset[int]]:
        """Return the number of the last request for samples, 0 if there is none, and its ranks."""
        number, *ranks = self._request_word[2:5]
        return number, frozenset(ranks)

    def publish(
        self,
        beat_ns: int,
        thread_id: int,
        enqueued: int,
        completed: int,
        answered: int,
        flags: int,
    ) -> None:
        """Store a heartbeat. Its time is stored last."""
        words = self._words
        if words[_ENQUEUED] != enqueued:
            words[_ENQUEUED_NS] = beat_ns
        words[_THREAD], words[_ENQUEUED], words[_COMPLETED] = thread_id, enqueued, completed
        words[_ANSWERED], words[_FLAGS] = answered, flags
        words[_BEAT] = beat_ns

    def count(self, *, waits: bool | None, moved: bool | None, slept: bool) -> None:
        """Count whether the rank waits in a collective, has moved on (None: not known), and whether
        it slept elsewhere."""
        activity = self._activity
        if waits is not None:
            activity[1] += waits
            activity[0] += 1
        if moved is not None:
            activity[3] += moved
            activity[2] += 1
        activity[4] += slept

    def enter_barrier(self, name: str, now_ns: int) -> None:
        """Record that the main thread has entered the barrier ``name``."""
        text = name.encode()[:_NAME_BYTES]
        at = self._at + _BARRIER_AT
        self._mapped[at + _BARRIER.size : at + _BARRIER.size + len(text)] = text
        _BARRIER.pack_into(self._mapped, at, now_ns, len(text))

    def leave_barrier(self) -> None:
        """Record that the main thread is in no barrier."""
        _BARRIER.pack_into(self._mapped, self._at + _BARRIER_AT, 0, 0)


class HeartbeatTable:
    """The supervisor's reader of all slots, which also writes requests for evidence."""

    def __init__(self, queue_dir: Path) -> None:
        self._path = queue_dir / TABLE_FILE_NAME

    def read(self) -> dict[int, HeartbeatState]:
        """Return the last heartbeat state of each rank; empty if no rank has written one yet."""
        try:
            data = self._path.read_bytes()
        except OSError:
            return {}
        states = {}
        for rank in range(len(data) // _SLOT_BYTES - 1):
            state = _parse(data, (rank + 1) * _SLOT_BYTES)
            if state is not None:
                states[rank] = state
        return states

    def read_activity(self) -> dict[int, RankActivity]:
        """Return the counts of each rank; empty if no rank has written any yet."""
        try:
            data = self._path.read_bytes()
        except OSError:
            return {}
        ranks = range(len(data) // _SLOT_BYTES - 1)
        places = {rank: (rank + 1) * _SLOT_BYTES + _ACTIVITY_AT for rank in ranks}
        return {r: RankActivity(*_ACTIVITY.unpack_from(data, at)) for r, at in places.items()}

    def request_evidence(self, number: int) -> None:
        """Write the request for evidence ``number``. Raises ``OSError``."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(fd, _HEADER.pack(_MAGIC, number), 0)
        finally:
            os.close(fd)

    def request_samples(self, ranks: tuple[int, int]) -> int:
        """Request samples of the stacks of two ranks, and return the number of the request.

        The number is stored last. Raises ``OSError``.
        """
        fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            header = os.pread(fd, _SAMPLE.size, _SAMPLE_AT).ljust(_SAMPLE.size, b"\0")
            number = int(_SAMPLE.unpack(header)[0]) + 1
            request = _SAMPLE.pack(number, *ranks)
            os.pwrite(fd, request[8:], _SAMPLE_AT + 8)
            os.pwrite(fd, request[:8], _SAMPLE_AT)
        finally:
            os.close(fd)
        return number

    def last_request(self) -> int:
        """Return the number of the last request, including those of an earlier supervisor."""
        try:
            with self._path.open("rb") as file:
                magic, number = _HEADER.unpack(file.read(_HEADER.size))
        except (OSError, StructError):
            return 0
        return int(number) if magic == _MAGIC else 0


def _parse(data: bytes, at: int) -> HeartbeatState | None:
    *words, flags = _WORDS.unpack_from(data, at)
    if not words[_PID]:
        return None
    barrier_ns, length = _BARRIER.unpack_from(data, at + _BARRIER_AT)
    name_at = at + _BARRIER_AT + _BARRIER.size
    name = data[name_at : name_at + min(length, _NAME_BYTES)].decode(errors="replace")
    bits = [bool(flags & flag) for flag in (SIGNAL_HANDLER_OURS, JOINED, RECORDED)]
    barrier = name if barrier_ns else None
    return HeartbeatState._make((*words, *bits, barrier, barrier_ns))
