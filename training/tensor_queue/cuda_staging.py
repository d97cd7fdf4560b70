"""CUDA tensors on their way into the queue: copied to pinned memory, published once the copy is
done.

The rank never waits for a device: the copy is enqueued on the current stream with an event behind
it, and later calls ask the event. Which copy is used can be handed in, so that the order, the bound
and the losses can be tested on a machine without a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from ltui.training.tensor_queue.encode_tensors import EncodedTensor


class CopyInFlight(Protocol):
    """A copy to host memory that was enqueued."""

    parts: list[torch.Tensor]
    """Theirs are the bytes once ``done``."""

    def done(self) -> bool:
        """Whether all bytes have arrived. Never waits."""


StartCopy = Callable[[list[torch.Tensor]], CopyInFlight]


class PinnedCopy:
    """Copies of ``sources`` in pinned memory, behind one event for each device that holds some."""

    def __init__(self, sources: list[torch.Tensor]) -> None:
        self.parts = [_pinned_copy(source) for source in sources]
        self._events: list[torch.cuda.Event] = []
        for device in {source.device for source in sources if source.is_cuda}:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)

    def done(self) -> bool:
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]


def _pinned_copy(source: torch.Tensor) -> torch.Tensor:
    if not source.is_cuda:
        return source.clone()
    target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    return target.copy_(source, non_blocking=True)


@dataclass(slots=True)
class StagedRecord:
    """A record that waits for its bytes."""

    kind: int
    t_ns: int
    label: bytes
    encoded: EncodedTensor
    copy: CopyInFlight


class StagingQueue:
    """Records whose bytes are still on a device, in the order of their puts; at most ``limit`` of
    them."""

    __slots__ = ("_limit", "_start_copy", "_waiting")

    def __init__(self, start_copy: StartCopy = PinnedCopy, limit: int = 256) -> None:
        self._start_copy = start_copy
        self._limit = limit
        self._waiting: deque[StagedRecord] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, kind: int, t_ns: int, label: bytes, encoded: EncodedTensor) -> bool:
        """Enqueue the copy. False where too many wait already: the caller counts the record as
        lost."""
        if len(self._waiting) >= self._limit:
            return False
        self._waiting.append(
            StagedRecord(kind, t_ns, label, encoded, self._start_copy(encoded.parts))
        )
        return True

    def arrived(self) -> Iterator[StagedRecord]:
        """Take those whose bytes are here, first put first; stops at the first that still waits."""
        while self._waiting and self._waiting[0].copy.done():
            staged = self._waiting.popleft()
            staged.encoded.parts = staged.copy.parts
            yield staged

    def abandon(self) -> int:
        """Forget all that wait; how many they were."""
        count = len(self._waiting)
        self._waiting.clear()
        return count
