"""Queries on the history of a run: steps that count, rows of an export, values of metrics.

SQL only. A long history stores its latest steps one by one and older ones only as windows
(``training/store/history_windows.py``). An export takes each step from the finest level that
holds it, so it has every recorded value once.

ltui measures the loss that ``training_step`` returns. A program that logs it as well has its own
name for it, and that one is shown. Values decide whether a logged metric is the loss of each step.
Lists, charts, comparisons and exports all ask here.
"""

from __future__ import annotations

import heapq
import math
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ltui.training.json_codec import parse_json
from ltui.training.state.gpu_values import GPU_READINGS
from ltui.training.state.metric_name_patterns import (
    METRIC_RANKS,
    THROUGHPUT,
    TRAIN_LOSS,
    is_training_loss,
)
from ltui.training.state.run_snapshot import MetricValue
from ltui.training.store.database_schema import REAL, WHOLE, typed
from ltui.training.store.history_windows import (
    SAMPLES,
    STEPS,
    WINDOW_SIZES,
    Series,
    SeriesPart,
    TablePair,
)

if TYPE_CHECKING:
    from ltui.training.store.curve_reader import FloatArray

_UNBOUNDED = 1 << 60
"""Last step of an attempt that no later attempt cuts off."""


class Span(Struct, frozen=True):
    """The steps of an attempt that count: those up to and including ``last_step``."""

    attempt: int
    last_step: int


def spans(
    connection: sqlite3.Connection, begun: int | None = None, newest: int = _UNBOUNDED
) -> list[Span]:
    """Return the attempts with steps that count, first to last.

    An attempt replaces the earlier steps after its checkpoint only once it has trained a step
    itself. Its parent is the attempt that saved the checkpoint, by default the one before; the
    attempts between the two have no steps that count. ``begun`` is an attempt that counts as if it
    had trained: it is live, and about to train as an earlier one. Attempts after ``newest`` are
    left out.
    """
    rows = connection.execute(
        "SELECT a.attempt, a.resumed_step, a.parent, "
        "EXISTS (SELECT 1 FROM steps s WHERE s.attempt = a.attempt) "
        "OR EXISTS (SELECT 1 FROM step_windows w WHERE w.attempt = a.attempt) "
        "FROM attempts a WHERE a.attempt <= ? ORDER BY a.attempt DESC",
        (newest,),
    ).fetchall()
    trains = any(trained for *_, trained in rows)
    spans_newest_first: list[Span] = []
    last_step_that_counts = newest_that_counts = _UNBOUNDED
    for attempt, resumed_step, parent, trained in rows:
        if attempt > newest_that_counts:
            continue
        spans_newest_first.append(Span(attempt, last_step_that_counts))
        if (trained or (trains and attempt == begun)) and attempt > 1:
            last_step_that_counts = min(last_step_that_counts, resumed_step or 0)
            newest_that_counts = attempt - 1 if parent is None else parent
    return [span for span in reversed(spans_newest_first) if span.last_step > 0]


def counts(spans: Sequence[Span], attempt: int, step: int) -> bool:
    """Return whether a step of an attempt is still part of the run."""
    return any(span.attempt == attempt and step <= span.last_step for span in spans)


def newest_trained(spans: Sequence[Span]) -> int:
    """Return the newest attempt that replaced steps of earlier ones; otherwise the first one."""
    unbounded = [span.attempt for span in spans if span.last_step == _UNBOUNDED]
    return min(unbounded, default=1)


def first_replaced_step(spans: Sequence[Span], attempt: int) -> int:
    """Return the first step that attempts later than ``attempt`` have replaced."""
    return max((span.last_step for span in spans if span.attempt <= attempt), default=-1) + 1


class ExportRow(Struct, frozen=True):
    """One step, or one window of several steps; the ``value`` of a window is a mean."""

    metric: str
    step: int
    """The step, or the last step of a window."""
    epoch: int | None
    """Counted from 1."""
    time: float | None
    rank: int | None
    """None for a figure of all ranks."""
    value: float | None
    """None if the value was not a finite number (NaN)."""
    first_step: int | None = None
    """First step of a window; None for a single step, as are ``low`` and ``high``."""
    low: float | None = None
    high: float | None = None
    count: int = 1
    """Number of values that the row represents."""


