"""Write polled records to the store, and read what it holds about earlier attempts.

While the store cannot be written, because the disk is full or fails, the cursor is not advanced and
the queues keep as many records as fit. When the store works again, the records that are still in
the queues are written. Those that were overwritten meanwhile are recorded as a gap.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from ltui.training.lifecycle.rank_queue_poller import QueuePoller
from ltui.training.lifecycle.supervisor_client import AttemptPlan
from ltui.training.problem import ProblemError
from ltui.training.shared.record_types import RecordKind
from ltui.training.state.record_fold import FoldState, RankFold, json_label, logged_row, step_rows
from ltui.training.state.run_snapshot import Event, RunSnapshot
from ltui.training.state.snapshot_from_fold import Progress
from ltui.training.store.history_queries import StoredValues
from ltui.training.store.history_reader import RunStore
from ltui.training.store.history_writer import Batch, CombinedSample, Sample, StoreWriter
from ltui.training.store.run_directory import RunDir
from ltui.training.tensor_queue.queue_file import QueueFileError
from ltui.training.tensor_queue.queue_reader import Poll, Record

RETRY_S = 2.0
"""Seconds between two attempts to write while the store cannot be written."""
LOSS_EVENT_S = 60.0
"""Least seconds between two events about lost records."""
COMPARE_LOSSES_S = 1.0
"""Seconds between two comparisons of the logged losses with the loss of each step."""
THROUGHPUT_KEPT = 10_000
"""Maximum number of measured values that are kept while the store cannot be written."""
_LABELLED = {RecordKind.EVENT: None, RecordKind.HELLO: "hello", RecordKind.PLAN: "plan"}
"""Record kinds that are stored as events. The value is the event kind; None: see the label."""


class HistoryRecorder:
    """Writes one attempt's records, each exactly once."""

    def __init__(self, store: StoreWriter, attempt: int, queues: QueuePoller) -> None:
        self._store = store
        self._attempt = attempt
        self._queues = queues
        cursors = store.cursors(attempt)
        self._next = {rank: cursor.next_seq for rank, cursor in cursors.items()}
        self._combined = {rank: cursor.combined for rank, cursor in cursors.items()}
        self._combined_before = store.combined() - sum(self._combined.values())
        """Number of values that were combined in earlier attempts."""
        self._compare_losses_at = 0.0
        self._logs_loss = True
        """A loss that was just logged counts as that of the step."""
        self._lost_records = store.missed()
        self._loss_event_due = 0.0
        self._missing_parts = store.missing_parts()
        self._failing_since: float | None = None
        self._failure = ""
        self._retry_at = 0.0
        self._seen: dict[int, int] = {}
        self._rows_waiting = 0
        self._throughput: deque[Sample] = deque(maxlen=THROUGHPUT_KEPT)
        """Measured throughput that could not be written yet. The queues do not hold it."""

    def logs_step_loss(self, now_s: float) -> bool:
        """Return True if the program logs the loss of each step, by a comparison of the stored."""
        if now_s >= self._compare_losses_at or now_s < self._compare_losses_at - COMPARE_LOSSES_S:
            self._compare_losses_at = now_s + COMPARE_LOSSES_S
            self._logs_loss = self._store.logs_step_loss(default=self._logs_loss)
        return self._logs_loss

    def record(
        self, polls: Mapping[int, Poll], batch: Batch, snapshot: RunSnapshot | None, now_s: float
    ) -> None:
        """Write the polled records, ``batch`` and ``snapshot`` in one transaction.

        The samples of ``batch`` are the measured throughput.
        """
        self._throughput += batch.samples
        for rank, poll in polls.items():
            if poll.records:
                self._seen[rank] = poll.records[-1].seq + 1
        if self._failing_since is not None:
            self._rows_waiting += sum(_step_count(poll.records) for poll in polls.values())
            self._recover(now_s)
            return
        batch.samples = list(self._throughput)
        self._add_records(batch, {r: p.records for r, p in polls.items()}, now_s)
        if not batch and snapshot is None and not batch.cursors:
            return
        try:
            self._store.commit(self._attempt, batch, snapshot)
            self._store.drop_old_readings(now_s)
        except sqlite3.Error as error:
            self._fail(error, now_s)
            self._rows_waiting += len(batch.steps)
        else:
            self._advance(batch)
            self._throughput.clear()

    def write(self, write: Callable[..., None], *values: object) -> None:
        """Call ``write(*values)``, a method of the store, and note it if the store fails."""
        try:
            write(*values)
        except sqlite3.Error as error:
            self._fail(error, time.time())

    @property
    def note(self) -> str | None:
        """Return a short text about what is missing from the history, or None."""
        if self._failing_since is not None:
            clock = time.strftime("%H:%M", time.localtime(self._failing_since))
            return f"{self._failure} since {clock}, {self._rows_waiting} step records not written"
        lost = [f"records lost: {self._lost_records}"] if self._lost_records else []
        copy = [self._store.copy_note] if self._store.copy_note else []
        return "; ".join([*self._missing_parts, *lost, *copy]) or None

    @property
    def combined_values(self) -> int:
        """Number of logged values that ranks have combined with others."""
        return self._combined_before + sum(self._combined.values())

    @property
    def failing(self) -> bool:
        return self._failing_since is not None

    # -- failure and recovery ------------------------------------------------------------------

    def _fail(self, error: sqlite3.Error, now_s: float) -> None:
        if self._failing_since is None:
            self._failing_since = now_s
            self._rows_waiting = 0
        text = str(error)
        self._failure = "disk full" if "full" in text else f"history not written ({text})"
        self._retry_at = time.monotonic() + RETRY_S

    def _recover(self, now_s: float) -> None:
        """Write the records that the queues still hold since the first failure."""
        # Monotonic time: a wall clock that is set back must not delay the retry.
        if time.monotonic() < self._retry_at:
            return
        try:
            for rank, seen in sorted(self._seen.items()):
                self._catch_up(rank, seen, now_s)
        except sqlite3.Error as error:
            self._fail(error, now_s)
        else:
            self._failing_since = None
            self._rows_waiting = 0

    def _catch_up(self, rank: int, seen: int, now_s: float) -> None:
        with contextlib.suppress(OSError, QueueFileError):
            reader, base = self._queues.open_reader(rank, self._next.get(rank, 0))
            with contextlib.closing(reader):
                while self._next.get(rank, 0) < seen:
                    polled = [
                        dataclasses.replace(r, seq=r.seq + base) for r in reader.poll().records
                    ]
                    records = [r for r in polled if r.seq < seen]
                    if not records:
                        return
                    batch = Batch()
                    self._add_records(batch, {rank: records}, now_s)
                    self._store.commit(self._attempt, batch)
                    self._advance(batch)

    def _advance(self, batch: Batch) -> None:
        self._next.update({rank: c.next_seq for rank, c in batch.cursors.items()})
        self._combined.update({rank: c.combined for rank, c in batch.cursors.items()})
        self._lost_records += sum(missed for _, _, missed, _, _ in batch.gaps)

    # -- records to rows -----------------------------------------------------------------------

    def _add_records(
        self, batch: Batch, polled: Mapping[int, Iterable[Record]], now_s: float
    ) -> None:
        """Add rows for new records, for gaps and for the cursors to ``batch``."""
        for rank, records in polled.items():
            expected = self._next.get(rank, 0)
            combined = self._combined.get(rank, 0)
            steps = []
            for record in records:
                if record.seq < expected:
                    continue
                if record.seq > expected:
                    missed = record.seq - expected
                    reason = "the queue was overwritten before it was read"
                    batch.gaps.append((rank, record.seq, missed, now_s, reason))
                expected = record.seq + 1
                if record.kind == RecordKind.STEP:
                    steps.append(record)
                else:
                    combined += _add_record(batch, rank, record, now_s)
            rows = step_rows(steps)[1].tolist()
            batch.steps += [(rank, r.seq, row) for r, row in zip(steps, rows, strict=True)]
            if expected != self._next.get(rank, 0):
                cursor = self._queues.cursor(rank, expected)
                batch.cursors[rank] = replace(cursor, combined=combined)
        if batch.gaps and now_s >= self._loss_event_due:
            self._loss_event_due = now_s + LOSS_EVENT_S
            batch.events.append(_loss_event(batch, self._lost_records, now_s))


