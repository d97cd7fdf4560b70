"""Read from a run's history where its time went. SQL only.

Steps are read as blocks, the finer the shorter the run: single steps, else 64 or more of them.
Those of a long run are the windows of its history, of which only the mean of the times is known.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ltui.training.config.run_spec import BLOCKING_LEVELS
from ltui.training.json_codec import parse_json
from ltui.training.state.run_snapshot import LIVE, RunSnapshot, RunState
from ltui.training.state.time_ledger import AttemptTimes, Interval, Part, StepBlock, TimeFacts
from ltui.training.store.database_schema import LIMIT_S, REAL, TEXT, WHOLE, typed
from ltui.training.store.history_queries import spans, stored_ranks
from ltui.training.store.history_reader import RunStore
from ltui.training.store.history_windows import STEPS, WINDOW_SIZES, Series, SeriesPart

MOST_BLOCKS = 10_000
"""Maximum number of blocks that are read of a run, about, for reports, screens and lists alike: an
account depends on the size of its blocks. They take 0.1 s."""
MOST_ROWS = 100_000
"""Steps of all ranks of an attempt up to which blocks are made of rows, which are more exact than
the windows of the history and take 0.1 s."""
_STATES = {RunState.PAUSED.value: Part.PAUSES, RunState.QUEUED.value: Part.QUEUE}
_EVENTS = "('phase', 'checkpoint_saved', 'script_checkpoint', 'supervisor')"
_WHOLE_OR_NONE = (int, type(None))
_TIMES = Series(STEPS, "step_s")


class TimeStore(RunStore):
    """The history of a run, read for where its time went."""

    def __enter__(self) -> TimeStore:
        return self

    def time_facts(self, snapshot: RunSnapshot, most_blocks: int = MOST_BLOCKS) -> TimeFacts:
        """Return what the history says about the time of the run.

        ``snapshot`` is its newest one. About ``most_blocks`` blocks of steps are read.
        """
        with self.limited(LIMIT_S):
            return _time_facts(self._connection, snapshot, most_blocks)


def _time_facts(db: sqlite3.Connection, snapshot: RunSnapshot, most_blocks: int) -> TimeFacts:
    kept = {span.attempt: span.last_step for span in spans(db)}
    query = "SELECT attempt, started_at, ended_at, reason FROM attempts ORDER BY attempt"
    rows = [row for row in typed(db.execute(query), WHOLE, REAL, REAL, TEXT) if row[1] is not None]
    attempts = [
        AttemptTimes(
            number=number, begin=begin, end=end, restarted=reason is not None,
            last_step=kept.get(number, 0),
        )
        for number, begin, end, reason in rows
    ]  # fmt: skip
    until = snapshot.ended_at if snapshot.state not in LIVE else snapshot.taken_at
    if snapshot.state not in LIVE and attempts and attempts[-1].end is not None:
        until = attempts[-1].end
    until = until or snapshot.taken_at or (attempts[-1].begin if attempts else 0.0)
    begin = attempts[0].begin if attempts else until
    if snapshot.created_at is not None:
        begin = min(begin, snapshot.created_at)
    blocks = list(_blocks(db, [a.number for a in attempts], most_blocks))
    intervals = [*_events(db, until), *_stalls(db, until)]
    intervals += _states(db, until, {block.attempt for block in blocks})
    return TimeFacts(
        begin=begin,
        until=until,
        attempts=attempts,
        intervals=intervals,
        blocks=blocks,
        node_of={rank: node.node for node in snapshot.nodes for rank in node.ranks},
    )


def _states(db: sqlite3.Connection, until: float, trained: set[int]) -> Iterator[Interval]:
    """Yield pauses and waits, and the running of programs of which no steps are known."""
    query = "SELECT attempt, t, state FROM states ORDER BY id"
    rows = list(typed(db.execute(query), WHOLE, REAL, TEXT))
    for (attempt, begin, state), (_, end, _) in itertools.pairwise([*rows, (0, until, "")]):
        part = _STATES.get(state)
        if state == RunState.RUNNING.value and attempt not in trained:
            part = Part.UNKNOWN
        if part is not None and begin is not None:
            end = until if end is None else end
            yield Interval(attempt=attempt, begin=begin, end=end, part=part)


def _stalls(db: sqlite3.Connection, until: float) -> Iterator[Interval]:
    query = "SELECT attempt, began, ended, kind, level FROM verdicts"
    for attempt, began, ended, kind, level in typed(
        db.execute(query), WHOLE, REAL, REAL, TEXT, TEXT
    ):
        if level in BLOCKING_LEVELS and began is not None:
            end = until if ended is None else ended
            yield Interval(
                attempt=attempt, begin=began, end=end, part=Part.STALLS, cause=kind or "unknown"
            )


def _events(db: sqlite3.Connection, until: float) -> Iterator[Interval]:
    """Yield validations, checkpoints, and the times without a supervisor."""
    query = f"SELECT attempt, t, kind, text, data FROM events WHERE kind IN {_EVENTS} ORDER BY id"  # noqa: S608
    began: dict[int, float] = {}
    for attempt, t, kind, text, data in typed(
        db.execute(query), _WHOLE_OR_NONE, REAL, TEXT, TEXT, TEXT
    ):
        if attempt is None or t is None:
            continue
        fields = parse_json(data or "{}")
        seconds = _seconds(fields, "seconds")
        part = Part.VALIDATION if kind == "phase" else Part.CHECKPOINTS
        if kind == "supervisor":
            since = _seconds(fields, "since")
            if since is not None:
                yield Interval(
                    attempt=attempt, begin=since, end=t, part=Part.UNKNOWN, unsupervised=True
                )
        elif seconds is not None:
            end = _seconds(fields, "ended") or t
            yield Interval(attempt=attempt, begin=end - seconds, end=end, part=part)
        elif text == "Validation began.":
            began[attempt] = t
        elif text == "Validation ended." and attempt in began:
            yield Interval(attempt=attempt, begin=began.pop(attempt), end=t, part=part)
    for attempt, begin in began.items():  # it ended with its attempt
        yield Interval(attempt=attempt, begin=begin, end=until, part=Part.VALIDATION)


def _seconds(fields: Any, name: str) -> float | None:
    value = fields.get(name) if isinstance(fields, Mapping) else None
    return float(value) if isinstance(value, (int, float)) and value >= 0 else None


# -- steps ---------------------------------------------------------------------------------------


def _blocks(db: sqlite3.Connection, attempts: Sequence[int], most: int) -> Iterator[StepBlock]:
    ranks = {attempt: stored_ranks(db, STEPS, attempt) for attempt in attempts}
    most_of_rank = most / max(1, sum(map(len, ranks.values())))
    for attempt in attempts:
        parts = {rank: SeriesPart(db, _TIMES, attempt, rank) for rank in ranks[attempt]}
        longest = max(map(_length, parts.values()), default=0)
        fitting = (s for s in (1, *WINDOW_SIZES) if longest / s <= most_of_rank)
        size = next(fitting, WINDOW_SIZES[-1])
        windows = size > 1 and longest * len(parts) > MOST_ROWS
        for rank, part in parts.items():
            for rows in _selected(part, size, windows=windows):
                yield from _typed_blocks(rows, attempt, rank)


def _length(part: SeriesPart) -> int:
    """Return the number of steps from the first one of a rank in an attempt to the last one."""
    ends = [part.rows("min(step)"), part.rows("max(step)")]
    for size in (WINDOW_SIZES[-1], WINDOW_SIZES[1]):
        ends.append(part.windows("min(first_step)", "AND level = ?", size))
    known = [int(number) for (number,) in itertools.chain(*ends) if number is not None]
    return max(known) - min(known) if known else 0


def _selected(part: SeriesPart, size: int, *, windows: bool) -> Iterator[sqlite3.Cursor]:
    """Yield the columns of blocks: those of windows, and those of the rows after them."""
    first_row = 0
    if windows:
        timed = "AND level = ? AND step_s_n > 0 AND wall_s IS NOT NULL"
        yield part.windows(
            "win, first_step, last_step, n, wall_s + (n - 1) / 2.0 * step_s_mean, "
            "step_s_mean * step_s_n, coalesce(fetch_s_mean * fetch_s_n, 0.0)",
            f"{timed} ORDER BY win",
            size,
        )
        (last,) = part.windows("max(win)", timed, size).fetchone()
        first_row = 0 if last is None else (last + 1) * size
    yield part.rows(
        f"step / {size}, min(step), max(step), count(*), max(wall_s), sum(step_s), total(fetch_s)",
        "AND step >= ? AND wall_s IS NOT NULL AND step_s IS NOT NULL "
        f"GROUP BY step / {size} ORDER BY 1",
        first_row,
    )


def _typed_blocks(rows: sqlite3.Cursor, attempt: int, rank: int) -> Iterator[StepBlock]:
    kinds = (WHOLE, WHOLE, WHOLE, WHOLE, (int, float), (int, float), (int, float))
    for group, first, last, n, end, seconds, fetch_s in typed(rows, *kinds):
        yield StepBlock(
            attempt=attempt, rank=rank, group=group, first_step=first, last_step=last, batches=n,
            end=float(end), seconds=float(seconds), fetch_s=float(fetch_s),
        )  # fmt: skip
