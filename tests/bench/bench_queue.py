"""The tensor queue: what a put costs the rank, and a record its reader."""

from __future__ import annotations

import statistics
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import torch

from ltui.training.shared.record_types import Phase, RecordKind
from ltui.training.tensor_queue.control_block import ControlFile
from ltui.training.tensor_queue.queue_reader import QueueReader
from ltui.training.tensor_queue.queue_writer import QueueWriter
from tests.bench.row import Row, row

VALUES = [float(i) for i in range(16)]


def median_us(call: Callable[[], object], *, seconds: float = 0.5, batch: int = 20) -> float:
    """Median microseconds of one call, from as many batches as fit into ``seconds``."""
    costs = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter_ns()
        for _ in range(batch):
            call()
        costs.append((time.perf_counter_ns() - began) / batch / 1e3)
    return statistics.median(costs)


def measure() -> list[Row]:
    """Rows of what, value, unit and bound."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank-00000.queue"
        writer, control = QueueWriter.create(path), ControlFile.open(Path(folder) / "control.bin")
        control.poll()
        tensor = torch.tensor(VALUES, dtype=torch.float64)
        phases = iter(range(1 << 60))
        step_row = writer.row(RecordKind.STEP, len(VALUES))
        step_row.fields[:] = memoryview(array("d", VALUES))
        calls: tuple[tuple[str, Callable[[], object], float | None], ...] = (
            ("put of a step's row", lambda: step_row.publish(time.monotonic_ns()), 5.0),
            ("put of a tensor", lambda: writer.put(tensor, RecordKind.METRICS), None),
            (
                "pulse, phase change",
                lambda: writer.pulse.set(phase=Phase.FETCH + (next(phases) & 1)),
                5.0,
            ),
            ("control poll, nothing new", control.poll, 1.0),
        )
        rows = [row(what, median_us(call), "us", bound) for what, call, bound in calls]
        rows.append(row("reader, per record", _reader_us(path), "us"))
        writer.close()
        control.close()
    return rows


def _reader_us(path: Path) -> float:
    costs = []
    for _ in range(5):
        reader = QueueReader(path)
        while True:
            began = time.perf_counter_ns()
            count = len(reader.poll().records)
            if not count:
                break
            costs.append((time.perf_counter_ns() - began) / count / 1e3)
        reader.close()
    return statistics.median(costs)