def _step_count(records: Iterable[Record]) -> int:
    return sum(record.kind == RecordKind.STEP for record in records)


def _loss_event(batch: Batch, lost_before: int, now_s: float) -> Event:
    """Return the event that says how many records were lost."""
    missed = {rank: n for rank, _, n, _, _ in batch.gaps}
    ranks = ", ".join(f"{n:,} of rank {rank}" for rank, n in missed.items())
    total = lost_before + sum(missed.values())
    text = (
        f"Records were lost: {ranks}; {total:,} in this run so far. The queue of a rank was "
        "overwritten before the supervisor read it: it was stopped or too slow, or more was "
        "logged than it can store."
    )
    return Event(now_s, "note", text, {"lost_records": total})


def _add_record(batch: Batch, rank: int, record: Record, now_s: float) -> int:
    """Add rows for a record that is no step. Return how many logged values it combines."""
    if record.kind == RecordKind.METRICS:
        return _add_logged(batch, rank, record, now_s)
    if record.kind in _LABELLED:
        label = json_label(record) or {}
        kind = _LABELLED[RecordKind(record.kind)] or str(label.get("kind", "note"))
        t = _number(label.get("t")) or now_s
        text = str(label.get("text", ""))
        batch.events.append(Event(t, kind, text, label, rank=rank, seq=record.seq))
    return 0


