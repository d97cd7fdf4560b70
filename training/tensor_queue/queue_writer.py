"""The rank's writer of its tensor queue: ``put`` copies a tensor into the mapped file and returns.

After ``create`` it never blocks, takes a lock, waits for a device or does I/O. One thread at a time
may use it. Needs torch.
"""

from __future__ import annotations

import os
import struct
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from ltui.training.tensor_queue.cuda_staging import StagingQueue
from ltui.training.tensor_queue.file_layout import FLOAT64_CODE, Layout
from ltui.training.tensor_queue.pulse_block import PulseWriter
from ltui.training.tensor_queue.ring_writer import RingWriter, Row
from ltui.training.tensor_queue.torch_codec import EncodedTensor, encode

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

    def put_vector(self, values: Sequence[float], kind: int, label: bytes) -> None:
        """Publish numbers as a float64 vector, which costs a third of ``put`` with their tensor.

        Raises ``ValueError`` for a record that is too large.
        """
        if self._muted:
            return
        if self._staging:
            self.flush_staged()
        count, now_ns = len(values), time.monotonic_ns()
        chunks = (struct.pack(f"<{count}d", *values),)
        self._ring.put(
            *(kind, now_ns, label, chunks),
            dtype=FLOAT64_CODE,
            layout=Layout.STRIDED,
            shape=(count,),
        )

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
