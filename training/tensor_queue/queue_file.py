"""A queue file: its byte layout, the frame of one record, and read access by ``pread``.

Standard library only: no torch, no NumPy, no clock. A read of a truncated file raises an error,
whereas access to a mapped file would end the process with SIGBUS.

```
0     page 0: fixed header, the reserved position, two commit slots, the origin
4096  page 1: the pulse (pulse_block.py)
8192  the ring, ``capacity`` bytes
```

A position counts all bytes written since the file was created. ``position % capacity`` is the
offset in the ring, and no position occurs twice. A record is contiguous. If it would cross the end
of the ring, a pad word is written there and the record starts at the beginning of the ring. The
single writer follows this protocol:

1. Store ``reserved``, the end position of the record that it is about to write. Bytes at positions
   below ``reserved - capacity`` are void from then on.
2. Write the record.
3. Write the commit slot ``(next seq, end position, check word)``. Two slots alternate, so that a
   writer killed while it writes one leaves the other intact.

A reader copies bytes out, then reads ``reserved`` again and drops the bytes that may have been
overwritten meanwhile. A CRC-32 and the position stored in each record detect the remaining cases:
reordered stores and damage. All numbers are little-endian.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from struct import Struct, unpack_from
from typing import NamedTuple

FILE_MAGIC = b"LTUIRING"
LAYOUT_VERSION = 1
"""Version of the layout. Increase it with every change that an older reader would misread, which
includes a new dtype or layout code."""

PAGE_BYTES = 4096
PULSE_AT = PAGE_BYTES
RING_AT = 2 * PAGE_BYTES
MIN_CAPACITY_BYTES = PAGE_BYTES

FIXED = Struct("<8sIIQQQ")
"""File magic, layout version, unused, capacity, offset of the pulse, offset of the ring."""
FIXED_CRC = Struct("<I")
RESERVED_AT = 64
SLOTS_AT = (128, 192)
LIVE_AT = RESERVED_AT
LIVE = Struct("<Q56xQQQ40xQQQ40x")
"""At ``LIVE_AT``: the reserved position, then both commit slots. Each is on its own cache line."""
SLOT = Struct("<QQQ")
"""Next sequence number, end position, check word."""
ORIGIN_AT = 256
ORIGIN = Struct("<Qqqqd")
"""The fields of ``Origin``. They are zero in files of older versions of ltui."""
CLOCKS_AT = ORIGIN_AT + 24
CLOCKS = Struct("<qd")
"""The last two fields of ``Origin``, which the writer of a mirror changes. Each is one word."""

RECORD = Struct("<IIQQqQIHBBBBHxxxx")
"""Magic, CRC-32 of everything after it, position, seq, t_ns, payload bytes, label bytes, kind,
dtype, layout, number of dimensions, flags, unused. The shape as int64, the label, zero to seven
padding bytes and the payload follow."""
RECORD_BYTES = RECORD.size
RECORD_MAGIC = 0x7152544C
RECORD_MAGIC_BYTES = RECORD_MAGIC.to_bytes(4, "little")
CRC_AT = 4
CRC_FROM = 8
"""Offset in the record where the bytes covered by the CRC begin. They end with the payload."""
PAD = Struct("<II")
"""Magic, low half of ``position / 8``. The rest of the ring up to its end is unused."""
PAD_MAGIC = 0x7150544C

PART = Struct("<BBHIQ")
"""Header of one array in the payload of a layout with several arrays: dtype, number of dimensions,
unused, unused, data bytes. The shape as int64 and the data, padded to eight bytes, follow."""

CHECK_FACTOR, CHECK_TERM, CHECK_MASK = 0x9E3779B97F4A7C15, 0x6C747569, (1 << 64) - 1
"""Constants of ``check_word``, for code on the fast path that computes it inline."""


class Origin(NamedTuple):
    """Where and when the rank created its queue file, and how its clocks differ from ours."""

    file_id: int = 0
    """Random number by which a copy of the file is recognised; 0 if unknown."""
    created_ns: int = 0
    """CLOCK_MONOTONIC time in ns, on the rank's node, when the rank created the file."""
    node: int = 0
    """Number of the node on which the rank runs. It is 0 except in a mirror."""
    clock_offset_ns: int = 0
    """Nanoseconds to add to the CLOCK_MONOTONIC times in the file."""
    wall_offset_s: float = 0.0
    """Seconds to add to the unix times in the file."""


