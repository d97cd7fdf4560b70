"""The tensor queue: what a put costs the rank and a record its reader, beside torch's own queues.

The peers carry the same 16 float64 values from a forked process, in the same run.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from ltui.training.shared.record_types import Phase, RecordKind
from ltui.training.tensor_queue.control_block import ControlFile
from ltui.training.tensor_queue.queue_reader import QueueReader
from ltui.training.tensor_queue.queue_writer import QueueWriter
from tests.bench.row import Row, row

VALUES = [float(i) for i in range(16)]
PEER_RECORDS = 200
"""Few, because every tensor in flight holds a file descriptor."""
PEER_PATIENCE_S = 20.0


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
        return [*_ours(Path(folder)), *_torch_queue(), *_numpy_queue()]


def _ours(folder: Path) -> list[Row]:
    writer = QueueWriter.create(folder / "rank-00000.queue")
    control = ControlFile.open(folder / "control.bin")
    control.poll()
    tensor = torch.tensor(VALUES, dtype=torch.float64)
    phases = iter(range(1 << 60))
    step_row = writer.row(RecordKind.STEP, len(VALUES))
    step_row.fields[:] = memoryview(array("d", VALUES))
    rows = [
        row(
            "put of a step's row",
            median_us(lambda: step_row.publish(time.monotonic_ns())),
            "us",
            5.0,
        ),
        row(
            "put of a tensor", median_us(lambda: writer.put(tensor, RecordKind.METRICS)), "us", None
        ),
        row(
            "pulse, phase change",
            median_us(lambda: writer.pulse.set(phase=Phase.FETCH + (next(phases) & 1))),
            "us",
            5.0,
        ),
        row("control poll, nothing new", median_us(control.poll), "us", 1.0),
        row("reader, per record", _reader_us(folder / "rank-00000.queue"), "us", None),
    ]
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


def _torch_queue() -> list[Row]:
    context = torch.multiprocessing.get_context("fork")
    tensor = torch.tensor(VALUES, dtype=torch.float64)
    put, get = _peer(context, lambda: tensor.detach().clone(), lambda got: got)
    return [
        row("torch.multiprocessing.Queue, cloned tensor: put", put, "us", None),
        row("torch.multiprocessing.Queue, cloned tensor: get", get, "us", None),
    ]


def _numpy_queue() -> list[Row]:
    context = multiprocessing.get_context("fork")
    tensor = torch.tensor(VALUES, dtype=torch.float64)
    put, get = _peer(context, lambda: tensor.detach().cpu().numpy(), torch.from_numpy)
    return [
        row("multiprocessing.Queue, tensor to numpy to tensor: put", put, "us", None),
        row("multiprocessing.Queue, tensor to numpy to tensor: get", get, "us", None),
    ]


def _peer(
    context: Any, make: Callable[[], object], restore: Callable[[Any], object]
) -> tuple[float | None, float | None]:
    """Median us of a put and of a get; ``None`` where the peer did not manage in time."""
    queue = context.Queue()
    costs = context.SimpleQueue()
    done = context.Event()
    child = context.Process(target=_produce, args=(queue, costs, done, make), daemon=True)
    child.start()
    got = []
    try:
        put = costs.get()
        for _ in range(PEER_RECORDS):
            began = time.perf_counter_ns()
            restore(queue.get(timeout=PEER_PATIENCE_S))
            got.append((time.perf_counter_ns() - began) / 1e3)
    except Exception:
        return None, None
    finally:
        done.set()
        child.join(5.0)
        child.kill()
        child.join()
        queue.close()
        queue.join_thread()
    return put, statistics.median(got)


def _produce(queue: Any, costs: Any, done: Any, make: Callable[[], object]) -> None:
    spent = []
    for _ in range(PEER_RECORDS):
        began = time.perf_counter_ns()
        queue.put(make())
        spent.append((time.perf_counter_ns() - began) / 1e3)
    # Its feeder thread sends what was put meanwhile; the process must stay, or records are lost.
    time.sleep(0.5)
    costs.put(statistics.median(spent))
    done.wait(PEER_PATIENCE_S)


if __name__ == "__main__":
    for measured in measure():
        shown = (
            "n/a" if measured["value"] is None else f"{measured['value']:.2f} {measured['unit']}"
        )
        bound = "" if measured["bound"] is None else f"bound {measured['bound']:g}"
        print(f"{measured['what']:60} {shown:>12}  {bound}")