def _add_logged(batch: Batch, rank: int, record: Record, now_s: float) -> int:
    row = logged_row(record)
    if row is None:
        return 0
    seq, t, step, epoch = record.seq, row.t or now_s, row.step, row.epoch
    if row.count == 1:
        batch.samples += [
            (rank, seq, name, step, epoch, t, value)
            for name, value in zip(row.names, row.mean, strict=False)
        ]
        return 0
    step = step or 0
    first = step if row.first_step is None else row.first_step
    batch.combined += [
        CombinedSample(rank, seq, name, first, step, epoch, t, row.count, *values)
        for name, *values in zip(row.names, row.mean, row.low, row.high, row.last, strict=False)
    ]
    return row.count * len(row.names)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def stored_snapshot(run_dir: RunDir) -> RunSnapshot | None:
    """Return the snapshot that an earlier supervisor stored, or None if it cannot be read."""
    try:
        with RunStore(run_dir) as store:
            return store.snapshot()
    except ProblemError:
        return None


def starting_progress(plan: AttemptPlan, before: RunSnapshot | None) -> Progress | None:
    """Return where a resumed attempt starts, and the length of the run as far as it is known.

    ``before`` is the last snapshot of the previous attempt. Its length is not used if overrides
    (``--set``) were added, because they may have changed the length of the run.
    """
    if plan.resume_step is None:
        return None
    if before is None:
        return Progress(global_step=plan.resume_step)
    epochs = [c.epoch for c in before.checkpoints if c.global_step == plan.resume_step]
    same_length = not plan.changes
    return Progress(
        global_step=plan.resume_step,
        epoch=epochs[-1] if epochs else None,
        max_steps=before.max_steps if same_length else None,
        max_epochs=before.max_epochs if same_length else None,
        batches_per_epoch=before.batches_per_epoch if same_length else None,
    )


def restore_fold(run_dir: RunDir, attempt: int, before: RunSnapshot | None) -> FoldState:
    """Return the fold state of ``attempt``, or of the previous attempt, from the store.

    The records with the identity of the ranks and the length of the run may have been overwritten
    in the queues, so they cannot be read there again. ``before`` is the stored snapshot.
    """
    if before is None:
        return FoldState()
    try:
        with RunStore(run_dir) as store:
            records = store.hello_and_plan(attempt)
    except (ProblemError, sqlite3.Error):
        return FoldState()
    ranks = {
        rank: RankFold(rank=rank, hello=kinds.get("hello"), plan=kinds.get("plan"))
        for rank, kinds in records.items()
    }
    # The best throughput is that of the whole run, so it survives a resume.
    best = before.throughput.best_samples_per_s
    earlier_warnings = before.cautions if before.attempt == attempt else ()
    return FoldState(
        ranks=ranks,
        best_samples_per_s=best,
        best_is_provisional=best is None,
        warnings=earlier_warnings,
    )


def with_values(fold: FoldState, values: StoredValues) -> FoldState:
    """Return the fold state with the stored values of all metrics instead of its own."""
    ranks = {
        number: replace(fold.ranks.get(number) or RankFold(rank=number), metrics={}, loss=None)
        for number in sorted({*fold.ranks, *values})
    }
    for number, logged in values.items():
        metrics = {name: value for name, value in logged.items() if name is not None}
        ranks[number] = replace(ranks[number], metrics=metrics, loss=logged.get(None))
    return replace(fold, ranks=ranks)