def export_rows(
    db: sqlite3.Connection, metric: str, series: Series, span: Span, ranks: Sequence[int]
) -> Iterator[ExportRow]:
    """Yield the rows of these ranks in one attempt, by step and then by rank."""
    by_rank = (
        _rank_rows(SeriesPart(db, series, span.attempt, rank), metric, 0, span.last_step)
        for rank in ranks
    )
    return heapq.merge(*by_rank, key=attrgetter("step", "rank"))


def stored_ranks(db: sqlite3.Connection, tables: TablePair, attempt: int) -> list[int]:
    """Return the ranks with rows or windows of any series in an attempt."""
    ranks: set[int] = set()
    for table in (tables.rows, tables.windows):
        # A look-up in the index for each rank. The ranks of one series would take a whole scan.
        query = f"SELECT min(rank) FROM {table} WHERE attempt = ? AND rank > ?"  # noqa: S608
        rank: int | None = -1
        while rank is not None:
            ranks.add(rank)
            ((rank,),) = typed(db.execute(query, (attempt, rank)), (int, type(None)))
    return sorted(ranks - {-1})


def new_rows(
    db: sqlite3.Connection, metric: str, series: Series, span: Span, rank: int, newest: int
) -> Iterator[ExportRow]:
    """Yield the rows of one rank in one attempt after the step ``newest``."""
    if span.last_step <= newest:
        return
    part = SeriesPart(db, series, span.attempt, rank)
    # The newest step is always stored as a row. So one look-up shows that there is nothing new.
    (last,) = part.rows("max(step)").fetchone()
    if last is not None and last > newest:
        yield from _rank_rows(part, metric, newest + 1, span.last_step)


