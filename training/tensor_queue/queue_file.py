"""Read access to a queue file: its header and bytes of its ring, by ``pread``. No NumPy, no torch.

A read of a truncated file raises an error, whereas access to a mapped file would end the process
with SIGBUS.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import NamedTuple

from ltui.training.tensor_queue.file_layout import (
    FILE_MAGIC,
    FIXED,
    FIXED_CRC,
    LAYOUT_VERSION,
    LIVE,
    LIVE_AT,
    ORIGIN,
    ORIGIN_AT,
    PULSE_AT,
    RESERVED_AT,
    RING_AT,
    Origin,
    QueueFileError,
    check_word,
)

_RETRIES = 16
_HEAD_BYTES = ORIGIN_AT + ORIGIN.size - LIVE_AT


class Head(NamedTuple):
    """The changing part of the file's first page."""

    reserved: int
    next_seq: int
    committed: int
    slot: int
    """Index of the commit slot that holds ``next_seq`` and ``committed``."""


class QueueFile:
    """An open queue file.

    Raises ``OSError`` if it can't be opened, and ``QueueFileError`` if it is no queue, is damaged
    beyond reading or has a newer layout.
    """

    def __init__(self, path: Path, flags: int = os.O_RDONLY) -> None:
        self.path = path
        self.origin = Origin()
        """Last value that was read. ``head`` reads it again, because clock offsets change."""
        self._packed_origin = bytes(ORIGIN.size)
        # A pipe in place of the file must not keep its reader waiting.
        self.fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self.capacity = self._read_fixed()
            self.head()
        except BaseException:
            self.close()
            raise

    def head(self) -> Head:
        """Read the reserved position, the newest commit slot and the origin."""
        for _ in range(_RETRIES):
            data = self.pread(_HEAD_BYTES, LIVE_AT)
            reserved, *slots = LIVE.unpack_from(data)
            first, second = _check_slot(*slots[:3]), _check_slot(*slots[3:])
            slot = int(second > first)
            next_seq, committed = second if slot else first
            # ``reserved`` was read together with the slots and can be one put older than they are.
            reserved = max(reserved, committed)
            if next_seq >= 0 and reserved - committed <= 2 * self.capacity and reserved % 8 == 0:
                origin = data[ORIGIN_AT - LIVE_AT :]
                if origin != self._packed_origin:
                    self._packed_origin = origin
                    self.origin = Origin._make(ORIGIN.unpack(origin))
                return Head(reserved, next_seq, committed, slot)
        raise QueueFileError(f"the header of {self.path} is damaged")

    def reserved(self) -> int:
        """Read the reserved position again, after bytes of the ring were copied."""
        return int.from_bytes(self.pread(8, RESERVED_AT), "little")

    def pread(self, size: int, at: int) -> bytes:
        """Return ``size`` bytes of the file. Raises ``QueueFileError`` if they are not there."""
        data = os.pread(self.fd, size, at)
        if len(data) < size:
            raise QueueFileError(f"{self.path} is truncated")
        return data

    def ring_bytes(self, position: int, size: int) -> bytes:
        """Return a copy of the ring from ``position`` on, which may cross the end of the ring."""
        at = position % self.capacity
        first = min(size, self.capacity - at)
        data = self.pread(first, RING_AT + at)
        return data if first == size else data + self.pread(size - first, RING_AT)

    def replaced(self) -> bool:
        """Return True if the path names another file now."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self.fd))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Close the file. A second call has no effect."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _read_fixed(self) -> int:
        """Check the first page and return the capacity of the ring in bytes."""
        fixed = os.pread(self.fd, FIXED.size + FIXED_CRC.size, 0)
        if len(fixed) < FIXED.size + FIXED_CRC.size or not fixed.startswith(FILE_MAGIC):
            raise QueueFileError(f"{self.path} is not a tensor queue")
        _, version, _, capacity, pulse_at, ring_at = FIXED.unpack_from(fixed)
        if version > LAYOUT_VERSION:
            raise QueueFileError(
                f"{self.path} has queue layout {version}, written by a newer ltui; "
                f"this one reads up to {LAYOUT_VERSION}"
            )
        (crc,) = FIXED_CRC.unpack_from(fixed, FIXED.size)
        if zlib.crc32(fixed[: FIXED.size]) != crc or (pulse_at, ring_at) != (PULSE_AT, RING_AT):
            raise QueueFileError(f"the header of {self.path} is damaged")
        size = os.fstat(self.fd).st_size
        if size != ring_at + capacity:
            raise QueueFileError(
                f"{self.path} is truncated: {size} bytes instead of {ring_at + capacity}"
            )
        return int(capacity)


def _check_slot(next_seq: int, position: int, check: int) -> tuple[int, int]:
    """Return (next seq, end position) of a commit slot; (-1, 0) if it is torn or damaged."""
    valid = check == check_word(next_seq, position) and position % 8 == 0
    return (next_seq, position) if valid else (-1, 0)
