"""Writer of the ring: creates the queue file and frames records into it. No torch, no NumPy.

After ``create``, every call only stores to mapped memory. It takes no lock, does no I/O and never
waits. One thread at a time may write. The writer's state advances before a record is published. A
``KeyboardInterrupt`` between two bytecodes can therefore lose a sequence number, but can never
overwrite a published record.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from struct import Struct

from ltui.training.tensor_queue.queue_file import (
    CHECK_FACTOR,
    CHECK_MASK,
    CHECK_TERM,
    CRC_AT,
    CRC_FROM,
    FLOAT64_CODE,
    MIN_CAPACITY_BYTES,
    PAD,
    PAD_MAGIC,
    PAGE_BYTES,
    RECORD,
    RECORD_BYTES,
    RECORD_MAGIC,
    RESERVED_AT,
    RING_AT,
    SLOT,
    SLOTS_AT,
    Layout,
    Origin,
    align8,
    check_word,
    first_page,
    pad_word,
)

Chunk = bytes | tuple[int, int]
"""Payload bytes, or (address, length) of memory that the caller keeps alive."""

_RESERVED_WORD = RESERVED_AT // 8
_SLOT_WORDS = (SLOTS_AT[0] // 8, SLOTS_AT[1] // 8)
_SHAPE = Struct("<q")
ROW_AT = RECORD_BYTES + _SHAPE.size
"""Offset of the vector in the record of a ``Row``."""
_HEAD_BYTES = 32
"""Magic with CRC, position, seq, t_ns: four words."""


class RingWriter:
    """Writes framed records into the ring of one mapped queue file."""

    __slots__ = (
        "_address",
        "_heads",
        "_muted",
        "_pos",
        "_seq",
        "_words",
        "capacity",
        "mapped",
        "view",
    )

    def __init__(self, mapped: mmap.mmap, capacity: int) -> None:
        self.mapped = mapped
        self.capacity = capacity
        self.view = memoryview(mapped)
        self._words = self.view.cast("Q")
        # The buffer export is released at once. The address stays valid while the file is mapped.
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._pos = 0
        self._seq = 0
        self._muted = False
        self._heads: dict[int, Struct] = {}

    @classmethod
    def create(cls, path: Path, capacity_bytes: int) -> RingWriter:
        """Create the queue file of ``capacity_bytes`` rounded up to pages.

        The file is completed under a temporary name and then renamed, so that no reader sees an
        incomplete file. Raises ``ValueError`` if ``capacity_bytes`` is too small, and ``OSError``.
        """
        if capacity_bytes < MIN_CAPACITY_BYTES:
            raise ValueError(
                f"a queue of {capacity_bytes} bytes is too small, "
                f"the minimum is {MIN_CAPACITY_BYTES}"
            )
        capacity = -(-capacity_bytes // PAGE_BYTES) * PAGE_BYTES
        fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            os.fchmod(fd, 0o600)
            _allocate(fd, RING_AT + capacity)
            file_id = int.from_bytes(os.urandom(8), "little") or 1
            origin = Origin(file_id, time.monotonic_ns())
            os.pwrite(fd, first_page(capacity, origin), 0)
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            mapped = mmap.mmap(fd, RING_AT + capacity, flags=flags)
            os.rename(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        finally:
            os.close(fd)
        return cls(mapped, capacity)

    def row(self, kind: int, count: int, label_bytes: int = 0) -> Row:
        """Return a reusable row of ``count`` float64 values to fill in place."""
        return Row(self, kind, count, label_bytes)

    def put(
        self,
        kind: int,
        t_ns: int,
        label: bytes,
        chunks: Sequence[Chunk],
        *,
        dtype: int = 0,
        layout: int = Layout.NONE,
        shape: Sequence[int] = (),
        flags: int = 0,
    ) -> None:
        """Publish a record of any layout. The concatenated ``chunks`` are its payload.

        Raises ``ValueError`` if the record does not fit into the ring.
        """
        if self._muted:
            return
        ndim = len(shape)
        payload_bytes = 0
        for chunk in chunks:
            payload_bytes += len(chunk) if isinstance(chunk, bytes) else chunk[1]
        head = self._heads.get(ndim) or self._head(ndim)
        total = head.size + align8(len(label)) + align8(payload_bytes)
        pos = self._reserve(total)
        start = RING_AT + pos % self.capacity
        view = self.view
        head.pack_into(
            view,
            start,
            RECORD_MAGIC,
            0,
            pos,
            self._seq,
            t_ns,
            payload_bytes,
            len(label),
            kind,
            dtype,
            layout,
            ndim,
            flags,
            0,
            *shape,
        )
        at = start + head.size
        if label:
            view[at : at + len(label)] = label
            at += align8(len(label))
        for chunk in chunks:
            if isinstance(chunk, bytes):
                view[at : at + len(chunk)] = chunk
                at += len(chunk)
            elif chunk[1]:
                ctypes.memmove(self._address + at, chunk[0], chunk[1])
                at += chunk[1]
        crc = zlib.crc32(view[start + CRC_FROM : at])
        view[start + CRC_AT : start + CRC_FROM] = crc.to_bytes(4, "little")
        self._commit(pos + total)

    def check_size(self, ndim: int, label: bytes, payload_bytes: int) -> None:
        """Raise ``ValueError`` if such a record does not fit into the ring."""
        head = self._heads.get(ndim) or self._head(ndim)
        self._check_fits(head.size + align8(len(label)) + align8(payload_bytes))

    def skip(self) -> None:
        """Skip one sequence number, by which readers notice that a record was lost."""
        if not self._muted:
            self._commit(self._pos)

    def mute(self) -> None:
        """Disable all writes, because this process is a forked child of the rank."""
        self._muted = True

    def close(self) -> None:
        """Unmap the file and keep it on disk. A second call has no effect.

        Nothing is flushed, because nothing is buffered.
        """
        self._muted = True
        self._words.release()
        self.view.release()
        self.mapped.close()

    def _head(self, ndim: int) -> Struct:
        head = self._heads[ndim] = Struct(f"{RECORD.format}{ndim}q")
        return head

    def _check_fits(self, total: int) -> None:
        if total > self.capacity:
            raise ValueError(
                f"a record of {total} bytes does not fit the queue's {self.capacity} bytes"
            )

    def _reserve(self, total: int) -> int:
        """Mark the next ``total`` bytes as void and return the position where they begin."""
        self._check_fits(total)
        capacity = self.capacity
        pos = self._pos
        at = pos % capacity
        if at + total > capacity:
            lap = pos - at + capacity
            self._words[_RESERVED_WORD] = lap + total
            PAD.pack_into(self.view, RING_AT + at, PAD_MAGIC, pad_word(pos))
            self._pos = lap
            return lap
        self._words[_RESERVED_WORD] = pos + total
        return pos

    def _commit(self, end: int) -> None:
        seq = self._seq + 1
        self._seq = seq
        self._pos = end
        SLOT.pack_into(self.view, SLOTS_AT[seq & 1], seq, end, check_word(seq, end))


class Row:
    """A reusable record of one float64 vector, with a label of constant length or none.

    The complete record is kept in its own memory and copied into the ring by one store. This is
    faster than framing it in place, because the cost of a put between two training steps is mostly
    cache misses.
    """

    __slots__ = ("_checked", "_crc", "_head", "_ring", "fields", "label", "record")

    def __init__(self, ring: RingWriter, kind: int, count: int, label_bytes: int = 0) -> None:
        fields_at = ROW_AT + align8(label_bytes)
        size = fields_at + 8 * count
        self._ring = ring
        self.record = bytearray(size)
        """The complete framed record."""
        RECORD.pack_into(
            self.record, 0, RECORD_MAGIC, 0, 0, 0, 0, 8 * count, label_bytes, kind,
            FLOAT64_CODE, 1, 1, 0, 0,
        )  # fmt: skip
        _SHAPE.pack_into(self.record, RECORD_BYTES, count)
        view = memoryview(self.record)
        self._head = view[:_HEAD_BYTES].cast("Q")
        self._crc = view[CRC_AT:CRC_FROM].cast("I")
        self._checked = view[CRC_FROM:]
        self.label = view[ROW_AT : ROW_AT + label_bytes]
        self.fields = view[fields_at:].cast("d")
        """The vector. Store values into it, then call ``publish``. It keeps its values."""

    def publish(self, t_ns: int) -> None:
        """Copy the record with its current values into the ring."""
        ring = self._ring
        if ring._muted:
            return
        record = self.record
        size = len(record)
        pos = ring._pos
        at = pos % ring.capacity
        words = ring._words
        if at + size > ring.capacity:
            pos = ring._reserve(size)
            at = 0
        else:
            words[_RESERVED_WORD] = pos + size
        end = pos + size
        seq = ring._seq
        head = self._head
        head[1] = pos
        head[2] = seq
        head[3] = t_ns
        self._crc[0] = zlib.crc32(self._checked)
        at += RING_AT
        ring.view[at : at + size] = record
        ring._seq = seq = seq + 1
        ring._pos = end
        # The three stores of a commit slot. Python runs no signal handler between them.
        at = _SLOT_WORDS[seq & 1]
        words[at] = seq
        words[at + 1] = end
        words[at + 2] = (end + seq * CHECK_FACTOR + CHECK_TERM) & CHECK_MASK


def _allocate(fd: int, size: int) -> None:
    """Allocate disk blocks for ``size`` bytes.

    A store to a hole of a sparse file would end the rank with SIGBUS if the disk is full.
    """
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        zeros = bytes(1 << 16)
        for at in range(0, size, len(zeros)):
            os.pwrite(fd, zeros[: size - at], at)