def _rank_rows(
    part: SeriesPart, metric: str, first_step: int, last_step: int
) -> Iterator[ExportRow]:
    """Yield windows from coarse to fine, each up to the first step that a finer level holds."""
    start, c = first_step, part.column
    for size in reversed(WINDOW_SIZES):
        finer_steps = [
            part.rows("min(step)").fetchone()[0],
            part.windows("min(first_step)", "AND level < ?", size).fetchone()[0],
        ]
        first_finer = min((step for step in finer_steps if step is not None), default=1 << 62)
        windows = part.windows(
            f"last_step, epoch, wall_s, {c}_mean, first_step, {c}_low, {c}_high, {c}_n",
            "AND level = ? AND first_step >= ? AND first_step < ? AND last_step <= ? "
            f"AND {c}_n > 0 ORDER BY win",
            size,
            start,
            first_finer,
            last_step,
        )
        kinds = (WHOLE, REAL, REAL, REAL, WHOLE, REAL, REAL, WHOLE)
        for last, epoch, t, mean, first, low, high, n in typed(windows, *kinds):
            start = (last // size + 1) * size
            yield ExportRow(metric, last, _shown(epoch), t, part.rank, mean, first, low, high, n)
    # A metric that was logged as NaN has a row without a value; of a step it means "not known".
    with_value = "" if part.tables is SAMPLES else f"AND {c} IS NOT NULL "
    if c == "loss":
        # A program that has reported a loss reports one at each step, so the others were NaN.
        (first_loss,) = part.rows("min(step)", with_value).fetchone()
        with_value = "" if first_loss is None else f"AND step >= {int(first_loss)} "
        with_value = with_value or f"AND {c} IS NOT NULL "
    combined = "first_step, low, high, coalesce(n, 1)" if part.tables.combined else "0, 0, 0, 1"
    rows = part.rows(
        f"step, epoch, {part.tables.time}, {c}, {combined}",
        f"AND step >= ? AND step <= ? {with_value}ORDER BY step, seq",
        start,
        last_step,
    )
    row_kinds = (WHOLE, REAL, REAL, REAL, REAL, REAL, REAL, WHOLE)
    for step, epoch, t, value, first, low, high, n in typed(rows, *row_kinds):
        window = (first, low, high, n) if n != 1 else ()
        yield ExportRow(metric, step, _shown(epoch), t, part.rank, value, *window)


def _shown(epoch: float | None) -> int | None:
    """Return an epoch as it is shown, counted from 1."""
    return None if epoch is None else int(epoch) + 1


def valid_text(text: str) -> str:
    """Return the text with a replacement for each character that UTF-8 cannot hold.

    Neither Parquet nor protocol buffers hold such a character.
    """
    return text.encode("utf-8", "replace").decode("utf-8")


StoredValues = dict[int, dict[str | None, MetricValue]]
"""Rank -> name of a logged metric, or None for the loss of the rank's steps -> its values."""


def stored_values(db: sqlite3.Connection, spans: Sequence[Span]) -> StoredValues:
    """Return the values of each metric, of the lowest rank that has logged it in these spans."""
    every: dict[str | None, Series] = {
        str(name): Series(SAMPLES, "value", (int(number),))
        for number, name in db.execute("SELECT id, name FROM names WHERE name != ?", (THROUGHPUT,))
    }
    values: StoredValues = {}
    for name, series in {**every, None: Series(STEPS, "loss")}.items():
        for rank in range(METRIC_RANKS):
            if name is None and not _reports_loss(db, spans, rank):
                continue
            value = _series_value([_part_values(db, series, span, rank) for span in spans])
            if value is not None:
                values.setdefault(rank, {})[name] = value
                break
    return values


def _reports_loss(db: sqlite3.Connection, spans: Sequence[Span], rank: int) -> bool:
    """Return whether the newest steps of a rank have a loss: on a GPU they have none."""
    parts = (SeriesPart(db, Series(STEPS, "loss"), s.attempt, rank) for s in reversed(spans))
    newest = next((p for p in parts if p.rows("1", "LIMIT 1").fetchone() is not None), None)
    return newest is not None and _since_first_loss(newest) is not None


_PartValues = tuple[float | None, float | None, tuple[int, float | None] | None]
"""Lowest and highest finite value, and step and value of the last row."""


def _series_value(parts: Sequence[_PartValues]) -> MetricValue | None:
    """Return the values of a series from those of its attempts, first to last."""
    last = next((last for _, _, last in reversed(parts) if last is not None), None)
    if last is None:
        return None
    step, value = last
    return MetricValue(
        last=math.nan if value is None else value,
        step=step,
        best_min=min((low for low, _, _ in parts if low is not None), default=None),
        best_max=max((high for _, high, _ in parts if high is not None), default=None),
    )


def _part_values(db: sqlite3.Connection, series: Series, span: Span, rank: int) -> _PartValues:
    """Return the values of one rank in one attempt.

    Windows that cover rows are read as well, which changes neither the lowest nor the highest.
    """
    part, column = SeriesPart(db, series, span.attempt, rank), series.column
    low = f"coalesce(low, {column})" if series.tables.combined else column
    high = f"coalesce(high, {column})" if series.tables.combined else column
    value = f"iif(n > 1, last, {column})" if series.tables.combined else column
    # The loss of a step is NULL if it is NaN, but also where a program reports none.
    since = "" if series.tables.combined else _since_first_loss(part)
    if since is None:
        return None, None, None
    up_to, newest = f"AND step <= ? {since}", "ORDER BY step DESC, seq DESC LIMIT 1"
    rows = part.rows(_lowest_and_highest(low, high), up_to, span.last_step).fetchone()
    windows = part.windows(
        _lowest_and_highest(f"{column}_low", f"{column}_high"),
        "AND last_step <= ?",
        span.last_step,
    ).fetchone()
    last = part.rows(f"step, {value}", f"{up_to} {newest}", span.last_step).fetchone()
    if last is None:
        last = part.windows(
            f"last_step, {column}_mean",
            f"AND last_step <= ? AND {column}_n > 0 ORDER BY last_step DESC LIMIT 1",
            span.last_step,
        ).fetchone()
    lows, highs = zip(rows, windows, strict=True)
    return _known(min, lows), _known(max, highs), last


def _since_first_loss(part: SeriesPart) -> str | None:
    """Return an SQL condition for the steps since the first loss; None if there is no loss."""
    (step,) = part.rows("min(step)", "AND loss IS NOT NULL").fetchone()
    if step is None and part.windows("1", "AND loss_n > 0 LIMIT 1").fetchone() is None:
        return None
    return f"AND step >= {int(step or 0)}"


def _lowest_and_highest(low: str, high: str) -> str:
    """Return SQL for the lowest and the highest finite value."""
    return f"min(iif(abs({low}) < 9e999, {low}, NULL)), max(iif(abs({high}) < 9e999, {high}, NULL))"


def _known(choose: Any, values: Sequence[float | None]) -> float | None:
    return choose((value for value in values if value is not None), default=None)  # type: ignore[no-any-return]


_COMPARED_VALUES = 64
"""Maximum number of logged values that are compared, the newest ones."""
_EQUAL_PERCENT = 90
"""Percentage of the values that must be equal: a loss may be logged beside a step's end."""


def has_two_losses(names: Collection[str]) -> bool:
    """Return True if the metrics are ``train/loss`` and another loss of the training."""
    return TRAIN_LOSS in names and any(n != TRAIN_LOSS and is_training_loss(n) for n in names)


def has_step_loss(db: sqlite3.Connection) -> bool:
    """Return True if ltui has measured the loss of a step."""
    for table, column in (("step_windows", "loss_mean"), ("steps", "loss")):
        query = f"SELECT 1 FROM {table} WHERE {column} IS NOT NULL LIMIT 1"  # noqa: S608
        if db.execute(query).fetchone():
            return True
    return False


def logs_step_loss(db: sqlite3.Connection) -> bool:
    """Return True if ``train/loss`` is only a second name for a loss that the program logs.

    A metric counts from its first value on, so that the answer does not change in the first steps.
    """
    names = {str(name): int(number) for number, name in db.execute("SELECT id, name FROM names")}
    candidates = [n for n in names if n != TRAIN_LOSS and is_training_loss(n)]
    if TRAIN_LOSS in names and not _is_trainer(db):
        return False  # The program itself logs both.
    return any(_equals(db, names[name], names.get(TRAIN_LOSS)) for name in candidates)


def logs_another_loss(db: sqlite3.Connection) -> bool:
    """Return True if the program logs ``train/loss`` with other values than each step's loss."""
    row = db.execute("SELECT id FROM names WHERE name = ?", (TRAIN_LOSS,)).fetchone()
    return row is not None and not _equals(db, int(row[0]), None)


def _is_trainer(db: sqlite3.Connection) -> bool:
    """Return True if Lightning's Trainer trains: on a GPU ltui logs what it has measured."""
    row = db.execute("SELECT data FROM events WHERE kind = 'hello' LIMIT 1").fetchone()
    hello = None if row is None else parse_json(row[0] or "{}")
    return isinstance(hello, dict) and not hello.get("program")


def _equals(db: sqlite3.Connection, name_id: int, measured_id: int | None) -> bool:
    """Return True if nearly all newest values of a metric are those of the loss of their step.

    ``measured_id`` is the metric that ltui sends from a GPU, where rows of steps have no loss.
    """
    table, value, key = "steps", "loss", ""
    if measured_id is not None:
        table, value, key = "samples", "value", f"AND l.name_id = {measured_id} "
    row = (
        f"SELECT 1 FROM {table} l WHERE l.attempt = s.attempt AND l.rank = s.rank {key}"  # noqa: S608
        f"AND l.step = s.step AND l.{value} IS NOT NULL"
    )
    near = f"abs(l.{value} - s.value) <= 1e-6 * max(abs(l.{value}), abs(s.value))"
    compared = equal = 0
    for (attempt,) in db.execute("SELECT attempt FROM attempts ORDER BY attempt DESC").fetchall():
        newest = (
            f"SELECT EXISTS({row}) AS known, EXISTS({row} AND {near}) AS same FROM samples s "  # noqa: S608
            "WHERE s.attempt = ? AND s.rank = 0 AND s.name_id = ? AND s.value IS NOT NULL "
            "ORDER BY s.step DESC LIMIT ?"
        )
        compared, equal = db.execute(
            f"SELECT coalesce(sum(known), 0), coalesce(sum(same), 0) FROM ({newest})",  # noqa: S608
            (attempt, name_id, _COMPARED_VALUES),
        ).fetchone()
        if compared:
            break
    else:
        # The mean of an epoch may be logged first at its end, or be NaN: it hides no known loss.
        known = f"SELECT 1 FROM {table} l WHERE l.{value} IS NOT NULL {key}LIMIT 1"  # noqa: S608
        return db.execute(known).fetchone() is None
    return int(equal) * 100 >= int(compared) * _EQUAL_PERCENT


def gpu_readings(
    connection: sqlite3.Connection, number: int, last_s: float, until: float
) -> dict[str, FloatArray]:
    """Return what ``RunStore.gpu_history`` does."""
    columns = ("t", *GPU_READINGS)
    rows = connection.execute(
        f"SELECT {', '.join(columns)} FROM gpu_samples WHERE gpu = :gpu AND t <= :until "  # noqa: S608
        "AND t >= (SELECT max(t) FROM gpu_samples WHERE gpu = :gpu AND t <= :until) - :last_s "
        "ORDER BY t",
        {"gpu": number, "last_s": last_s, "until": until},
    ).fetchall()
    # Imported here, as in ``RunStore.curve``.
    import numpy as np

    values = np.array(rows, dtype=np.float64).reshape(-1, len(columns)).T
    return dict(zip(columns, values, strict=True))
