"""Reader of a run's history, also while it is written: curves, events, readings, export rows.

It opens ``run.db`` read-only and never blocks the writer. It raises ``StoreError`` if the file is
damaged or was written by a newer ltui.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ltui.training.state.json_decoder import from_json
from ltui.training.state.metric_name_patterns import TRAIN_LOSS
from ltui.training.state.run_snapshot import RunSnapshot, Verdict, snapshot_from_json
from ltui.training.store.attempt_lineage import spans
from ltui.training.store.curve_reader import Curve, FloatArray, SeriesReader, merge_points, to_curve
from ltui.training.store.database_schema import (
    check_layout,
    damaged_error,
    no_history_error,
    store_error,
)
from ltui.training.store.export_rows import ExportRow, Series, export_rows
from ltui.training.store.history_windows import SAMPLES, STEPS
from ltui.training.store.run_directory import RunDir

STEP_SERIES = {
    TRAIN_LOSS: "loss",
    "step/loss": "loss",
    "step/seconds": "step_s",
    "step/fetch_seconds": "fetch_s",
    "step/samples": "samples",
    "step/lr": "lr",
}
"""Series that every step has, independent of what the user logs: name -> column of ``steps``."""

ROW_SERIES = {
    "step/forward_seconds": "forward_s",
    "step/backward_seconds": "backward_s",
    "step/optimizer_seconds": "optimizer_s",
    "step/memory_bytes": "memory_bytes",
}
"""Series without windows, which exist only for the newest steps: name -> column of ``steps``."""


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """One event of the run's history."""

    id: int
    attempt: int
    rank: int | None
    t: float
    kind: str
    text: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StateChange:
    """A change of the run's state at unix time ``t``."""

    attempt: int
    t: float
    state: str
    detail: str | None


@dataclass(frozen=True, slots=True)
class Gap:
    """Records that are missing from the history."""

    attempt: int
    rank: int | None
    """None if a part of the history of all ranks is missing."""
    after_seq: int
    missed: int
    t: float
    reason: str


@dataclass(frozen=True, slots=True)
class StoredGpuReadings:
    """Stored readings of one GPU, oldest first; missing values are NaN."""

    times: FloatArray
    utilisation_percent: FloatArray
    memory_used_bytes: FloatArray
    power_w: FloatArray
    temperature_c: FloatArray


_Result = TypeVar("_Result")


def _raises_store_error(method: Callable[..., _Result]) -> Callable[..., _Result]:
    """Make a method raise ``StoreError`` if SQLite reports an error."""

    @wraps(method)
    def wrapper(self: RunStore, *args: Any, **kwargs: Any) -> _Result:
        try:
            return method(self, *args, **kwargs)
        except sqlite3.DatabaseError as error:
            raise damaged_error(self.path, error) from error

    return wrapper


