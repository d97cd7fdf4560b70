"""Reader of a queue file: records and pulse, read with ``pread``. NumPy, never torch.

Reads are plain file reads into this process's own memory, so the rank is never affected. If the
file is truncated, a read raises an error, whereas access to a mapped file would end the process
with SIGBUS. Readers are independent of each other.

Decode a record's payload bytes into NumPy arrays. NumPy only; never torch. Types that NumPy does
not have are widened exactly: bfloat16 and float8 to float32, complex32 to complex64. Arrays are
read-only views of the record's own copy of the bytes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ltui.training.shared.record_types import PulseState
from ltui.training.tensor_queue.pulse_block import PULSE_BYTES, parse_pulse
from ltui.training.tensor_queue.queue_file import (
    COALESCED,
    CRC_FROM,
    DTYPE_NAMES,
    PAD,
    PAD_MAGIC,
    PULSE_AT,
    RECORD,
    RECORD_BYTES,
    RECORD_MAGIC,
    RING_AT,
    Head,
    Layout,
    QueueFile,
    align8,
    find_record,
    pad_word,
    split_parts,
)

Array = npt.NDArray[Any]

_STORED = {
    "bfloat16": "<u2",
    "complex32": "<u4",
    "qint8": "<i1",
    "quint8": "<u1",
    "qint32": "<i4",
    "complex64": "<c8",
    "complex128": "<c16",
    "bool": "|b1",
}
"""NumPy type of the bytes on the wire, for dtypes where the name does not determine it."""


@dataclass(frozen=True, slots=True)
class SparseArray:
    """Parts of a sparse tensor: ``indices`` (2-D for COO), ``values`` and, except for COO,
    ``compressed``."""

    layout: Layout
    shape: tuple[int, ...]
    indices: Array
    """COO: int64 (sparse dimensions, entries). Other layouts: the plain (column or row) indices."""
    values: Array
    compressed: Array | None = None
    """CSR and BSR: row pointers; CSC and BSC: column pointers; COO: ``None``."""
    coalesced: bool = False


@dataclass(frozen=True, slots=True)
class QuantizedArray:
    """Integers and the affine map from them to the represented numbers."""

    values: Array
    scale: Array
    """0-D, or one scale for each slice along ``axis``."""
    zero_point: Array
    axis: int | None = None

    def dequantized(self) -> npt.NDArray[np.float32]:
        """Return ``(values - zero_point) * scale`` in float32."""
        shape = [1] * self.values.ndim
        if self.axis is not None:
            shape[self.axis] = -1
        scale = self.scale.reshape(shape).astype(np.float64)
        zero_point = self.zero_point.reshape(shape)
        return np.asarray((self.values - zero_point) * scale, dtype=np.float32)


Payload = Array | SparseArray | QuantizedArray


def to_array(dtype: str, shape: Sequence[int], data: bytes) -> Array:
    """Return the row-major elements as an array.

    Raises ``ValueError`` if the number of bytes does not match the shape.
    """
    flat = np.frombuffer(data, dtype=_stored(dtype))
    widen = _WIDEN.get(dtype)
    return (flat if widen is None else widen(flat)).reshape(shape)


def to_payload(
    layout: Layout, dtype: str, shape: tuple[int, ...], coalesced: bool, payload: bytes
) -> Payload:
    """Return the array of a record as the type that belongs to its layout."""
    if layout is Layout.NONE:
        return np.empty(0)
    if layout is Layout.STRIDED:
        if dtype == "float64" and len(shape) == 1:
            # The row of a step is by far the most frequent record.
            row = np.frombuffer(payload)
            if row.size == shape[0]:
                return row
        return to_array(dtype, shape, payload)
    arrays = [to_array(*part) for part in split_parts(payload)]
    if layout is Layout.COO:
        indices, values = arrays
        return SparseArray(layout, shape, indices, values, coalesced=coalesced)
    if layout in (Layout.QUANTIZED_TENSOR, Layout.QUANTIZED_CHANNEL):
        values, scale, zero_point, *axis = arrays
        return QuantizedArray(values, scale, zero_point, int(axis[0]) if axis else None)
    compressed, indices, values = arrays
    return SparseArray(layout, shape, indices, values, compressed)


@cache
def _stored(dtype: str) -> np.dtype[Any]:
    if dtype.startswith("float8"):
        return np.dtype("<u1")
    stored: np.dtype[Any] = np.dtype(_STORED.get(dtype) or dtype).newbyteorder("<")
    return stored


@cache
def _float8_values(dtype: str) -> Array:
    """Return all 256 values of an eight-bit format such as e4m3fn, e5m2 or e4m3fnuz."""
    number_format = dtype.removeprefix("float8_")
    bits = np.arange(256)
    if number_format == "e8m0fnu":
        values = np.ldexp(1.0, bits - 127)
        values[255] = np.nan
        return values.astype(np.float32)
    exponent_bits, mantissa_bits = int(number_format[1]), int(number_format[3])
    unsigned_zero = number_format.endswith("fnuz")
    bias = (1 << (exponent_bits - 1)) - (0 if unsigned_zero else 1)
    exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = bits & ((1 << mantissa_bits) - 1)
    significand = np.where(exponent == 0, mantissa, mantissa + (1 << mantissa_bits))
    values = np.ldexp(significand.astype(float), np.maximum(exponent, 1) - bias - mantissa_bits)
    values = np.where(bits & 0x80, -values, values)
    if unsigned_zero:
        values[0x80] = np.nan
    elif number_format == "e5m2":
        top = exponent == 0x1F
        values = np.where(top & (mantissa == 0), np.copysign(np.inf, values), values)
        values = np.where(top & (mantissa != 0), np.nan, values)
    else:
        values[(bits & 0x7F) == 0x7F] = np.nan
    return values.astype(np.float32)


_WIDEN: dict[str, Callable[[Array], Array]] = {
    "bfloat16": lambda bits: (bits.astype(np.uint32) << 16).view(np.float32),
    "complex32": lambda bits: bits.view("<f2").astype(np.float32).view(np.complex64),
    **{
        name: lambda bits, name=name: _float8_values(name)[bits]  # type: ignore[misc]
        for name in DTYPE_NAMES
        if name.startswith("float8")
    },
}
"""How the values of types that NumPy does not have are widened exactly."""


_CHUNK_BYTES = 256 << 10
_RETRIES = 16
_LAYOUTS = {int(layout): layout for layout in Layout}
_MAX_REREADS = 3
"""Number of times to read a record again that seems damaged, before it is skipped."""


@dataclass(frozen=True, slots=True)
class Record:
    """One complete and verified record. It owns its bytes."""

    seq: int
    """Sequence number, counted from 0 without gaps. A gap means that records were missed."""
    kind: int
    t_ns: int
    """CLOCK_MONOTONIC time in ns of the machine on which the file is read."""
    label: bytes
    array: Payload
    """Read-only. Empty if the record has only a label."""
    dtype: str = ""
    """Torch's name of the original element type, such as ``bfloat16``; empty without a tensor."""
    layout: Layout = Layout.NONE
    shape: tuple[int, ...] = ()
    coalesced: bool = False
    payload: bytes = b""
    """The original bytes."""
    wall_offset_s: float = 0.0
    """Seconds to add to a unix time in the label or in the payload, because the clock of the
    rank's node differs; 0 for a rank of this machine."""


