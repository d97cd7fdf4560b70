"""Staging of CUDA tensors for the queue: copy to pinned memory, publish when the copy has finished.

The rank never waits for a device. The copy is enqueued on the current stream, followed by an event,
and later calls query that event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ltui.training.tensor_queue.torch_codec import EncodedTensor


class PinnedCopy:
    """Copies of ``sources`` in pinned memory, with one event for each device of a source.

    The contents of ``parts`` are valid once ``done`` returns True.
    """

    def __init__(self, sources: list[torch.Tensor]) -> None:
        self.parts = [_pinned_copy(source) for source in sources]
        self._events: list[torch.cuda.Event] = []
        for device in {source.device for source in sources if source.is_cuda}:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)

    def done(self) -> bool:
        """Return True if all bytes have arrived. Never waits."""
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]


def _pinned_copy(source: torch.Tensor) -> torch.Tensor:
    if not source.is_cuda:
        return source.clone()
    target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    return target.copy_(source, non_blocking=True)


@dataclass(slots=True)
class StagedRecord:
    """A record with bytes that have not arrived yet."""

    kind: int
    t_ns: int
    label: bytes
    encoded: EncodedTensor
    copy: PinnedCopy


class StagingQueue:
    """Records that are still being copied from a device, in the order of their puts.

    It holds at most ``limit`` records.
    """

    __slots__ = ("_limit", "_waiting")

    def __init__(self, limit: int = 256) -> None:
        self._limit = limit
        self._waiting: deque[StagedRecord] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, kind: int, t_ns: int, label: bytes, encoded: EncodedTensor) -> bool:
        """Enqueue the copy of a record's tensors.

        Return False if the queue is full; the caller then counts the record as lost.
        """
        if len(self._waiting) >= self._limit:
            return False
        self._waiting.append(StagedRecord(kind, t_ns, label, encoded, PinnedCopy(encoded.parts)))
        return True

    def arrived(self) -> Iterator[StagedRecord]:
        """Remove and yield records in the order of their puts, up to the first unfinished copy."""
        while self._waiting and self._waiting[0].copy.done():
            staged = self._waiting.popleft()
            staged.encoded.parts = staged.copy.parts
            yield staged

    def abandon(self) -> int:
        """Discard all waiting records and return their number."""
        count = len(self._waiting)
        self._waiting.clear()
        return count