class QueueFileError(ValueError):
    """The file is no queue file, is truncated, is damaged beyond reading, or has a newer layout."""


class Layout(IntEnum):
    """Encoding of the tensor in the payload. Wire numbers: append, never renumber."""

    NONE = 0
    """The record has a label and no tensor."""
    STRIDED = 1
    """The elements in row-major order."""
    COO = 2
    """Parts: indices, values. The flag ``COALESCED`` applies."""
    CSR = 3
    """Parts: compressed indices, plain indices, values. CSC, BSR and BSC have the same parts."""
    CSC = 4
    BSR = 5
    BSC = 6
    QUANTIZED_TENSOR = 7
    """Parts: integers, scale, zero point."""
    QUANTIZED_CHANNEL = 8
    """Parts: integers, scales, zero points, axis."""


COALESCED = 1
"""Flag of a ``COO`` record with a coalesced tensor."""

DTYPE_NAMES = (
    *("", "float64", "float32", "float16", "bfloat16", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64", "bool", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("qint8", "quint8", "qint32"),
)
"""Torch's dtype names. The index of a name is its wire code. Append only."""
DTYPE_CODES = {name: code for code, name in enumerate(DTYPE_NAMES)}
FLOAT64_CODE = DTYPE_CODES["float64"]


def first_page(capacity: int, origin: Origin) -> bytes:
    """Return page 0 of an empty queue file."""
    fixed = FIXED.pack(FILE_MAGIC, LAYOUT_VERSION, 0, capacity, PULSE_AT, RING_AT)
    page = bytearray(PAGE_BYTES)
    page[: len(fixed)] = fixed
    FIXED_CRC.pack_into(page, len(fixed), zlib.crc32(fixed))
    SLOT.pack_into(page, SLOTS_AT[0], 0, 0, check_word(0, 0))
    ORIGIN.pack_into(page, ORIGIN_AT, *origin)
    return bytes(page)


def find_record(data: bytes, at: int, start: int) -> int:
    """Return the first offset from ``at`` at which a record may begin.

    ``data`` is a copy of the ring from position ``start`` on. A record begins with a magic number,
    followed by its own position. Return ``len(data)`` if there is none.
    """
    while True:
        at = data.find(RECORD_MAGIC_BYTES, at)
        if at < 0:
            return len(data)
        if at % 8 == 0:
            position = data[at + 8 : at + 16]
            if len(position) < 8 or int.from_bytes(position, "little") == start + at:
                return at
        at += 1


def align8(size: int) -> int:
    """Round ``size`` up to a multiple of eight."""
    return (size + 7) & ~7


def split_parts(payload: bytes) -> Iterator[tuple[str, tuple[int, ...], bytes]]:
    """Yield dtype, shape and data of each array in the payload of a layout with several arrays."""
    at = 0
    while at < len(payload):
        code, ndim, _, _, size = PART.unpack_from(payload, at)
        at += PART.size
        shape = unpack_from(f"<{ndim}q", payload, at)
        at += 8 * ndim
        yield DTYPE_NAMES[code], shape, payload[at : at + size]
        at += align8(size)


def check_word(next_seq: int, position: int) -> int:
    """Return the third word of a commit slot, by which a torn or damaged slot is detected."""
    return (position + next_seq * CHECK_FACTOR + CHECK_TERM) & CHECK_MASK


def pad_word(position: int) -> int:
    """Return the second half of the pad word at ``position``."""
    return (position >> 3) & 0xFFFFFFFF


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
