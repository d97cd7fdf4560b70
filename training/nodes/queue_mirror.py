"""Copies of other nodes' queue files in the run directory, which readers read like local ones.

A mirror has the bytes of the rank's file at the same positions of a ring of the same size, and is
written by the protocol of ``tensor_queue/queue_file.py``: first ``reserved``, then the records,
then a commit slot. Only page 0 differs: it names the node and has the offsets of its clocks. The
position up to which the file is mirrored is the end position in its commit slot, so a head that is
started again continues there.

The mirror is written by ``pwrite``, not by mapped memory: a full disk is an error of one write, and
the pages are not memory of this process.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ltui.training.lifecycle.rank_queue_poller import allow_queues_of
from ltui.training.nodes.queue_tail import QueueChunk, QueuePosition
from ltui.training.tensor_queue.pulse_block import PULSE_BYTES, PulseMirror
from ltui.training.tensor_queue.queue_file import (
    CLOCKS,
    CLOCKS_AT,
    PULSE_AT,
    RESERVED_AT,
    RING_AT,
    SLOT,
    SLOTS_AT,
    Origin,
    QueueFile,
    QueueFileError,
    check_word,
    first_page,
)

_AHEAD = 64
"""Fraction of the ring, as a divisor, that is reserved ahead, so that few chunks need to do it."""


class QueueMirror:
    """Writes the mirror of one rank of another node."""

    def __init__(self, path: Path, node: int) -> None:
        """Continue with the file at ``path`` if it is a mirror of this node's rank.

        Raises ``OSError`` and ``QueueFileError``.
        """
        if node < 1:
            raise ValueError(f"node {node} has no mirrors: it writes its queue files itself")
        self._path = path
        self._node = node
        self._file: _MirrorFile | None = None
        self._refused: QueuePosition | None = None
        present = _origin(path)
        if present is not None and present.node == node:
            self._file = _MirrorFile(path)

    @property
    def position(self) -> QueuePosition | None:
        """How far the rank's file is mirrored, to acknowledge it to the agent; None at first."""
        if self._refused is not None:
            return self._refused
        return None if self._file is None else self._file.position

    def apply(self, chunk: QueueChunk, mono_offset_ns: int = 0, wall_offset_s: float = 0.0) -> None:
        """Store a chunk. Chunks may come late, several times and in any order.

        The offsets are added to the times of the rank's node. Raises ``OSError`` if the file can't
        be written: the next chunk then stores the same records.
        """
        file = self._file
        if file is None or chunk.file_id != file.origin.file_id:
            origin = Origin(
                chunk.file_id, chunk.created_ns, self._node, mono_offset_ns, wall_offset_s
            )
            present = _origin(self._path)
            if present is not None and present.file_id == chunk.file_id:
                file = _MirrorFile(self._path)
            elif present is not None and _creation_ns(present) >= _creation_ns(origin):
                # The file of an earlier worker. It is acknowledged, so that it is not sent again.
                self._refused = QueuePosition(chunk.file_id, chunk.end)
                return
            else:
                _create(self._path, chunk.capacity, origin)
                file = _MirrorFile(self._path)
            self.close()
            self._file = file
        self._refused = None
        if chunk.capacity != file.capacity:
            raise QueueFileError(f"{self._path} has another capacity than its source")
        file.set_clocks(mono_offset_ns, wall_offset_s)
        file.append(chunk)
        file.set_pulse(chunk.pulse)

    def close(self) -> None:
        """Close the file and keep it. A second call has no effect."""
        if self._file is not None:
            self._file.close()
            self._file = None


class QueueMirrors:
    """The mirrors of all ranks of one attempt that run on other nodes."""

    def __init__(self, queue_dir: Path) -> None:
        """``queue_dir`` is the folder of the head's own queue files. It is created if missing."""
        self._dir = queue_dir
        queue_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._mirrors: dict[int, dict[int, QueueMirror]] = {}
        """node -> rank -> mirror."""

    def apply(
        self,
        node: int,
        chunks: Mapping[int, QueueChunk],
        mono_offset_ns: int = 0,
        wall_offset_s: float = 0.0,
    ) -> None:
        """Store the chunks of a node's ranks. An error of one rank does not affect the others."""
        mirrors = self._mirrors.setdefault(node, {})
        for rank, chunk in chunks.items():
            # What could not be written is not acknowledged, so the agent sends it again.
            with contextlib.suppress(OSError, QueueFileError):
                mirror = mirrors.get(rank)
                if mirror is None:
                    allow_queues_of(1 + sum(len(m) for m in self._mirrors.values()))
                    path = self._dir / f"rank-{rank:05d}.queue"
                    mirror = mirrors[rank] = QueueMirror(path, node)
                mirror.apply(chunk, mono_offset_ns, wall_offset_s)

    def positions(self, node: int) -> dict[int, QueuePosition]:
        """Return how far each rank of a node is mirrored, to acknowledge it to the agent."""
        mirrors = self._mirrors.get(node, {})
        positions = {rank: mirror.position for rank, mirror in mirrors.items()}
        return {rank: place for rank, place in positions.items() if place is not None}

    def close(self) -> None:
        """Close every file."""
        for mirrors in self._mirrors.values():
            for mirror in mirrors.values():
                mirror.close()
        self._mirrors.clear()


