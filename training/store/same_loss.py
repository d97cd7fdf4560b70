"""Decide by values whether a logged metric is the loss of each step. SQL only.

ltui measures the loss that ``training_step`` returns. A program that logs it as well has its own
name for it, and that one is shown. Lists, charts, comparisons and exports all ask here.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection

from ltui.training.json_codec import parse_json
from ltui.training.state.metric_name_patterns import TRAIN_LOSS, is_training_loss

_VALUES = 64
"""Maximum number of logged values that are compared, the newest ones."""
_SHARE_PERCENT = 90
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
            (attempt, name_id, _VALUES),
        ).fetchone()
        if compared:
            break
    else:
        # The mean of an epoch may be logged first at its end, or be NaN: it hides no known loss.
        known = f"SELECT 1 FROM {table} l WHERE l.{value} IS NOT NULL {key}LIMIT 1"  # noqa: S608
        return db.execute(known).fetchone() is None
    return int(equal) * 100 >= int(compared) * _SHARE_PERCENT
