"""Read the queue files and logs of this node's ranks, as far as the head does not have them.

The agent calls ``chunks`` and ``parts`` for every report, also while the connection is down.
Nothing is stored here: the position from which to send is what the head has acknowledged. The ring
of a queue keeps what was not sent yet. If the rank overwrites it first, the tail continues at the
oldest record, and readers of the mirror count the missing ones.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from ltui.training.lifecycle.rank_queue_poller import queue_files
from ltui.training.tensor_queue.pulse_block import PULSE_BYTES, pack_pulse
from ltui.training.tensor_queue.queue_file import (
    MIN_CAPACITY_BYTES,
    PAD,
    PAD_MAGIC,
    PAGE_BYTES,
    PULSE_AT,
    RECORD,
    RECORD_BYTES,
    RECORD_MAGIC,
    QueueFile,
    QueueFileError,
    align8,
    find_record,
    pad_word,
)


class QueuePosition(NamedTuple):
    """How far a queue file has been mirrored."""

    file_id: int
    position: int


class QueueChunk(Struct, frozen=True):
    """Consecutive whole records of a queue file, and the rank's pulse at that time."""

    file_id: int
    created_ns: int
    """CLOCK_MONOTONIC time in ns, on the rank's node, when the file was created."""
    capacity: int
    reserved: int
    """Bytes at positions below ``reserved - capacity`` had been overwritten."""
    start: int
    """Position of the first byte of ``data``."""
    next_seq: int
    """Sequence number after the last record of ``data``."""
    data: bytes
    pulse: bytes
    """Packed pulse; empty if the rank has not written one."""

    @property
    def end(self) -> int:
        """Position after the last byte of ``data``."""
        return self.start + len(self.data)

    def check(self) -> None:
        """Raise ``QueueFileError`` if the fields contradict each other."""
        sizes = (self.capacity % PAGE_BYTES, self.start % 8, len(self.data) % 8, self.reserved % 8)
        if (
            any(sizes)
            or min(self.file_id, self.start, self.next_seq) < 0
            or not -(1 << 63) <= self.created_ns < 1 << 63
            or self.capacity < MIN_CAPACITY_BYTES
            or len(self.data) > self.capacity
            or self.end > self.reserved
        ):
            raise QueueFileError("a part of a queue that another node sent is not valid")


DEFAULT_LIMIT_BYTES = 256 << 10
"""Bytes of records in one chunk, unless a single record is larger."""
_TRIES = 8
"""Number of times to copy records that the rank overwrites meanwhile."""
_MAX_FILES = 8
"""Files of one rank that are kept open. All but the last are of workers that were restarted."""


