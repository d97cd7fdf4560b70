"""The rank's writer of its tensor queue: ``put`` copies a tensor into the mapped file and returns.

After ``create`` it never blocks, takes a lock, waits for a device or does I/O. One thread at a time
may use it. Needs torch. This is the only module that knows torch's tensor layouts: it encodes
tensors into the queue's payloads bit by bit.

Staging of CUDA tensors for the queue: copy to pinned memory, publish when the copy has finished.
The rank never waits for a device. The copy is enqueued on the current stream, followed by an event,
and later calls query that event. While the program captures a CUDA graph, nothing is enqueued or
queried: either would become part of the graph or end its capture with an error.
"""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ltui.training.tensor_queue.pulse_block import PulseWriter
from ltui.training.tensor_queue.queue_file import (
    COALESCED,
    DTYPE_CODES,
    DTYPE_NAMES,
    PART,
    Layout,
    align8,
)
from ltui.training.tensor_queue.ring_writer import Chunk, RingWriter, Row

DTYPES: dict[torch.dtype, int] = {
    getattr(torch, name): code
    for name, code in DTYPE_CODES.items()
    if name and hasattr(torch, name)
}
"""Wire code of each dtype that the queue carries and the installed torch has."""

_COMPRESSED = {
    torch.sparse_csr: Layout.CSR,
    torch.sparse_csc: Layout.CSC,
    torch.sparse_bsr: Layout.BSR,
    torch.sparse_bsc: Layout.BSC,
}
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_BY_ROW = (Layout.CSR, Layout.BSR)
_INTEGERS = {"qint8": "int8", "quint8": "uint8", "qint32": "int32"}


@dataclass(slots=True)
class EncodedTensor:
    """The header fields of a tensor's record, and dense contiguous tensors that hold its bytes."""

    dtype: int
    layout: Layout
    shape: Sequence[int]
    parts: list[torch.Tensor] = field(default_factory=list)
    flags: int = 0

    def on_cuda(self) -> bool:
        """Return True if bytes must be copied from a device first."""
        for part in self.parts:  # noqa: SIM110  (a generator costs as much as the whole answer)
            if part.is_cuda:
                return True
        return False

    def payload_bytes(self) -> int:
        """Return the size of the payload that ``chunks`` returns."""
        if self.layout is Layout.STRIDED:
            return self.parts[0].nbytes
        return sum(PART.size + 8 * part.dim() + align8(part.nbytes) for part in self.parts)

    def chunks(self) -> list[Chunk]:
        """Return the payload. All parts are in CPU memory, and the caller keeps them alive."""
        if self.layout is Layout.STRIDED:
            return [_memory(self.parts[0])]
        chunks: list[Chunk] = []
        for part in self.parts:
            size = part.numel() * part.element_size()
            head = PART.pack(DTYPES[part.dtype], part.dim(), 0, 0, size)
            sizes = b"".join(n.to_bytes(8, "little") for n in part.shape)
            chunks += [head + sizes, _memory(part), bytes(align8(size) - size)]
        return chunks


def encode(tensor: torch.Tensor) -> EncodedTensor:
    """Encode ``tensor`` without copying it if possible: strided parts share its memory.

    Raises ``TypeError`` for a layout, dtype or device that the queue can't carry.
    """
    if type(tensor) not in _PLAIN_TYPES:
        tensor = _without_subclass(tensor)
    if not (tensor.is_cpu or tensor.is_cuda):
        raise TypeError(f"the queue cannot carry a tensor on device {tensor.device.type}")
    if tensor.is_nested:
        raise TypeError("the queue cannot carry a nested tensor; put its components")
    code = DTYPES.get(tensor.dtype)
    if code is None:
        raise TypeError(f"the queue cannot carry dtype {tensor.dtype}")
    shape = tensor.shape
    if tensor.layout is torch.strided:
        if tensor.is_quantized:
            return _encode_quantized(tensor, code, shape)
        return EncodedTensor(code, Layout.STRIDED, shape, [_plain(tensor)])
    if tensor.layout is torch.sparse_coo:
        parts = [_plain(tensor._indices()), _plain(tensor._values())]
        flags = COALESCED if tensor.is_coalesced() else 0
        return EncodedTensor(code, Layout.COO, shape, parts, flags)
    layout = _COMPRESSED.get(tensor.layout)
    if layout is None:
        raise TypeError(f"the queue cannot carry layout {tensor.layout}")
    if layout in _BY_ROW:
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    else:
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return EncodedTensor(code, layout, shape, [_plain(part) for part in parts])