class RunStore:
    """Read-only access to one run's history."""

    def __init__(self, run_dir: RunDir) -> None:
        self.path = run_dir.db_path
        self._connection = _open_read_only(self.path)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @_raises_store_error
    def snapshot(self) -> RunSnapshot:
        """Return the last snapshot that the supervisor wrote."""
        row = self._connection.execute("SELECT document FROM snapshot").fetchone()
        if row is None:
            raise no_history_error(self.path, "it holds no state of the run yet.")
        try:
            return snapshot_from_json(json.loads(row[0]))
        except ValueError as error:
            raise store_error(
                self.path, f"the run's stored state is damaged ({error}).", "Delete the run."
            ) from error

    @_raises_store_error
    def metric_names(self) -> list[str]:
        """Return the names of logged metrics, and ``train/loss`` if steps have a loss."""
        names = {row[0] for row in self._connection.execute("SELECT name FROM names")}
        if self._has_step_loss():
            names.add(TRAIN_LOSS)
        return sorted(names)

    @_raises_store_error
    def logged_names(self) -> list[str]:
        """Return the names of metrics that the user logged."""
        return sorted(row[0] for row in self._connection.execute("SELECT name FROM names"))

    def _has_step_loss(self) -> bool:
        for table, column in (("step_windows", "loss_mean"), ("steps", "loss")):
            query = f"SELECT 1 FROM {table} WHERE {column} IS NOT NULL LIMIT 1"  # noqa: S608
            if self._connection.execute(query).fetchone():
                return True
        return False

    @_raises_store_error
    def attempts(self) -> list[dict[str, Any]]:
        """Return every attempt with its columns, first to last."""
        cursor = self._connection.execute("SELECT * FROM attempts ORDER BY attempt")
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]

    # -- curves --------------------------------------------------------------------------------

    @_raises_store_error
    def curve(
        self,
        metric: str,
        *,
        max_points: int = 2000,
        rank: int | None = 0,
        first_step: int | None = None,
        last_step: int | None = None,
        attempt: int | None = None,
    ) -> Curve:
        """Return ``metric`` over steps, without superseded steps, in at most ``max_points`` points.

        If ``rank`` is None, the curve is the mean over ranks with the lowest and highest value of
        any rank. ``first_step`` and ``last_step`` limit the steps; both are included. ``attempt``
        limits the curve to one attempt.
        """
        source = self._source(metric)
        if source is None:
            return to_curve([])
        first = 0 if first_step is None else first_step
        parts: list[tuple[float, ...]] = []
        for span in spans(self._connection):
            if attempt is not None and span.attempt != attempt:
                continue
            last = span.last_step if last_step is None else min(last_step, span.last_step)
            parts += source.read(self._connection, span, rank, first, last)
        parts.sort(key=lambda row: row[0])
        return merge_points(to_curve(parts), max_points)

    def _source(self, metric: str) -> SeriesReader | None:
        row = self._connection.execute("SELECT id FROM names WHERE name = ?", (metric,)).fetchone()
        if row is not None:
            return SeriesReader(SAMPLES, "value", (int(row[0]),))
        if metric in STEP_SERIES:
            return SeriesReader(STEPS, STEP_SERIES[metric], ())
        return SeriesReader(STEPS, ROW_SERIES[metric], ()) if metric in ROW_SERIES else None

    @_raises_store_error
    def attempt_ranks(self) -> dict[int, tuple[int, ...]]:
        """Return the ranks with stored steps for each attempt with steps that count.

        A run may be resumed on another number of ranks, so attempts may have different ranks.
        """
        ranks: dict[int, tuple[int, ...]] = {}
        for span in spans(self._connection):
            rows = self._connection.execute(
                "SELECT rank FROM cursors WHERE attempt = ? ORDER BY rank", (span.attempt,)
            )
            ranks[span.attempt] = tuple(row[0] for row in rows)
        return ranks

    # -- events and readings --------------------------------------------------------------------

    @_raises_store_error
    def events(self, after_id: int = 0) -> list[StoredEvent]:
        """Return events with a larger id than ``after_id``, in the order in which they arrived."""
        rows = self._connection.execute(
            "SELECT id, attempt, rank, t, kind, text, data FROM events WHERE id > ? "
            "AND kind NOT IN ('hello', 'plan') ORDER BY id",
            (after_id,),
        )
        return [
            StoredEvent(number, attempt, rank, t, kind, text, json.loads(data or "{}"))
            for number, attempt, rank, t, kind, text, data in rows
        ]

    @_raises_store_error
    def hello_and_plan(self, attempt: int) -> dict[int, dict[str, dict[str, Any]]]:
        """Return the last ``hello`` and ``plan`` label of each rank in an attempt."""
        labels: dict[int, dict[str, dict[str, Any]]] = {}
        rows = self._connection.execute(
            "SELECT rank, kind, data FROM events WHERE attempt = ? "
            "AND kind IN ('hello', 'plan') ORDER BY id",
            (attempt,),
        )
        for rank, kind, data in rows:
            labels.setdefault(rank, {})[kind] = json.loads(data)
        return labels

    @_raises_store_error
    def state_changes(self) -> list[StateChange]:
        """Return all changes of the run's state, first to last."""
        rows = self._connection.execute("SELECT attempt, t, state, detail FROM states ORDER BY id")
        return [StateChange(*row) for row in rows]

    @_raises_store_error
    def gaps(self) -> list[Gap]:
        """Return the gaps in the history."""
        rows = self._connection.execute(
            "SELECT attempt, rank, after_seq, missed, t, reason FROM gaps ORDER BY id"
        )
        return [Gap(*row) for row in rows]

    @_raises_store_error
    def verdicts(self) -> list[Verdict]:
        """Return every verdict of the run, oldest first."""
        rows = self._connection.execute("SELECT document FROM verdicts ORDER BY began, id")
        return [from_json(Verdict, json.loads(row[0]), tolerant=True) for row in rows]

    @_raises_store_error
    def gpu_history(self, index: int, last_s: float) -> StoredGpuReadings:
        """Return the readings of a GPU in the ``last_s`` seconds before its newest reading."""
        rows = self._connection.execute(
            "SELECT t, utilisation_percent, memory_used_bytes, power_w, temperature_c "
            "FROM gpu_samples WHERE gpu = ?1 AND t >= "
            "(SELECT max(t) FROM gpu_samples WHERE gpu = ?1) - ?2 ORDER BY t",
            (index, last_s),
        ).fetchall()
        columns = np.array(rows, dtype=np.float64).reshape(-1, 5).T
        return StoredGpuReadings(*columns)

    # -- export --------------------------------------------------------------------------------

    @_raises_store_error
    def export(self, metrics: Sequence[str]) -> Iterator[ExportRow]:
        """Yield one row per metric, step and rank, without superseded steps.

        Old steps that are stored only as windows give one row per window.
        """
        return self._export(metrics)

    def _export(self, metrics: Sequence[str]) -> Iterator[ExportRow]:
        for metric in metrics:
            source = self._source(metric)
            if source is None:
                continue
            for span in spans(self._connection):
                series = Series(source.family, source.column, source.name_key, span)
                yield from export_rows(self._connection, metric, series)


def _open_read_only(path: Path) -> sqlite3.Connection:
    if not path.exists():
        raise no_history_error(path, "the run has no history yet.")
    connection = None
    try:
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=2.0, check_same_thread=False
        )
        try:
            version = check_layout(path, connection)
        except sqlite3.OperationalError:
            # On a read-only or full disk SQLite cannot create its shared index file. Read the
            # database as it is.
            connection.close()
            connection = sqlite3.connect(
                f"{path.absolute().as_uri()}?immutable=1", uri=True, check_same_thread=False
            )
            version = check_layout(path, connection)
    except sqlite3.Error as error:
        if connection is not None:
            connection.close()
        raise damaged_error(path, error) from error
    except BaseException:
        if connection is not None:
            connection.close()
        raise
    if version == 0:
        connection.close()
        raise no_history_error(path, "the run has no history yet.")
    return connection
