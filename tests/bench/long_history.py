"""A stored run of millions of steps, written in bulk with the rows and windows that a writer
leaves."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

from ltui.training.store.database_schema import open_for_writing
from ltui.training.store.history_windows import STEP_VALUES, WINDOW_SIZES
from ltui.training.store.history_writer import KEEP_WINDOWS, StoreWriter
from ltui.training.store.run_directory import RunDir
from tests.store.histories import begin, snapshot

STEP_S = 0.1
BEGAN = 1.7e9
"""Unix time of step 0."""
_VALUE = "abs(sin(step / 1e5)) + 0.1"
"""The value of every series at ``step``, in SQL."""


def metric_name(number: int) -> str:
    return f"layer.{number:03}/grad_norm"


def write_long_run(home: Path, name: str, *, metrics: int, steps: int, rows: int) -> RunDir:
    """Write a run with the last ``rows`` steps as rows, and older ones as windows."""
    run = RunDir(home / "runs" / name)
    run.path.mkdir(parents=True)
    writer = StoreWriter(run.db_path)
    begin(writer)
    writer.write_snapshot(snapshot(id=name, taken_at=time.time(), global_step=steps))
    writer.close()
    with closing(open_for_writing(run.db_path)) as db:
        db.execute("PRAGMA synchronous = OFF")
        db.execute("BEGIN")
        cursor = "INSERT INTO cursors (attempt, rank, next_seq, base, inode) VALUES (1, 0, ?, 0, 0)"
        db.execute(cursor, (steps,))
        names = [(number, metric_name(number)) for number in range(1, metrics + 1)]
        db.executemany("INSERT INTO names (id, name) VALUES (?, ?)", names)
        _write_rows(db, steps - rows, rows)
        for size in WINDOW_SIZES:
            count = min(KEEP_WINDOWS, steps // size)
            _write_windows(db, size, steps // size - count, count)
        db.execute("COMMIT")
    return run


def _numbers(count: int) -> str:
    """Return SQL for a table of the numbers from 0."""
    return (
        "(WITH RECURSIVE n(number) AS (SELECT 0 UNION ALL SELECT number + 1 FROM n "
        f"WHERE number < {count - 1}) SELECT number FROM n)"
    )


def _write_rows(db: sqlite3.Connection, after: int, count: int) -> None:
    steps = f"(SELECT number + {after + 1} AS step FROM {_numbers(count)})"
    wall_s = f"{BEGAN} + step * {STEP_S}"
    db.execute(
        "INSERT INTO steps (attempt, rank, seq, step, epoch, batch, samples, loss, lr, step_s, "
        f"fetch_s, wall_s, stepped) SELECT 1, 0, step, step, 0, step, 64, {_VALUE}, 1e-3, {STEP_S},"
        f" 0.01, {wall_s}, 1 FROM {steps}"
    )
    db.execute(
        "INSERT INTO samples (attempt, rank, name_id, seq, step, epoch, t, value) "
        f"SELECT 1, 0, id, step, step, 0, {wall_s}, {_VALUE} FROM names, {steps}"
    )


def _write_windows(db: sqlite3.Connection, size: int, first: int, count: int) -> None:
    windows = (
        f"(SELECT number + {first} AS win, (number + {first}) * {size} AS step "
        f"FROM {_numbers(count)})"
    )
    place = f"{size}, win, step, step + {size - 1}, 0, {BEGAN} + step * {STEP_S}, {size}"
    means = {"loss": _VALUE, "step_s": STEP_S, "fetch_s": 0.01, "samples": 64, "lr": 1e-3}
    columns = ", ".join(f"{v}_n, {v}_mean, {v}_low, {v}_high" for v in STEP_VALUES)
    values = ", ".join(f"{size}, {means[v]}, {means[v]}, {means[v]}" for v in STEP_VALUES)
    db.execute(
        "INSERT INTO step_windows (attempt, rank, level, win, first_step, last_step, epoch, "
        f"wall_s, n, {columns}) SELECT 1, 0, {place}, {values} FROM {windows}"
    )
    db.execute(
        "INSERT INTO sample_windows (attempt, rank, name_id, level, win, first_step, last_step, "
        "epoch, wall_s, n, value_n, value_mean, value_low, value_high) "
        f"SELECT 1, 0, id, {place}, {size}, {_VALUE}, {_VALUE}, {_VALUE} + 1 FROM names, {windows}"
    )
