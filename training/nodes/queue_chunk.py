"""A part of a rank's queue file on its way to another node, and its binary encoding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

from ltui.training.tensor_queue.file_layout import (
    MIN_CAPACITY_BYTES,
    PAGE_BYTES,
    QueueFileError,
)

_CHUNK = Struct("<iHxxQqQQQQI")
"""Rank, pulse bytes, then the fields of ``QueueChunk`` up to ``next_seq``, data bytes."""
_POSITION = Struct("<iQQ")


class QueuePosition(NamedTuple):
    """How far a queue file has been mirrored."""

    file_id: int
    position: int


@dataclass(frozen=True, slots=True)
class QueueChunk:
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
            or self.capacity < MIN_CAPACITY_BYTES
            or len(self.data) > self.capacity
            or self.end > self.reserved
        ):
            raise QueueFileError("a part of a queue that another node sent is not valid")


def pack_chunks(chunks: Mapping[int, QueueChunk]) -> bytes:
    """Return one frame with the chunks of several ranks."""
    parts = list[bytes]()
    for rank, chunk in chunks.items():
        head = _CHUNK.pack(
            rank, len(chunk.pulse), chunk.file_id, chunk.created_ns, chunk.capacity,
            chunk.reserved, chunk.start, chunk.next_seq, len(chunk.data),
        )  # fmt: skip
        parts += (head, chunk.pulse, chunk.data)
    return b"".join(parts)


def unpack_chunks(frame: bytes) -> Iterator[tuple[int, QueueChunk]]:
    """Yield rank and chunk. Raises ``QueueFileError`` if the frame is not valid."""
    at = 0
    while at < len(frame):
        if len(frame) - at < _CHUNK.size:
            raise QueueFileError("a frame of queue parts is truncated")
        rank, pulse_bytes, *numbers, data_bytes = _CHUNK.unpack_from(frame, at)
        pulse_at = at + _CHUNK.size
        data_at = pulse_at + pulse_bytes
        at = data_at + data_bytes
        if at > len(frame) or rank < 0:
            raise QueueFileError("a frame of queue parts is truncated")
        file_id, created_ns, capacity, reserved, start, next_seq = numbers
        chunk = QueueChunk(
            file_id, created_ns, capacity, reserved, start, next_seq, frame[data_at:at],
            frame[pulse_at:data_at],
        )  # fmt: skip
        chunk.check()
        yield rank, chunk


def pack_positions(positions: Mapping[int, QueuePosition]) -> bytes:
    """Return one frame with the positions of several ranks."""
    return b"".join(_POSITION.pack(rank, *position) for rank, position in positions.items())


def unpack_positions(frame: bytes) -> dict[int, QueuePosition]:
    """Return the position of each rank. Raises ``QueueFileError`` if the frame is not valid."""
    if len(frame) % _POSITION.size:
        raise QueueFileError("a frame of queue positions is truncated")
    rows: Iterable[tuple[int, int, int]] = _POSITION.iter_unpack(frame)
    return {rank: QueuePosition(file_id, position) for rank, file_id, position in rows}
