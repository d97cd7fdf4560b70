"""The rank's end of its tensor queue: ``put`` clones a tensor into the mapped file and returns.

Never blocks, locks, waits for a device or does I/O after ``create``. One thread at a time. Torch.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from ltui.training.tensor_queue.cuda_staging import PinnedCopy, StagingQueue, StartCopy
from ltui.training.tensor_queue.encode_tensors import encode
from ltui.training.tensor_queue.rank_pulse import PulseWriter
from ltui.training.tensor_queue.ring_writer import RingWriter, Row

_open_writers: weakref.WeakSet[QueueWriter] = weakref.WeakSet()


class QueueWriter:
    """The tensor queue of one rank: its only writer.

    A process forked from the rank (a DataLoader worker) inherits it muted: its puts do nothing, and
    its ``close`` leaves the rank's queue as it is.
    """

    __slots__ = ("__weakref__", "_muted", "_ring", "_staging", "pulse")

    def __init__(self, ring: RingWriter, start_copy: StartCopy = PinnedCopy) -> None:
        self._ring = ring
        self._muted = False
        self._staging = StagingQueue(start_copy)
        self.pulse = PulseWriter(ring.view)
        _open_writers.add(self)

    @classmethod
    def create(
        cls, path: Path, *, capacity_bytes: int = 4 << 20, start_copy: StartCopy = PinnedCopy
    ) -> QueueWriter:
        """Make the file, mode 0600, in one move; an older one of that name is replaced.

        ``OSError`` where it can't be written (a full disk included, because the blocks are taken
        now).
        """
        return cls(RingWriter.create(path, capacity_bytes), start_copy)

    def put(
        self,
        tensor: torch.Tensor | None,
        kind: int,
        label: bytes = b"",
        t_ns: int | None = None,
    ) -> None:
        """Publish a copy of ``tensor`` (or a label alone); later changes to it are never seen.

        A CUDA tensor is published by a later call, once its copy has arrived, under the time of
        this one. ``TypeError`` names a layout or type that can't be carried, ``ValueError`` a
        record too large.
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
        if encoded.on_cuda():
            if not self._staging.add(kind, now_ns, label, encoded):
                self._ring.skip()
            return
        self._ring.put(
            kind,
            now_ns,
            label,
            encoded.chunks(),
            dtype=encoded.dtype,
            form=encoded.form,
            shape=encoded.shape,
            flags=encoded.flags,
        )

    def put_row(self, values: Sequence[float], kind: int) -> None:
        """Publish ``values`` as one float64 vector: the cheap path for a step's row."""
        self._ring.put_row(values, kind)

    def row(self, kind: int, count: int) -> Row:
        """A row of ``count`` float64 to fill in place: the cheapest path, for a training loop."""
        return self._ring.row(kind, count)

    def flush_staged(self) -> None:
        """Publish the CUDA tensors whose copies have arrived; never waits for the others."""
        for staged in () if self._muted else self._staging.arrived():
            encoded = staged.encoded
            self._ring.put(
                staged.kind,
                staged.t_ns,
                staged.label,
                encoded.chunks(),
                dtype=encoded.dtype,
                form=encoded.form,
                shape=encoded.shape,
                flags=encoded.flags,
            )

    def mute(self) -> None:
        """Write nothing more, in this process.

        Staged copies are left alone: a forked child may not ask its parent's CUDA events.
        """
        self._muted = True
        self._ring.mute()
        self.pulse.mute()

    def close(self) -> None:
        """Publish what has arrived, count what has not as missed, and unmap. Puts after it do
        nothing."""
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
