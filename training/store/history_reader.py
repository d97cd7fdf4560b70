"""Reader of a run's history, also while it is written: curves, events, readings, export rows.

It opens ``run.db``, or its copy, read-only and never blocks the writer. It raises ``StoreError`` if
the file is damaged or was written by a newer ltui.
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from ltui.training.json_codec import WRONG_CONTENT, from_json, parse_json
from ltui.training.state.metric_name_patterns import THROUGHPUT, TRAIN_LOSS
from ltui.training.state.run_snapshot import RunSnapshot, Verdict, snapshot_from_json
from ltui.training.store.database_schema import (
    LIMIT_S,
    REAL,
    STEP_COLUMNS,
    TEXT,
    WHOLE,
    StoreError,
    UntrustedDatabase,
    damaged_error,
    no_history_error,
    open_for_reading,
    store_error,
    typed,
)
from ltui.training.store.history_place import history_file
from ltui.training.store.history_queries import (
    ExportRow,
    Span,
    export_rows,
    gpu_readings,
    has_step_loss,
    has_two_losses,
    logs_another_loss,
    logs_step_loss,
    new_rows,
    spans,
    stored_ranks,
)
from ltui.training.store.history_windows import SAMPLES, STEPS, Series, SeriesPart
from ltui.training.store.run_directory import RunDir

if TYPE_CHECKING:
    from ltui.training.store.curve_reader import Curve, FloatArray, Point

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

STEP_LOSS = "step/loss"
"""Name under which every step's own loss is exported if a loss is also logged as a metric."""


class StoredEvent(Struct, frozen=True):
    """One event of the run's history."""

    id: int
    attempt: int
    rank: int | None
    t: float
    kind: str
    text: str
    data: dict[str, Any]


class StoredAttempt(Struct, frozen=True):
    """Start and end of one attempt."""

    number: int
    started_at: float | None
    """Unix seconds."""
    ended_at: float | None
    """None if its end is not recorded."""
    resumed_step: int | None
    changes: tuple[str, ...]
    """Settings that were changed since the previous attempt."""


class CurveEnd(Struct, frozen=True):
    """The newest row of a curve in an attempt; the points that follow are new."""

    attempt: int
    series: Series | None
    """None while no such metric is stored."""
    step: int = -1
    seq: int = -1


_Result = TypeVar("_Result")


def _raises_store_error(method: Callable[..., _Result]) -> Callable[..., _Result]:
    """Make a method raise ``StoreError`` if the file holds anything but a history."""

    @wraps(method)
    def wrapper(self: RunStore, *args: Any, **kwargs: Any) -> _Result:
        with self.limited(LIMIT_S):
            return method(self, *args, **kwargs)

    return wrapper


