"""The end of an attempt: found out from what it left behind, drawn once more, written down.

Used by the supervisor's loop alone, after the last process of the attempt is gone.
"""

from __future__ import annotations

import sqlite3
import sys
import time
from dataclasses import replace

from ltui.training.lifecycle.classify_end import AttemptEnd, EndFacts, classify_end
from ltui.training.lifecycle.elastic_log import (
    WorkerFailure,
    last_error_line,
    log_tail,
    worker_failures,
)
from ltui.training.lifecycle.restart_rules import ScheduledRestart
from ltui.training.state.run_snapshot import RunSnapshot, RunState
from ltui.training.store.history_writer import Batch, StoreWriter
from ltui.training.store.run_directory import RunDir
from ltui.training.supervise.history_recorder import HistoryRecorder
from ltui.training.supervise.snapshot_builder import with_exit_codes
from ltui.training.tensor_queue.record_types import Outcome

END_PATIENCE_S = 60.0
"""So long a full disk is waited for after the end; then front ends tell how the run
ended from what the keeper and the ranks left, and no process stays behind."""


def determine_end(
    run_dir: RunDir, attempt: int, facts: EndFacts
) -> tuple[AttemptEnd, list[WorkerFailure]]:
    """How the attempt ended; ``facts`` but for what its logs tell, which is added here."""
    log = log_tail(run_dir.engine_log_path(attempt))
    failures = worker_failures(log)
    stopped = [p for p in facts.pulses.values() if p is not None]
    all_stopped = bool(stopped) and all(p.outcome is Outcome.STOPPED for p in stopped)
    found = classify_end(
        replace(
            facts,
            failures=tuple(failures),
            last_line=_last_line(run_dir, attempt, log, failures),
            forced_reason=None if all_stopped else facts.forced_reason,
        )
    )
    return found, failures


def _last_line(
    run_dir: RunDir, attempt: int, engine_log: str, failures: list[WorkerFailure]
) -> str | None:
    """What was said last, where no exception was reported: by the first rank that failed."""
    first = next((f.rank for f in failures if f.first), 0)
    rank_log = log_tail(run_dir.rank_log_path(attempt, first))
    return last_error_line(rank_log) or last_error_line(engine_log)


def final_snapshot(
    now: RunSnapshot,
    found: AttemptEnd,
    failures: list[WorkerFailure],
    *,
    ended_at: float,
    waiting: ScheduledRestart | None,
) -> RunSnapshot:
    """``now``, the last look, as that of an attempt that has ended; ``waiting`` for another."""
    over = replace(
        now,
        state=found.state,
        detail=found.detail,
        exit_code=found.exit_code,
        ended_at=ended_at,
        elapsed_s=max(0.0, ended_at - (now.started_at or ended_at)),
        eta_s=None,
        throughput=replace(now.throughput, samples_per_s=None, steps_per_s=None),
    )
    if waiting is None:
        over = replace(over, stops=())
    else:
        over = replace(over, state=RunState.QUEUED, detail=waiting.describe())
    return with_exit_codes(over, found, failures)


class EndRecorder:
    """Writes down that an attempt has ended, on a disk that may be full."""

    def __init__(
        self, run_dir: RunDir, attempt: int, store: StoreWriter, recorder: HistoryRecorder
    ) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._store = store
        self._recorder = recorder

    def write_with_retry(self, snapshot: RunSnapshot, found: AttemptEnd) -> RunSnapshot:
        """Write until the disk takes it, or patience ends; ``snapshot`` with what is missing."""
        patience_ends = time.monotonic() + END_PATIENCE_S
        while True:
            snapshot, written = self.write(snapshot, found)
            if written or time.monotonic() >= patience_ends:
                return snapshot
            time.sleep(1.0)

    def write(self, snapshot: RunSnapshot, found: AttemptEnd) -> tuple[RunSnapshot, bool]:
        """Try once: ``snapshot`` with what is missing, and whether the disk took it."""
        now_s = time.time()
        if self._recorder.failing:
            self._recorder.record({}, Batch(), None, now_s)
            if self._recorder.failing:
                return snapshot, False
        snapshot = replace(snapshot, history_note=self._recorder.note)
        state, detail, code = found.state, found.detail, found.exit_code
        try:
            self._store.write_snapshot(snapshot)
            self._store.set_state(self._attempt, now_s, state, detail, code)
            self._store.end_attempt(self._attempt, snapshot.ended_at or now_s)
        except sqlite3.Error:
            return snapshot, False
        return snapshot, True

    def release_shim(self) -> None:
        """It has stayed until all is recorded."""
        try:
            self._run_dir.engine_final_path(self._attempt).touch()
        except OSError as error:  # a disk that takes nothing any more; the keeper gives up in time
            print(f"the keeper cannot be told that all is recorded: {error}", file=sys.stderr)