class QueueTail:
    """Reads the queue files that one rank writes one after the other under the same path.

    A file that a restarted rank replaced stays open until all of it is acknowledged: its last
    records say why the rank ended.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: deque[QueueFile] = deque()

    def chunk(
        self, acknowledged: QueuePosition | None, limit: int = DEFAULT_LIMIT_BYTES
    ) -> QueueChunk | None:
        """Return the records that follow ``acknowledged``, and the pulse.

        Return None if the rank has no queue file yet. Raises ``OSError`` and ``QueueFileError``.
        """
        self._open_new_file()
        self._close_acknowledged(acknowledged)
        if not self._files:
            return None
        return _read_chunk(self._files[0], self._position(acknowledged), limit)

    def remove_acknowledged(self, acknowledged: QueuePosition | None) -> None:
        """Remove the file of a rank that has ended, if the head has all of it.

        Raises ``OSError`` and ``QueueFileError``.
        """
        self._open_new_file()
        self._close_acknowledged(acknowledged)
        if len(self._files) == 1 and (
            self._position(acknowledged) >= self._files[0].head().committed
        ):
            self._path.unlink()

    def _position(self, acknowledged: QueuePosition | None) -> int:
        """Return how much of the first file the head has."""
        if acknowledged is None or acknowledged.file_id != file_id(self._files[0]):
            return 0
        return acknowledged.position

    def close(self) -> None:
        """Close every file."""
        while self._files:
            self._files.pop().close()

    def _open_new_file(self) -> None:
        try:
            if self._files and not self._files[-1].replaced():
                return
            self._files.append(QueueFile(self._path))
        except FileNotFoundError:
            return
        if len(self._files) > _MAX_FILES:
            self._files.popleft().close()

    def _close_acknowledged(self, acknowledged: QueuePosition | None) -> None:
        """Close the files that the head has in full."""
        ids = [file_id(file) for file in self._files]
        if acknowledged is None or acknowledged.file_id not in ids:
            return
        for _ in range(ids.index(acknowledged.file_id)):
            self._files.popleft().close()
        if len(self._files) > 1 and acknowledged.position >= self._files[0].head().committed:
            self._files.popleft().close()


class QueueTails:
    """The tails of all ranks of one attempt on this node."""

    def __init__(self, queue_dir: Path) -> None:
        self._dir = queue_dir
        self._tails: dict[int, QueueTail] = {}

    def chunks(self, acknowledged: Mapping[int, QueuePosition]) -> dict[int, QueueChunk]:
        """Return the next chunk of each rank that has a queue file."""
        for rank, path in queue_files(self._dir).items():
            if rank not in self._tails:
                self._tails[rank] = QueueTail(path)
        chunks = {}
        for rank, tail in self._tails.items():
            # A queue that cannot be read now is read for a later report.
            with contextlib.suppress(OSError, QueueFileError):
                if (chunk := tail.chunk(acknowledged.get(rank))) is not None:
                    chunks[rank] = chunk
        return chunks

    def remove_acknowledged(self, acknowledged: Mapping[int, QueuePosition]) -> None:
        """Remove the queue files of an ended attempt that the head has in full."""
        for rank, tail in self._tails.items():
            with contextlib.suppress(OSError, QueueFileError):  # a damaged file is evidence
                tail.remove_acknowledged(acknowledged.get(rank))

    def close(self) -> None:
        """Close every file."""
        for tail in self._tails.values():
            tail.close()
        self._tails.clear()


def file_id(file: QueueFile) -> int:
    """Return the number by which copies of the file are recognised."""
    return file.origin.file_id or os.fstat(file.fd).st_ino


def _read_chunk(file: QueueFile, position: int, limit: int) -> QueueChunk:
    """Return whole records from ``position`` on, or the oldest ones if those are overwritten."""
    pulse = pack_pulse(file.pread(PULSE_BYTES, PULSE_AT))
    start, capacity = position, file.capacity
    for attempt in range(_TRIES):
        head = file.head()
        # A fast rank overwrites the oldest records while they are copied. So retries leave a margin
        # that grows up to the newest record.
        oldest = head.reserved - capacity
        if start < oldest:
            start = min(head.committed, oldest + attempt * capacity // _TRIES // 8 * 8)
        data = file.ring_bytes(start, min(max(0, head.committed - start), limit))
        reserved = max(head.reserved, file.reserved())
        begin = max(start, reserved - capacity)
        data = data[begin - start :]
        start = begin
        if start > position:
            at = find_record(data, 0, start)
            start, data = start + at, data[at:]
        next_seq = head.next_seq
        if start + len(data) != head.committed:
            data, next_seq = _whole_records(data, start, capacity)
        if data or start == head.committed:
            return QueueChunk(
                file_id(file), file.origin.created_ns, capacity, reserved, start, next_seq, data,
                pulse,
            )  # fmt: skip
        # Either no record begins in these bytes, or it is longer than they are.
        limit = min(capacity, 2 * limit)
    return QueueChunk(
        file_id(file), file.origin.created_ns, capacity, max(position, reserved), position, 0, b"",
        pulse,
    )  # fmt: skip


def _whole_records(data: bytes, start: int, capacity: int) -> tuple[bytes, int]:
    """Return the beginning of ``data`` that consists of whole records.

    The second value is the sequence number after the last of them. ``start`` is the position of
    ``data``.
    """
    at = end = next_seq = 0
    while len(data) - at >= RECORD_BYTES:
        position = start + at
        magic, word = PAD.unpack_from(data, at)
        if magic == PAD_MAGIC and word == pad_word(position):
            at += capacity - position % capacity
            continue
        fields = RECORD.unpack_from(data, at)
        payload_bytes, label_bytes, ndim = fields[5], fields[6], fields[10]
        if magic != RECORD_MAGIC or fields[2] != position:
            at = find_record(data, at + 8, start)
            continue
        size = align8(RECORD_BYTES + 8 * ndim + align8(label_bytes) + payload_bytes)
        if at + size > len(data):
            break
        at += size
        end, next_seq = at, fields[3] + 1
    return data[:end], next_seq


_PART_BYTES = 64 << 10
"""Maximum number of bytes of one log in a report."""
_REPORT_BYTES = 512 << 10
"""Maximum number of bytes of all logs in a report, so that records do not wait for logs."""


class LogPart(Struct, frozen=True, kw_only=True):
    """Bytes of a log file of the attempt."""

    name: str
    """File name below the attempt's folder of logs."""
    at: int
    """Offset in the file."""
    data: bytes


class LogTails:
    """Reads the logs of one folder from the positions that the head has acknowledged."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sent: dict[str, int] = {}
        self.advanced = True
        """True if the head took some of the last parts. It takes no more of a very long log."""

    def parts(self) -> tuple[LogPart, ...]:
        """Return the next bytes of each log that has grown."""
        parts: list[LogPart] = []
        total = 0
        with contextlib.suppress(OSError):
            for path in sorted(self._folder.glob("*.log")):
                at = self._sent.get(path.name, 0)
                with path.open("rb") as file:
                    file.seek(at)
                    data = file.read(min(_PART_BYTES, _REPORT_BYTES - total))
                if data:
                    parts.append(LogPart(name=path.name, at=at, data=data))
                    total += len(data)
        return tuple(parts)

    def acknowledge(self, sizes: Mapping[str, int]) -> None:
        """Continue at ``sizes``, the number of bytes of each log that the head has."""
        self.advanced = dict(sizes) != self._sent
        self._sent = dict(sizes)
