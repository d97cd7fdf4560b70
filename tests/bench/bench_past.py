"""The record of past snapshots: what it costs the supervisor and the disk, and a frame of it."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from ltui.training.store.past.snapshots import document_of
from ltui.training.store.past.writer import PastWriter
from tests.bench.row import Row, row
from tests.store.past_runs import snapshots

MINUTES = 4


def _recorded(ranks: int) -> tuple[float, float]:
    """Return milliseconds of the writing thread for a snapshot, and bytes of one hour."""
    logs = {f"rank-{rank:05d}.log": rank * 1000 for rank in range(ranks)}
    times = []
    with tempfile.TemporaryDirectory() as folder:
        writer = PastWriter(Path(folder))
        for number, snapshot in enumerate(snapshots(ranks, MINUTES * 60, period_s=1.0)):
            sizes = {name: size + 80 * number for name, size in logs.items()}
            began = time.thread_time()
            writer.append(snapshot.taken_at or 0.0, document_of(snapshot, sizes))
            times.append(time.thread_time() - began)
        writer.close()
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
    return 1000 * statistics.median(times), size * 60 / MINUTES


def measure() -> list[Row]:
    rows = []
    for ranks, bound_ms in ((64, 5.0), (256, 20.0)):
        milliseconds, per_hour = _recorded(ranks)
        rows += [
            row(f"past snapshot, {ranks} ranks", milliseconds, "ms", bound_ms),
            row(f"record of an hour, {ranks} ranks, before thinning", per_hour / 1e6, "MB"),
        ]
    return rows