def _without_subclass(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as a plain ``torch.Tensor``.

    Subclasses that only add behaviour are converted. Raises ``TypeError`` for subclasses that wrap
    other tensors, because they have no bytes of their own.
    """
    if hasattr(tensor, "__tensor_flatten__") or not isinstance(tensor, torch.Tensor):
        raise TypeError(f"the queue cannot carry a {type(tensor).__name__}")
    return tensor.as_subclass(torch.Tensor)


def _encode_quantized(tensor: torch.Tensor, code: int, shape: Sequence[int]) -> EncodedTensor:
    if DTYPE_NAMES[code] not in _INTEGERS:
        raise TypeError(f"the queue cannot carry dtype {tensor.dtype}")
    scheme = tensor.qscheme()
    integers = _plain(tensor.int_repr())
    if scheme == torch.per_tensor_affine:
        scale = torch.tensor(tensor.q_scale(), dtype=torch.float64)
        zero_point = torch.tensor(tensor.q_zero_point(), dtype=torch.int64)
        return EncodedTensor(code, Layout.QUANTIZED_TENSOR, shape, [integers, scale, zero_point])
    if scheme != torch.per_channel_affine:
        raise TypeError(f"the queue cannot carry a tensor quantized by {scheme}")
    axis = torch.tensor(tensor.q_per_channel_axis(), dtype=torch.int64)
    scales = _plain(tensor.q_per_channel_scales())
    zero_points = _plain(tensor.q_per_channel_zero_points())
    return EncodedTensor(
        code, Layout.QUANTIZED_CHANNEL, shape, [integers, scales, zero_points, axis]
    )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` detached and row-major, with lazy conjugation and negation resolved.

    The bytes in memory are then the values of the tensor.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor.contiguous()


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    address, size = tensor.data_ptr(), tensor.nbytes
    if size and not address:
        # FSDP frees the storage of parameters that it has sharded away.
        raise TypeError("the queue cannot carry a tensor whose storage was freed")
    return address, size


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
            # The program may have made a GPU the default device.
            self.parts = [
                torch.empty(s.shape, dtype=s.dtype, device="cpu", pin_memory=s.is_cuda)
                for s in sources
            ]
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


_open_writers: weakref.WeakSet[QueueWriter] = weakref.WeakSet()


class QueueWriter:
    """The only writer of one rank's tensor queue.

    A process forked from the rank (a DataLoader worker) inherits a muted writer: its puts do
    nothing, and its ``close`` does not affect the rank's queue.
    """

    __slots__ = ("__weakref__", "_muted", "_ring", "_staging", "pulse")

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring
        self._muted = False
        self._staging = StagingQueue()
        self.pulse = PulseWriter(ring.view)
        _open_writers.add(self)

    @classmethod
    def create(cls, path: Path, *, capacity_bytes: int = 4 << 20) -> QueueWriter:
        """Create the file atomically with mode 0600; replace an older file of that name.

        Raises ``OSError`` if it can't be written. This includes a full disk, because all blocks are
        allocated now.
        """
        return cls(RingWriter.create(path, capacity_bytes))

    def put(
        self,
        tensor: torch.Tensor | None,
        kind: int,
        label: bytes = b"",
        t_ns: int | None = None,
    ) -> None:
        """Publish a copy of ``tensor``, or only a label. Later changes to it have no effect.

        A CUDA tensor is published by a later call, once its copy has arrived, with the time of this
        call. Raises ``TypeError`` for a layout or type that the queue can't carry, and
        ``ValueError`` for a record that is too large.
        """
        if self._muted:
            return
        if self._staging:
            self.flush_staged()
        now_ns = time.monotonic_ns() if t_ns is None else t_ns
        if tensor is None:
            self._ring.put(kind, now_ns, label, ())
            return
        encoded = encode(tensor)
        if not encoded.on_cuda():
            self._publish(kind, now_ns, label, encoded)
        else:
            # Not only when it is published: then the error would be that of another call.
            self._ring.check_size(len(encoded.shape), label, encoded.payload_bytes())
            if not self._staging.add(kind, now_ns, label, encoded):
                self._ring.skip()

    def _publish(self, kind: int, t_ns: int, label: bytes, encoded: EncodedTensor) -> None:
        self._ring.put(
            kind,
            t_ns,
            label,
            encoded.chunks(),
            dtype=encoded.dtype,
            layout=encoded.layout,
            shape=encoded.shape,
            flags=encoded.flags,
        )

    def row(self, kind: int, count: int, label_bytes: int = 0) -> Row:
        """Return a row of ``count`` float64 values to fill in place, the fastest path of all."""
        return self._ring.row(kind, count, label_bytes)

    def flush_staged(self) -> None:
        """Publish the CUDA tensors that have been copied, without waiting for the others.

        If the device has failed, they are lost. The error is the program's, which gets it too.
        """
        if self._muted:
            return
        try:
            for staged in self._staging.arrived():
                self._publish(staged.kind, staged.t_ns, staged.label, staged.encoded)
        except RuntimeError:
            for _ in range(self._staging.leak()):
                self._ring.skip()

    def mute(self) -> None:
        """Disable all writes of this process.

        Staged copies stay untouched: a forked child may not query the CUDA events of its parent.
        """
        self._muted = True
        self._staging.leak()
        self._ring.mute()
        self.pulse.mute()

    def close(self) -> None:
        """Publish the copies that have arrived, count the others as missed, and unmap the file.

        Later puts do nothing.
        """
        _open_writers.discard(self)
        if not self._muted:
            self.flush_staged()
            for _ in range(self._staging.abandon()):
                self._ring.skip()
            self.mute()
        self._ring.close()


def _mute_all() -> None:
    for writer in list(_open_writers):
        writer.mute()


os.register_at_fork(after_in_child=_mute_all)
