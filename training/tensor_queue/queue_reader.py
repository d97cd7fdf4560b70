"""The watchers' end of a queue file: records and pulse, by ``pread``. NumPy, never torch.

Reads are plain file reads into this process's own memory: the rank is never touched, and a file
that somebody cuts short is an error here, where a mapped one would end the process by SIGBUS.
Readers know nothing of each other.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ltui.training.tensor_queue import file_layout
from ltui.training.tensor_queue.decode_arrays import Payload, to_payload
from ltui.training.tensor_queue.file_layout import (
    COALESCED,
    CRC_FROM,
    DTYPE_NAMES,
    FILE_MAGIC,
    FIXED,
    FIXED_CRC,
    LAYOUT_VERSION,
    LIVE,
    LIVE_AT,
    PAD,
    PAD_MAGIC,
    PULSE_AT,
    RECORD,
    RECORD_BYTES,
    RECORD_MAGIC,
    RECORD_MAGIC_BYTES,
    RING_AT,
    Layout,
    align8,
    check_word,
    pad_word,
)
from ltui.training.tensor_queue.file_layout import QueueFileError as QueueFileError
from ltui.training.tensor_queue.rank_pulse import PULSE_BYTES, parse_pulse
from ltui.training.tensor_queue.record_types import PulseState

_CHUNK_BYTES = 256 << 10
_RETRIES = 16
_LOOKS = 3
"""How often a record that looks damaged is read again before it is given up."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record, whole and checked; it owns its bytes."""

    seq: int
    """Counts from 0 without gaps; a gap is a record that was missed."""
    kind: int
    t_ns: int
    """CLOCK_MONOTONIC of the machine on which the rank runs."""
    label: bytes
    array: Payload
    """Read-only. Empty where the record carries a label alone."""
    dtype: str = ""
    """Torch's name of the element type as it was put, ``bfloat16``; empty for a label alone."""
    layout: Layout = Layout.NONE
    shape: tuple[int, ...] = ()
    coalesced: bool = False
    payload: bytes = b""
    """The bytes as they were put, from which ``tensors.to_tensor`` restores the tensor bit by
    bit."""


@dataclass(frozen=True, slots=True)
class Poll:
    """What one ``poll`` found."""

    records: tuple[Record, ...]
    missed: int
    """Records between the poll before and the last of these that can't be had any more."""


class _Head(NamedTuple):
    """The moving part of the file's first page."""

    reserved: int
    next_seq: int
    committed: int


class _Found(NamedTuple):
    """What stands at a position: bytes to go on by, and the record unless it is a pad or must be
    skipped.

    ``whole`` is False where the copy held only the beginning of ``size`` bytes.
    """

    size: int
    record: Record | None = None
    whole: bool = True


