"""Opening the history of ten million steps, written through the supervisor's own writer."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ltui.training.state.run_snapshot import RunSnapshot, RunState
from ltui.training.store.history_reader import RunStore
from ltui.training.store.history_writer import Batch, Cursor, StoreWriter
from ltui.training.store.run_directory import RunDir
from tests.bench.row import row

STEPS = 10_000_000
CHUNK = 50_000


def measure() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = RunDir(Path(folder) / "runs" / "bench-0000")
        run_dir.path.mkdir(parents=True)
        began = time.perf_counter()
        write_history(run_dir, STEPS)
        written_s = time.perf_counter() - began
        megabytes = run_dir.db_path.stat().st_size / 1e6
        first_s = [_seconds(lambda: _first_chart(run_dir)) for _ in range(7)]
        near_s = [_seconds(lambda: _zoomed(run_dir)) for _ in range(7)]
        tick_s = _tick_seconds(Path(folder) / "tick.db")
    return [
        row("open 10 million steps to the first curve", statistics.median(first_s), "s", 0.5),
        row("the last 20,000 of them", statistics.median(near_s), "s", 0.5),
        row("its file", megabytes, "MB", None),
        row("writing a step's record, in a backlog", written_s / STEPS * 1e6, "us", None),
        row("one tick: 8 ranks, 50 steps each, committed", tick_s * 1e3, "ms", None),
    ]


def write_history(run_dir: RunDir, steps: int, *, chunk: int = CHUNK) -> None:
    """One rank's ``steps`` steps, as a supervisor that is always behind would write them."""
    store = StoreWriter(run_dir.db_path)
    store.begin_attempt(1, started_at=0.0, boot_id=None, resumed_path=None, resumed_step=None)
    for first in range(0, steps, chunk):
        batch = Batch(steps=list(_rows(0, first, min(steps, first + chunk))))
        batch.cursors[0] = Cursor(first + chunk)
        store.commit(1, batch)
    store.write_snapshot(
        RunSnapshot(id=run_dir.id, name="bench", state=RunState.FINISHED, taken_at=0.0)
    )
    store.close()


def _rows(rank: int, first: int, stop: int) -> Iterator[tuple[int, int, Sequence[float]]]:
    for seq in range(first, stop):
        step = float(seq + 1)
        loss = 2.0 / (1.0 + seq / 1e6) + 0.1 * math.sin(seq)
        yield (
            rank,
            seq,
            [step, float(seq // 1000), float(seq % 1000), 32.0, loss, 1e-3, 0.01, 0.001, 0.003,
             0.005, 0.001, 1e9, 2e9, 1.7e9 + seq * 0.01, 1.0, 0.0],
        )  # fmt: skip


def _first_chart(run_dir: RunDir) -> None:
    with RunStore(run_dir) as store:
        store.snapshot()
        assert "train/loss" in store.metric_names()
        assert len(store.curve("train/loss")) > 500


def _zoomed(run_dir: RunDir) -> None:
    with RunStore(run_dir) as store:
        assert len(store.curve("train/loss", first_step=STEPS - 20_000)) > 500


def _tick_seconds(path: Path) -> float:
    store = StoreWriter(path)
    store.begin_attempt(1, started_at=0.0, boot_id=None, resumed_path=None, resumed_step=None)
    times = []
    for tick in range(40):
        rows = [step for rank in range(8) for step in _rows(rank, tick * 50, tick * 50 + 50)]
        batch = Batch(steps=rows, cursors=dict.fromkeys(range(8), Cursor(tick * 50 + 50)))
        times.append(_seconds(lambda batch=batch: store.commit(1, batch)))  # type: ignore[misc]
    store.close()
    return statistics.median(times)


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