@dataclass(frozen=True, slots=True)
class Poll:
    """Result of one ``QueueReader.poll``."""

    records: tuple[Record, ...]
    missed: int
    """Number of lost records between the previous poll and the last record of this one."""


class _Entry(NamedTuple):
    """Entry at a position of the ring: its size in bytes, and its record.

    ``record`` is None for a pad and for a record that must be skipped. ``complete`` is False if the
    copied bytes hold only the beginning of the entry.
    """

    size: int
    record: Record | None = None
    complete: bool = True


class QueueReader:
    """An independent cursor over one rank's queue file.

    ``from_seq`` is the sequence number of the first record to read; records that have been
    overwritten since count as missed. ``None`` starts at the oldest record that is still available.
    Raises ``OSError`` if the file can't be opened, and ``QueueFileError`` if it is no queue, is
    damaged beyond reading or has a newer layout.
    """

    def __init__(self, path: Path, *, from_seq: int | None = None) -> None:
        self.path = path
        self.next_seq = from_seq or 0
        """Expected sequence number of the next record."""
        self._attached = from_seq is not None
        self._pos = 0
        self._searching = False
        self._chunk_bytes = _CHUNK_BYTES
        self._rereads = 0
        self._file = QueueFile(path)
        self.capacity = self._file.capacity

    def poll(self, limit: int = 2000) -> Poll:
        """Return at most ``limit`` records in order, and the number of records that were missed."""
        records: list[Record] = []
        missed = 0
        head = self._file.head()
        while self._pos < head.committed and len(records) < limit:
            missed += self._read_chunk(head, records, limit)
        if self._pos >= head.committed:
            # Committed but not readable: damaged, overwritten meanwhile, or skipped by the writer.
            missed += self._expect(head.next_seq)
            self._searching = self._searching and self._pos > head.committed
        return Poll(tuple(records), missed)

    def pulse(self) -> PulseState | None:
        """Return the current status of the rank.

        Return ``None`` if it was never written, or if no consistent copy was read after retries.
        """
        _, _, node, offset_ns, wall_offset_s = self._file.origin
        for _ in range(_RETRIES):
            state = parse_pulse(
                self._file.pread(PULSE_BYTES, PULSE_AT), node, offset_ns, wall_offset_s
            )
            if state is not None:
                return state
        return None

    def replaced(self) -> bool:
        """Return True if the path names another file now, because the rank was restarted.

        Drain this reader, then open a new one.
        """
        return self._file.replaced()

    def close(self) -> None:
        """Close the file. A second call has no effect."""
        self._file.close()

    def _read_chunk(self, head: Head, records: list[Record], limit: int) -> int:
        """Copy bytes from the cursor, append their complete records and advance the cursor.

        Return the number of missed records.
        """
        capacity = self.capacity
        oldest = head.reserved - capacity
        if self._pos < oldest:
            self._pos, self._searching = oldest, True
        start = self._pos
        stop = min(head.committed, start - start % capacity + capacity)
        if stop <= start:
            return 0
        data = self._file.pread(min(stop - start, self._chunk_bytes), RING_AT + start % capacity)
        # Bytes that the writer has reserved by now may be partly overwritten in the copy.
        void = self._file.reserved() - capacity - start
        at = 0
        if void > 0:
            at, self._searching = min(void, len(data)), True
        missed = 0
        while at < len(data) and len(records) < limit:
            if self._searching:
                at = find_record(data, at, start)
                if at == len(data):
                    break
            entry = self._parse_entry(data, at, start, stop)
            if entry is None:
                if not self._searching and self._rereads < _MAX_REREADS:
                    self._rereads += 1
                    break
                self._searching = True
                at += 8
            elif not entry.complete:
                self._chunk_bytes = max(_CHUNK_BYTES, entry.size)
                break
            else:
                self._searching, self._rereads, self._chunk_bytes = False, 0, _CHUNK_BYTES
                at += entry.size
                if entry.record is not None:
                    missed += self._expect(entry.record.seq)
                    self.next_seq = entry.record.seq + 1
                    records.append(entry.record)
        self._pos = start + at
        return missed

    def _expect(self, seq: int) -> int:
        """Expect ``seq`` as the next record and return the number of records skipped by that."""
        gap = seq - self.next_seq
        if gap <= 0:
            return 0
        self.next_seq = seq
        first, self._attached = not self._attached, True
        return 0 if first else gap

    def _parse_entry(self, data: bytes, at: int, start: int, stop: int) -> _Entry | None:
        """Parse the entry at ``data[at]``, position ``start + at``; ``None`` if it is not valid."""
        position = start + at
        available = stop - position
        magic, crc = PAD.unpack_from(data, at)
        if magic == PAD_MAGIC and crc == pad_word(position):
            return _Entry(available)
        if magic != RECORD_MAGIC or available < RECORD_BYTES:
            return None
        if len(data) - at < RECORD_BYTES:
            return _Entry(RECORD_BYTES, complete=False)
        fields = RECORD.unpack_from(data, at)
        stored_position, seq, t_ns, payload_bytes, label_bytes, kind = fields[2:8]
        dtype_code, layout_code, ndim, flags = fields[8:12]
        label_at = at + RECORD_BYTES + 8 * ndim
        payload_at = label_at + align8(label_bytes)
        end = payload_at + payload_bytes
        size = align8(end - at)
        if stored_position != position or size > available:
            return None
        if size > len(data) - at:
            return _Entry(size, complete=False)
        if zlib.crc32(memoryview(data)[at + CRC_FROM : end]) != crc:
            return None
        if seq < self.next_seq:
            return _Entry(size)
        try:
            shape = struct.unpack_from(f"<{ndim}q", data, at + RECORD_BYTES)
            dtype, layout = DTYPE_NAMES[dtype_code], _LAYOUTS[layout_code]
            coalesced = bool(flags & COALESCED)
            payload = data[payload_at:end]
            array = to_payload(layout, dtype, shape, coalesced, payload)
        except (ValueError, IndexError, KeyError, TypeError, struct.error):
            return None
        label = data[label_at : label_at + label_bytes]
        origin = self._file.origin
        record = Record(
            seq, kind, t_ns + origin.clock_offset_ns, label, array, dtype, layout, shape,
            coalesced, payload, origin.wall_offset_s,
        )  # fmt: skip
        return _Entry(size, record)
