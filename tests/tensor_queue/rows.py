"""Publish a row of numbers, as telemetry does for each step, and read all that is in a queue."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ltui.training.tensor_queue.queue_reader import QueueReader, Record
    from ltui.training.tensor_queue.queue_writer import QueueWriter
    from ltui.training.tensor_queue.ring_writer import RingWriter


def put_row(writer: RingWriter | QueueWriter, values: Sequence[float], kind: int) -> None:
    row = writer.row(kind, len(values))
    row.fields[:] = memoryview(array("d", values))
    row.publish(time.monotonic_ns())


def drain(reader: QueueReader, limit: int = 2000) -> tuple[list[Record], int]:
    """All that can be read now, and how many were missed."""
    records: list[Record] = []
    missed = 0
    while True:
        poll = reader.poll(limit)
        records += poll.records
        missed += poll.missed
        if not poll.records:
            return records, missed
