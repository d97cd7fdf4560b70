"""The bytes of a queue file: where things stand in it, and how one record is framed.

Standard library only; it knows neither torch nor NumPy, neither files nor clocks.

```
0     page 0: fixed header, the reserved position, two commit slots
4096  page 1: the pulse (pulse.py)
8192  the ring, ``capacity`` bytes
```

Positions count bytes ever written, so ``position % capacity`` is the place in the ring and a
position never comes twice. A record stands in one piece; where it would run over the ring's end, a
pad word is put there and the record starts the next lap. The protocol of the single writer:

1. store ``reserved`` = the end of what it is about to write: bytes at positions below
   ``reserved - capacity`` are now void;
2. write the record;
3. write the commit slot ``(next seq, end position, check word)``. There are two slots, used in
   turn, so that a writer killed half way through one leaves the other.

A reader copies bytes out, then reads ``reserved`` again and drops what may have been overwritten
meanwhile. CRC-32 and the record's own position guard what is left: machines that reorder stores,
and damage. All numbers are little-endian.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct

FILE_MAGIC = b"LTUIRING"
LAYOUT_VERSION = 1
"""Raised with every change that an older reader would misread, a new dtype or layout code
included."""

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
"""From ``LIVE_AT``: the reserved position, then both commit slots, each on a cache line of its
own."""
SLOT = Struct("<QQQ")
"""Next sequence number, end position, check word."""

RECORD = Struct("<IIQQqQIHBBBBHxxxx")
"""Magic, CRC-32 of all that follows it, position, seq, t_ns, payload bytes, label bytes, kind,
dtype, layout, dimensions, flags, unused. Then the shape as int64, the label, zero to seven bytes,
the payload."""
RECORD_BYTES = RECORD.size
RECORD_MAGIC = 0x7152544C
RECORD_MAGIC_BYTES = RECORD_MAGIC.to_bytes(4, "little")
CRC_AT = 4
CRC_FROM = 8
"""Offset in the record from which the CRC counts; it ends with the payload."""
PAD = Struct("<II")
"""Magic, low half of ``position / 8``: nothing more in this lap."""
PAD_MAGIC = 0x7150544C

PART = Struct("<BBHIQ")
"""In the payload of a layout made of several arrays: dtype, dimensions, unused, unused, data bytes.
Then the shape as int64 and the data, padded to eight."""

CHECK_FACTOR, CHECK_TERM, CHECK_MASK = 0x9E3779B97F4A7C15, 0x6C747569, (1 << 64) - 1
"""Of ``check_word``, for who has no time to call it."""


class QueueFileError(ValueError):
    """Not a queue file, truncated, damaged beyond reading, or of a newer layout."""


class Layout(IntEnum):
    """How the payload holds the tensor. Wire numbers: append, never renumber."""

    NONE = 0
    """No tensor, only a label."""
    STRIDED = 1
    """The elements, row-major."""
    COO = 2
    """Parts: indices, values. Flag ``COALESCED``."""
    CSR = 3
    """Parts: compressed indices, plain indices, values; so for the next three."""
    CSC = 4
    BSR = 5
    BSC = 6
    QUANTIZED_TENSOR = 7
    """Parts: integers, scale, zero point."""
    QUANTIZED_CHANNEL = 8
    """Parts: integers, scales, zero points, axis."""


COALESCED = 1
"""Flag of a ``COO`` record."""

DTYPE_NAMES = (
    "",
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
    "complex32",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "qint8",
    "quint8",
    "qint32",
)
"""Torch's names; the index is the code on the wire. Append only."""
DTYPE_CODES = {name: code for code, name in enumerate(DTYPE_NAMES)}
FLOAT64_CODE = DTYPE_CODES["float64"]


def align8(size: int) -> int:
    """The next multiple of eight."""
    return (size + 7) & ~7


def check_word(next_seq: int, position: int) -> int:
    """What a commit slot's third word must be, so that a torn or damaged slot shows."""
    return (position + next_seq * CHECK_FACTOR + CHECK_TERM) & CHECK_MASK


def pad_word(position: int) -> int:
    """The second half of the pad word at ``position``."""
    return (position >> 3) & 0xFFFFFFFF
