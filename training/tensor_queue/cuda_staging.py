"""Staging of CUDA tensors for the queue: copy to pinned memory, publish when the copy has finished.

The rank never waits for a device. The copy is enqueued on the current stream, followed by an event,
and later calls query that event. While the program captures a CUDA graph, nothing is enqueued or
queried: either would become part of the graph or end its capture with an error.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ltui.training.tensor_queue.torch_codec import EncodedTensor

REUSED_BYTES = 4096
"""Largest size of a record whose pinned memory is used again."""
Key = tuple[tuple[torch.dtype, torch.Size, torch.device], ...]
"""Type, shape and device of each tensor of a record."""


class PinnedCopy:
    """Copies of ``sources`` in pinned memory, with one event for each device of a source.

    The contents of ``parts`` are valid once ``done`` returns True.
    """

    def __init__(self, sources: list[torch.Tensor]) -> None:
        # A tensor that is made in inference mode, as in an evaluation, could not be used again
        # outside of it.
        with torch.inference_mode(False):
            self.parts = [_empty_on_host(source) for source in sources]
        devices = {source.device for source in sources if source.is_cuda}
        self._events = [(device, torch.cuda.Event()) for device in devices]  # type: ignore[no-untyped-call]
        self.begin(sources)

    def begin(self, sources: list[torch.Tensor]) -> None:
        """Enqueue the copies, also again, of sources of the same types, shapes and devices."""
        try:
            for part, source in zip(self.parts, sources, strict=True):
                part.copy_(source, non_blocking=True)
            for device, event in self._events:
                event.record(torch.cuda.current_stream(device))
        except RuntimeError:
            _leak(self)  # the device has failed
            raise

    def done(self) -> bool:
        """Return True if all bytes have arrived. Never waits."""
        return all(event.query() for _, event in self._events)  # type: ignore[no-untyped-call]


def _empty_on_host(source: torch.Tensor) -> torch.Tensor:
    # The program may have made a GPU the default device.
    return torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=source.is_cuda)


def is_capturing() -> bool:
    """Return True while this thread captures a CUDA graph on its current stream."""
    return torch.cuda.is_current_stream_capturing()


@dataclass(slots=True)
class StagedRecord:
    """A record with bytes that have not arrived yet."""

    kind: int
    t_ns: int
    label: bytes
    encoded: EncodedTensor
    key: Key
    copy: PinnedCopy


class StagingQueue:
    """Records that are still being copied from a device, in the order of their puts.

    It holds at most ``limit`` records. The memory and events of small ones are used again: to
    allocate and to free pinned memory takes torch longer than the copy of a loss.
    """

    __slots__ = ("_free", "_free_count", "_limit", "_waiting")

    def __init__(self, limit: int = 256) -> None:
        self._limit = limit
        self._waiting: deque[StagedRecord] = deque()
        self._free: dict[Key, list[PinnedCopy]] = {}
        self._free_count = 0
        _leak(self._free)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, kind: int, t_ns: int, label: bytes, encoded: EncodedTensor) -> bool:
        """Enqueue the copy of a record's tensors.

        Return False if the queue is full or a CUDA graph is captured; the caller then counts the
        record as lost.
        """
        if len(self._waiting) >= self._limit or is_capturing():
            return False
        sources = encoded.parts
        key = tuple([(source.dtype, source.shape, source.device) for source in sources])
        free = self._free.get(key)
        if free:
            copy = free.pop()
            self._free_count -= 1
            copy.begin(sources)
        else:
            copy = PinnedCopy(sources)
        self._waiting.append(StagedRecord(kind, t_ns, label, encoded, key, copy))
        return True

    def arrived(self) -> Iterator[StagedRecord]:
        """Remove and yield records in the order of their puts, up to the first unfinished copy.

        Raises ``RuntimeError`` if the device has failed, for example by a failed assertion in a
        kernel. No copy arrives any more then.
        """
        if self._waiting and is_capturing():
            return
        while self._waiting and self._waiting[0].copy.done():
            staged = self._waiting.popleft()
            staged.encoded.parts = parts = staged.copy.parts
            yield staged
            if self._free_count < self._limit and sum(p.nbytes for p in parts) <= REUSED_BYTES:
                self._free.setdefault(staged.key, []).append(staged.copy)
                self._free_count += 1

    def abandon(self) -> int:
        """Discard all waiting records and return their number."""
        count = len(self._waiting)
        self._waiting.clear()
        return count

    def leak(self) -> int:
        """Discard all waiting records without freeing their memory, and return their number."""
        kept, self._waiting = self._waiting, deque()
        if kept:
            _leak(kept)
        return len(kept)


def _leak(value: object) -> None:
    """Keep ``value`` until the process ends.

    To free pinned memory, torch records an event on the device. Where the device has failed, or
    belongs to the parent of this process, torch can't, and ends the process.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
