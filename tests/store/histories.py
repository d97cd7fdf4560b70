"""Histories to read back, written through the real writer."""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from ltui.training.shared.record_types import StepField
from ltui.training.state.run_snapshot import RunSnapshot, RunState
from ltui.training.store.history_writer import Batch, Cursor, StoreWriter
from ltui.training.store.run_directory import RunDir

StepRow = tuple[int, int, Sequence[float]]
"""(rank, number of the record, values of ``StepField``)"""


def run_dir(folder: Path) -> RunDir:
    run = RunDir(folder / "runs" / "brave-owl-0002")
    run.path.mkdir(parents=True, exist_ok=True)
    return run


def stored_rows(run: RunDir, table: str) -> list[sqlite3.Row]:
    """Return the rows of a table of the run's database, oldest first."""
    with closing(sqlite3.connect(run.db_path)) as db:
        db.row_factory = sqlite3.Row
        return db.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall()


def begin(store: StoreWriter, attempt: int = 1, resumed_step: int | None = None) -> None:
    store.begin_attempt(
        attempt, started_at=1.0, boot_id="b", resumed_path=None, resumed_step=resumed_step
    )


def step_row(step: float, loss: float = math.nan, wall_s: float = 0.0) -> list[float]:
    row = [math.nan] * len(StepField)
    row[StepField.GLOBAL_STEP] = step
    row[StepField.EPOCH] = step // 1000
    row[StepField.LOSS] = loss
    row[StepField.WALL_S] = wall_s
    row[StepField.STEP_S] = 0.5
    return row


def steps(first: int, last: int, *, rank: int = 0, factor: float = 1.0) -> Batch:
    """Steps ``first`` to ``last``, whose loss is ``factor`` times the step."""
    rows: list[StepRow] = [
        (rank, s, step_row(s, factor * s, 100.0 + s)) for s in range(first, last + 1)
    ]
    return Batch(steps=rows, cursors={rank: Cursor(last + 1)})


def write(store: StoreWriter, attempt: int, batches: Iterable[Batch]) -> None:
    for batch in batches:
        store.commit(attempt, batch)


def snapshot(**changes: Any) -> RunSnapshot:
    values: dict[str, Any] = {
        "id": "brave-owl-0002",
        "name": "brave-owl",
        "state": RunState.RUNNING,
    }
    return RunSnapshot(**{**values, **changes})


def written(folder: Path, batches: Iterable[Batch], **options: Any) -> RunDir:
    """Return a run whose history holds the batches, all of its first attempt."""
    run = run_dir(folder)
    with closing(StoreWriter(run.db_path, **options)) as store:
        begin(store)
        write(store, 1, batches)
    return run


def checkpoint(folder: Path, step: int, saved_at: float, **facts: object) -> Path:
    """Write a complete checkpoint, of which older versions knew no more than this."""
    folder.mkdir(exist_ok=True)
    path, data = folder / f"step-{step:08d}-stop.ckpt", b"weights"
    path.write_bytes(data)
    manifest = {
        "version": 1, "global_step": step, "saved_at": saved_at, "size_bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(), "reason": "stop", **facts,
    }  # fmt: skip
    Path(f"{path}.json").write_text(json.dumps(manifest))
    return path


def empty_log(run: RunDir) -> None:
    """Move the write-ahead log into the database, which a reader may have kept its writer from."""
    with closing(sqlite3.connect(run.db_path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