class _MirrorFile:
    """An open mirror file and what it contains."""

    def __init__(self, path: Path) -> None:
        self._file = QueueFile(path, os.O_RDWR)
        self._fd = self._file.fd
        self.origin = self._file.origin
        self.capacity = self._file.capacity
        self._reserved, self._next_seq, self._end, self._slot = self._file.head()
        self._pulse = PulseMirror(self._file.pread(PULSE_BYTES, PULSE_AT))
        self._clocks = self.origin.clock_offset_ns, self.origin.wall_offset_s

    @property
    def position(self) -> QueuePosition:
        return QueuePosition(self.origin.file_id, self._end)

    def append(self, chunk: QueueChunk) -> None:
        """Store the records of ``chunk`` that follow those in the file."""
        start, data, end = chunk.start, chunk.data, chunk.end
        if end < self._end or (end == self._end and chunk.next_seq <= self._next_seq):
            return
        capacity = self.capacity
        lowest_reserved = end
        if start > self._end:
            if chunk.reserved - capacity <= self._end:
                return  # A chunk before this one is missing. The agent sends it again.
            # The rank has overwritten the records between. What is there now is void.
            lowest_reserved = max(end, start + capacity)
        elif start < self._end:
            data, start = data[self._end - start :], self._end
        if lowest_reserved > self._reserved:
            ahead = capacity // _AHEAD // 8 * 8 if len(data) < capacity // 4 else 0
            self._reserved = lowest_reserved + ahead
            os.pwrite(self._fd, self._reserved.to_bytes(8, "little"), RESERVED_AT)
        if data:
            at = start % capacity
            first = capacity - at
            if len(data) <= first:
                self._write(data, RING_AT + at)
            else:
                self._write(data[:first], RING_AT + at)
                self._write(data[first:], RING_AT)
        slot = SLOT.pack(chunk.next_seq, end, check_word(chunk.next_seq, end))
        self._write(slot, SLOTS_AT[self._slot ^ 1])
        self._slot ^= 1
        self._next_seq, self._end = chunk.next_seq, end

    def set_pulse(self, packed: bytes) -> None:
        """Store a packed pulse unless it is older than the present one."""
        if self._pulse.update(packed):
            self._write(self._pulse.block, PULSE_AT)

    def set_clocks(self, mono_offset_ns: int, wall_offset_s: float) -> None:
        """Store the offsets of the node's clocks."""
        clocks = mono_offset_ns, wall_offset_s
        if clocks != self._clocks:
            self._write(CLOCKS.pack(*clocks), CLOCKS_AT)
            self._clocks = clocks

    def close(self) -> None:
        self._file.close()

    def _write(self, data: bytes | bytearray, at: int) -> None:
        if os.pwrite(self._fd, data, at) < len(data):
            raise OSError(f"{self._file.path} could not be written in full")


def _create(path: Path, capacity: int, origin: Origin) -> None:
    """Create an empty mirror under a temporary name and rename it."""
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        os.fchmod(fd, 0o600)
        # Not allocated: a mirror takes the disk space that its records need.
        os.ftruncate(fd, RING_AT + capacity)
        os.pwrite(fd, first_page(capacity, origin), 0)
        os.pwrite(fd, bytes(RING_AT - PULSE_AT), PULSE_AT)
        os.rename(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    finally:
        os.close(fd)


def _creation_ns(origin: Origin) -> int:
    """Return when the rank created the file, by this machine's CLOCK_MONOTONIC."""
    return origin.created_ns + origin.clock_offset_ns


def _origin(path: Path) -> Origin | None:
    """Return the origin of the file at ``path``; None if there is none or it cannot be read."""
    try:
        file = QueueFile(path)
    except (FileNotFoundError, QueueFileError):
        return None
    file.close()
    return file.origin