class RunStore:
    """Read-only access to one run's history."""

    def __init__(self, run_dir: RunDir) -> None:
        self._connection, self.path = _open(run_dir)

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Raise ``StoreError`` if the file cannot be read, within so many seconds, as a history."""
        outer = self._connection.deadline
        self._connection.deadline = min(outer, time.monotonic() + seconds)
        try:
            yield
        except StoreError:
            raise
        except (sqlite3.DatabaseError, *WRONG_CONTENT) as error:
            raise damaged_error(self.path, error) from error
        finally:
            self._connection.deadline = outer

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
            snapshot = snapshot_from_json(parse_json(row[0]))
        except ValueError as error:
            raise store_error(
                self.path, f"the run's stored state is damaged ({error}).", "Delete the run."
            ) from error
        # Newer supervisors write it so.
        if has_two_losses(snapshot.metrics) and logs_step_loss(self._connection):
            del snapshot.metrics[TRAIN_LOSS]
        return snapshot

    @_raises_store_error
    def metric_names(self) -> list[str]:
        """Return the names of logged metrics, and ``train/loss`` if only ltui knows the loss."""
        rows = self._connection.execute("SELECT name FROM names WHERE name != ?", (THROUGHPUT,))
        names = {name for (name,) in typed(rows, str)}
        if logs_step_loss(self._connection):
            names.discard(TRAIN_LOSS)
        elif has_step_loss(self._connection):
            names.add(TRAIN_LOSS)
        return sorted(names)

    @_raises_store_error
    def exported_names(self) -> list[str]:
        """Return the names of the series that an export without a selection holds."""
        names = self.metric_names()
        if TRAIN_LOSS in names and logs_another_loss(self._connection):
            # The loss of the step records exists as well, under another name than the logged loss.
            names.append(STEP_LOSS)
        return names

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
        max_rows: int | None = None,
    ) -> Curve:
        """Return ``metric`` over steps, without superseded steps, in at most ``max_points`` points.

        If ``rank`` is None, the curve is the mean over ranks with the lowest and highest value of
        any rank. ``first_step`` and ``last_step`` limit the steps; both are included. ``attempt``
        limits the curve to one attempt. ``max_rows`` limits what is read of each attempt, and so
        the time; a smaller number gives a coarser curve.
        """
        # Imported here because it loads NumPy, which the state of a run does not need.
        from ltui.training.store.curve_reader import (
            MAX_POINTS_READ,
            merge_points,
            read_points,
            to_curve,
        )

        series = self._series(metric)
        points: list[Point] = []
        for span in self.spans() if series is not None else ():
            if series is not None and attempt in (None, span.attempt):
                part = self.part(series, span.attempt, rank)
                last = span.last_step if last_step is None else min(last_step, span.last_step)
                points += read_points(part, first_step or 0, last, max_rows or MAX_POINTS_READ)
        points.sort(key=lambda point: point[0])
        return merge_points(to_curve(points), max_points)

    @contextmanager
    def one_state(self) -> Iterator[None]:
        """Let every look-up of the block see the history at one moment."""
        with self.limited(LIMIT_S):
            self._connection.execute("BEGIN")
        try:
            yield
        finally:
            self._connection.rollback()

    @_raises_store_error
    def queue_position(self, attempt: int) -> tuple[int, int] | None:
        """Return the number of records of rank 0 that are stored, and that of its earlier queues.

        The first one changes whenever a curve may have new points. The second one changes when the
        rank was restarted. None before the first record.
        """
        row = self._connection.execute(
            "SELECT next_seq, base FROM cursors WHERE attempt = ? AND rank = 0", (attempt,)
        ).fetchone()
        return None if row is None else (int(row[0]), int(row[1] or 0))

    @_raises_store_error
    def curve_end(self, metric: str, rank: int, attempt: int) -> CurveEnd:
        """Return the newest row of a metric of one rank in an attempt."""
        series = self._series(metric)
        if series is None:
            return CurveEnd(attempt, None)
        newest = self.part(series, attempt, rank).rows(
            "step, seq", "ORDER BY step DESC, seq DESC LIMIT 1"
        )
        return next(
            (CurveEnd(attempt, series, *row) for row in typed(newest, WHOLE, WHOLE)),
            CurveEnd(attempt, series),
        )

    @_raises_store_error
    def new_points(self, metric: str, rank: int, end: CurveEnd) -> tuple[Curve, CurveEnd] | None:
        """Return the points after ``end`` and the new end; None if other rows are the metric now.

        A loss that is logged replaces that of the steps, for example.
        """
        # Imported here, as in ``curve``.
        from ltui.training.store.curve_reader import to_curve

        series = self._series(metric)
        if series != end.series:
            return None
        if series is None:
            return to_curve([]), end
        part, tables = self.part(series, end.attempt, rank), series.tables
        columns = f"step, epoch, {tables.time}, {tables.single(series.column)}, seq"
        after = "AND (step, seq) > (?, ?) ORDER BY step, seq"
        rows = part.rows(columns, after, end.step, end.seq).fetchall()
        if rows:
            end = replace(end, step=rows[-1][0], seq=rows[-1][-1])
        return to_curve([row[:-1] for row in rows]), end

    @_raises_store_error
    def last_steps(self, attempt: int) -> dict[int, tuple[float, ...]]:
        """Return the values of ``StepField`` for the newest batch of each rank of an attempt."""
        steps = {}
        for (rank,) in self._connection.execute(
            "SELECT rank FROM cursors WHERE attempt = ?", (attempt,)
        ).fetchall():
            part = self.part(Series(STEPS, "loss"), attempt, rank)
            newest = "ORDER BY step DESC, seq DESC LIMIT 1"
            row = part.rows(", ".join(STEP_COLUMNS), newest).fetchone()
            if row is not None:
                steps[int(rank)] = tuple(math.nan if v is None else float(v) for v in row)
        return steps

    def part(self, series: Series, attempt: int, rank: int | None) -> SeriesPart:
        """Return a series of one rank, or of all, in an attempt."""
        return SeriesPart(self._connection, series, attempt, rank)

    def _series(self, metric: str) -> Series | None:
        row = self._connection.execute("SELECT id FROM names WHERE name = ?", (metric,)).fetchone()
        if row is not None:
            return Series(SAMPLES, "value", (int(row[0]),))
        column = STEP_SERIES.get(metric) or ROW_SERIES.get(metric)
        return Series(STEPS, column) if column else None

    @_raises_store_error
    def peak_memory_bytes(self) -> float | None:
        """Return the most GPU memory that tensors of one rank used at once; None if unknown."""
        # The column is a maximum since the start of the attempt, so the last row has it.
        rows = self._connection.execute(
            "SELECT max((SELECT memory_peak_bytes FROM steps s WHERE s.attempt = c.attempt "
            "AND s.rank = c.rank ORDER BY step DESC, seq DESC LIMIT 1)) FROM cursors c"
        )
        return next(typed(rows, REAL))[0]  # type: ignore[no-any-return]

    @_raises_store_error
    def attempt_ranks(self) -> dict[int, tuple[int, ...]]:
        """Return the ranks with stored steps for each attempt with steps that count.

        A run may be resumed on another number of ranks, so attempts may have different ranks.
        """
        ranks: dict[int, tuple[int, ...]] = {}
        for span in self.spans():
            rows = self._connection.execute(
                "SELECT rank FROM cursors WHERE attempt = ? ORDER BY rank", (span.attempt,)
            )
            ranks[span.attempt] = tuple(rank for (rank,) in typed(rows, WHOLE))
        return ranks

    @_raises_store_error
    def attempts(self) -> list[StoredAttempt]:
        """Return every attempt, the first one first."""
        rows = self._connection.execute(
            "SELECT attempt, started_at, ended_at, resumed_step, changes FROM attempts "
            "ORDER BY attempt"
        )
        return [
            StoredAttempt(number, start, end, step, tuple(map(str, parse_json(changes or "[]"))))
            for number, start, end, step, changes in typed(rows, WHOLE, REAL, REAL, REAL, TEXT)
        ]

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
            StoredEvent(
                number, attempt, rank, t or 0.0, kind or "", text or "", _mapping(data or "{}")
            )
            for number, attempt, rank, t, kind, text, data in typed(
                rows, WHOLE, WHOLE, (int, type(None)), REAL, TEXT, TEXT, TEXT
            )
        ]

    @_raises_store_error
    def hyperparameters(self) -> dict[str, Any]:
        """Return the settings that the program reported last; empty if it has reported none."""
        row = self._connection.execute(
            "SELECT data FROM events WHERE kind = 'hyperparameters' ORDER BY id DESC LIMIT 1"
        ).fetchone()
        values = _mapping(row[0] or "{}").get("values") if row else None
        return values if isinstance(values, dict) else {}

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
            labels.setdefault(rank, {})[kind] = _mapping(data)
        return labels

    @_raises_store_error
    def verdicts(self) -> list[Verdict]:
        """Return every verdict of the run, oldest first."""
        rows = self._connection.execute("SELECT document FROM verdicts ORDER BY began, id")
        return [from_json(Verdict, parse_json(row[0]), tolerant=True) for row in rows]

    @_raises_store_error
    def gpu_history(
        self, number: int, last_s: float, until: float = math.inf
    ) -> dict[str, FloatArray]:
        """Return the readings of a GPU in the ``last_s`` seconds before its newest one, of those
        until ``until`` (unix seconds).

        ``GPU_READINGS``, and ``t`` in unix seconds -> values, oldest first; missing ones are NaN.
        ``number`` is ``GpuSnapshot.number``.
        """
        return gpu_readings(self._connection, number, last_s, until)

    # -- export --------------------------------------------------------------------------------

    def export(
        self, metrics: Sequence[str], only_ranks: Sequence[int] | None = None
    ) -> Iterator[ExportRow]:
        """Yield one row per metric, step and rank, without superseded steps.

        Old steps that are stored only as windows give one row per window. Raise ``StoreError`` if
        SQLite reports an error.
        """
        with self.limited(math.inf):
            ranks: dict[tuple[str, int], list[int]] = {}
            for metric, series, span in self._series_and_spans(metrics):
                key = series.tables.rows, span.attempt
                if key not in ranks:
                    ranks[key] = stored_ranks(self._connection, series.tables, span.attempt)
                chosen = ranks[key] if only_ranks is None else only_ranks
                yield from export_rows(self._connection, metric, series, span, chosen)

    def _series_and_spans(self, metrics: Sequence[str]) -> Iterator[tuple[str, Series, Span]]:
        """Yield each stored metric with each attempt that has steps that count."""
        every_span = spans(self._connection)
        for metric in metrics:
            series = self._series(metric)
            if series is not None:
                for span in every_span:
                    yield metric, series, span

    @_raises_store_error
    def spans(self, begun: int | None = None) -> list[Span]:
        """Return the attempts with steps that count, first to last.

        ``begun`` is an attempt that counts as if it had trained.
        """
        return spans(self._connection, begun)

    @_raises_store_error
    def last_step(self) -> int:
        """Return the last step that counts; 0 if no step is stored."""
        query = (
            "SELECT coalesce(max((SELECT max(step) FROM steps s WHERE s.attempt = c.attempt "
            "AND s.rank = c.rank AND step <= ?)), 0) FROM cursors c WHERE c.attempt = ?"
        )
        last_steps = (
            self._connection.execute(query, (span.last_step, span.attempt)).fetchone()[0]
            for span in spans(self._connection)
        )
        return max(last_steps, default=0)

    def export_new(
        self, metrics: Sequence[str], newest: Mapping[tuple[str, int], int]
    ) -> Iterator[ExportRow]:
        """Yield the rows of ``export`` after the step ``newest[metric, rank]``.

        ``newest`` may change while the rows are read. Raise ``StoreError`` as ``export``.
        """
        ranks = self.attempt_ranks()
        with self.limited(math.inf):
            for metric, series, span in self._series_and_spans(metrics):
                for rank in ranks.get(span.attempt, ()):
                    last = newest.get((metric, rank), -1)
                    yield from new_rows(self._connection, metric, series, span, rank, last)


def _mapping(text: Any) -> dict[str, Any]:
    document = parse_json(text)
    if not isinstance(document, dict):
        raise ValueError(f"{type(document).__name__} instead of a mapping")
    return document


def _open(run_dir: RunDir) -> tuple[UntrustedDatabase, Path]:
    file = history_file(run_dir)
    try:
        return open_for_reading(file.path, is_copy=file.is_copy), file.path
    except StoreError:
        # The supervisor may have ended meanwhile: then the copy is complete.
        again = history_file(run_dir)
        if again == file:
            raise
        return open_for_reading(again.path, is_copy=again.is_copy), again.path
