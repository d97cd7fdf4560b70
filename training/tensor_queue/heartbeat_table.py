"""The witness board: one small mapped file in which every rank's own thread says that it lives.

``queue/<attempt>/witness.bin``: a header with the supervisor's question, then a slot for every
rank. Every word is whole by itself, stored by one writer: the header by the supervisor, a slot by
the rank's witness thread, its barrier by the rank's main thread. Standard library only.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from struct import error as StructError  # noqa: N812 - an exception by its role
from typing import Final

TABLE_FILE_NAME: Final = "witness.bin"
_SLOT_BYTES: Final = 512
_WORDS: Final = Struct("<8q")
"""Beat, pid, thread, last enqueued, last completed, since when enqueued, answered, flags."""
_HEADER: Final = Struct("<qq")
_BARRIER_AT: Final = 128
_BARRIER: Final = Struct("<qH")
"""Since when the rank stands in it (0: in none), length of its name."""
_NAME_BYTES: Final = 120
_MAGIC: Final = int.from_bytes(b"LTUIWIT1", "little")

STACK_SIGNAL: Final = 57
"""Has faulthandler dump all stacks where ``rank/evidence_start.py`` registered it."""
SIGNAL_HANDLER_OURS: Final = 1
"""Flag: the signal that dumps stacks still has the handler that ltui gave it."""
JOINED: Final = 2
"""Flag: ``init_process_group`` has returned."""
RECORDED: Final = 4
"""Flag: this torch has a flight recorder for the back end in use."""


@dataclass(frozen=True, slots=True)
class HeartbeatState:
    """What one rank's witness said last. Times are CLOCK_MONOTONIC in ns."""

    beat_ns: int
    pid: int
    thread_id: int
    enqueued: int
    """Number of the last collective of the default group, -1 where unknown."""
    completed: int
    enqueued_ns: int
    answered: int
    signal_ours: bool
    joined: bool
    recorded: bool
    barrier: str | None
    barrier_ns: int


class HeartbeatSlot:
    """The rank's end. Nothing here blocks or locks."""

    def __init__(self, queue_dir: Path, rank: int) -> None:
        """Raises ``OSError``."""
        end = (rank + 2) * _SLOT_BYTES
        fd = os.open(queue_dir / TABLE_FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size < end:
                os.pwrite(fd, b"\0", end - 1)  # makes it longer and never shorter
            self._mapped = mmap.mmap(fd, end)
        finally:
            os.close(fd)
        self._at = (rank + 1) * _SLOT_BYTES
        view = memoryview(self._mapped)
        self._request_word = view[: _WORDS.size].cast("q")
        self._words = view[self._at : self._at + _WORDS.size].cast("q")
        self._words[:] = memoryview(_WORDS.pack(0, os.getpid(), 0, -1, -1, 0, 0, 0)).cast("q")
        self.leave_barrier()

    def evidence_request(self) -> int:
        """Number of the last question that the supervisor raised; 0: none yet."""
        return self._request_word[1] if self._request_word[0] == _MAGIC else 0

    def publish(
        self,
        beat_ns: int,
        thread_id: int,
        enqueued: int,
        completed: int,
        answered: int,
        flags: int,
    ) -> None:
        words = self._words
        if words[3] != enqueued:
            words[5] = beat_ns
        words[2], words[3], words[4] = thread_id, enqueued, completed
        words[6], words[7] = answered, flags
        words[0] = beat_ns

    def enter_barrier(self, name: str, now_ns: int) -> None:
        text = name.encode()[:_NAME_BYTES]
        at = self._at + _BARRIER_AT
        self._mapped[at + _BARRIER.size : at + _BARRIER.size + len(text)] = text
        _BARRIER.pack_into(self._mapped, at, now_ns, len(text))

    def leave_barrier(self) -> None:
        _BARRIER.pack_into(self._mapped, self._at + _BARRIER_AT, 0, 0)


class HeartbeatTable:
    """The supervisor's end: reads all slots, raises questions."""

    def __init__(self, queue_dir: Path) -> None:
        self._path = queue_dir / TABLE_FILE_NAME

    def read(self) -> dict[int, HeartbeatState]:
        """rank -> what it said; empty where no rank has a witness (yet)."""
        try:
            data = self._path.read_bytes()
        except OSError:
            return {}
        found = {}
        for rank in range(len(data) // _SLOT_BYTES - 1):
            state = _parse(data, (rank + 1) * _SLOT_BYTES)
            if state is not None:
                found[rank] = state
        return found

    def request_evidence(self, number: int) -> None:
        """Raise question ``number``. Raises ``OSError``."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(fd, _HEADER.pack(_MAGIC, number), 0)
        finally:
            os.close(fd)

    def last_request(self) -> int:
        """The number raised last, also by a supervisor before this one."""
        try:
            with self._path.open("rb") as file:
                magic, number = _HEADER.unpack(file.read(_HEADER.size))
        except (OSError, StructError):
            return 0
        return int(number) if magic == _MAGIC else 0


def _parse(data: bytes, at: int) -> HeartbeatState | None:
    beat, pid, thread, enqueued, completed, since, answered, flags = _WORDS.unpack_from(data, at)
    if not pid:
        return None
    barrier_ns, length = _BARRIER.unpack_from(data, at + _BARRIER_AT)
    name_at = at + _BARRIER_AT + _BARRIER.size
    name = data[name_at : name_at + min(length, _NAME_BYTES)].decode(errors="replace")
    return HeartbeatState(
        beat_ns=beat,
        pid=pid,
        thread_id=thread,
        enqueued=enqueued,
        completed=completed,
        enqueued_ns=since,
        answered=answered,
        signal_ours=bool(flags & SIGNAL_HANDLER_OURS),
        joined=bool(flags & JOINED),
        recorded=bool(flags & RECORDED),
        barrier=name if barrier_ns else None,
        barrier_ns=barrier_ns,
    )