class QueueReader:
    """An independent cursor over one rank's queue file.

    ``OSError`` where the file can't be opened; ``QueueFileError`` where it is no queue, is damaged
    beyond reading or has a newer layout. ``from_seq`` starts at that sequence number, and what is
    gone since counts as missed; ``None`` starts at the oldest record still there.
    """

    def __init__(self, path: Path, *, from_seq: int | None = None) -> None:
        self.path = path
        self.next_seq = from_seq or 0
        """The sequence number that the next record should have."""
        self._attached = from_seq is not None
        self._pos = 0
        self._searching = False
        self._chunk_bytes = _CHUNK_BYTES
        self._looks = 0
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.capacity = self._read_fixed()
        except BaseException:
            os.close(self._fd)
            raise

    def poll(self, limit: int = 2000) -> Poll:
        """At most ``limit`` records in order, and how many were missed before or among them."""
        records: list[Record] = []
        missed = 0
        head = self._head()
        while self._pos < head.committed and len(records) < limit:
            missed += self._read_chunk(head, records, limit)
        if self._pos >= head.committed:
            # Committed but not found: damaged, overwritten meanwhile, or given up by the writer.
            missed += self._expect(head.next_seq)
            self._searching = self._searching and self._pos > head.committed
        return Poll(tuple(records), missed)

    def pulse(self) -> PulseState | None:
        """What the rank says it is doing; ``None``: never written, or not consistent after
        retries."""
        for _ in range(_RETRIES):
            state = parse_pulse(self._pread(PULSE_BYTES, file_layout.PULSE_AT))
            if state is not None:
                return state
        return None

    def replaced(self) -> bool:
        """Whether the path now names another file: the rank started anew. Drain this one, then
        reopen."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Let go of the file; twice is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read_chunk(self, head: _Head, records: list[Record], limit: int) -> int:
        """Copy bytes from the cursor on, take what is whole from them, move the cursor; the
        missed."""
        capacity = self.capacity
        oldest = head.reserved - capacity
        if self._pos < oldest:
            self._pos, self._searching = oldest, True
        start = self._pos
        stop = min(head.committed, start - start % capacity + capacity)
        if stop <= start:
            return 0
        data = self._pread(min(stop - start, self._chunk_bytes), RING_AT + start % capacity)
        # What the writer reserved before this moment may have been half overwritten in the copy.
        void = self._head().reserved - capacity - start
        at = 0
        if void > 0:
            at, self._searching = min(void, len(data)), True
        missed = 0
        while at < len(data) and len(records) < limit:
            if self._searching:
                at = _find(data, at, start)
                if at == len(data):
                    break
            found = self._look(data, at, start, stop)
            if found is None:
                if not self._searching and self._looks < _LOOKS:
                    self._looks += 1
                    break
                self._searching = True
                at += 8
            elif not found.whole:
                self._chunk_bytes = max(_CHUNK_BYTES, found.size)
                break
            else:
                self._searching, self._looks, self._chunk_bytes = False, 0, _CHUNK_BYTES
                at += found.size
                if found.record is not None:
                    missed += self._expect(found.record.seq)
                    self.next_seq = found.record.seq + 1
                    records.append(found.record)
        self._pos = start + at
        return missed

    def _expect(self, seq: int) -> int:
        """How many records lie between the one expected and ``seq``, which is expected from now
        on."""
        gap = seq - self.next_seq
        if gap <= 0:
            return 0
        self.next_seq = seq
        first, self._attached = not self._attached, True
        return 0 if first else gap

    def _look(self, data: bytes, at: int, start: int, stop: int) -> _Found | None:
        """What stands at ``data[at]``, position ``start + at``; ``None``: nothing valid."""
        position = start + at
        room = stop - position
        magic, crc = PAD.unpack_from(data, at)
        if magic == PAD_MAGIC and crc == pad_word(position):
            return _Found(room)
        if magic != RECORD_MAGIC or room < RECORD_BYTES:
            return None
        if len(data) - at < RECORD_BYTES:
            return _Found(RECORD_BYTES, whole=False)
        fields = RECORD.unpack_from(data, at)
        _, _, its_position, seq, t_ns, payload_bytes, label_bytes, kind, *form, _ = fields
        dtype, code, ndim, flags = form
        label_at = at + RECORD_BYTES + 8 * ndim
        payload_at = label_at + align8(label_bytes)
        end = payload_at + payload_bytes
        size = align8(end - at)
        if its_position != position or size > room:
            return None
        if size > len(data) - at:
            return _Found(size, whole=False)
        if zlib.crc32(memoryview(data)[at + CRC_FROM : end]) != crc:
            return None
        if seq < self.next_seq:
            return _Found(size)
        try:
            shape = struct.unpack_from(f"<{ndim}q", data, at + RECORD_BYTES)
            name, form_ = DTYPE_NAMES[dtype], Layout(code)
            coalesced = bool(flags & COALESCED)
            payload = data[payload_at:end]
            array = to_payload(form_, name, shape, coalesced, payload)
        except (ValueError, IndexError, TypeError, struct.error):
            return None
        label = data[label_at : label_at + label_bytes]
        return _Found(
            size, Record(seq, kind, t_ns, label, array, name, form_, shape, coalesced, payload)
        )

    def _read_fixed(self) -> int:
        """Check the first page; the ring's capacity."""
        fixed = os.pread(self._fd, FIXED.size + FIXED_CRC.size, 0)
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
        size = os.fstat(self._fd).st_size
        if size != ring_at + capacity:
            raise QueueFileError(
                f"{self.path} is truncated: {size} bytes instead of {ring_at + capacity}"
            )
        return int(capacity)

    def _head(self) -> _Head:
        for _ in range(_RETRIES):
            reserved, *slots = LIVE.unpack(self._pread(LIVE.size, LIVE_AT))
            next_seq, committed = max(_whole_slot(*slots[:3]), _whole_slot(*slots[3:]))
            # Read in one go with the slots, ``reserved`` can be one put older than they are.
            reserved = max(reserved, committed)
            if next_seq >= 0 and reserved - committed <= 2 * self.capacity and reserved % 8 == 0:
                return _Head(reserved, next_seq, committed)
        raise QueueFileError(f"the header of {self.path} is damaged")

    def _pread(self, size: int, at: int) -> bytes:
        data = os.pread(self._fd, size, at)
        if len(data) < size:
            raise QueueFileError(f"{self.path} is truncated")
        return data


def _whole_slot(next_seq: int, position: int, check: int) -> tuple[int, int]:
    """(next seq, end position) of a commit slot; (-1, 0) where it is torn or damaged."""
    whole = check == check_word(next_seq, position) and position % 8 == 0
    return (next_seq, position) if whole else (-1, 0)


def _find(data: bytes, at: int, start: int) -> int:
    """Where from ``at`` on a record may begin: a magic number with its own position behind it."""
    while True:
        at = data.find(RECORD_MAGIC_BYTES, at)
        if at < 0:
            return len(data)
        if at % 8 == 0:
            position = data[at + 8 : at + 16]
            if len(position) < 8 or int.from_bytes(position, "little") == start + at:
                return at
        at += 1
