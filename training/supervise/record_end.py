"""Determine how an attempt ended, build its final snapshot, and record both.

Used by the supervisor only, after the last process of the attempt has exited.
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
"""Seconds to retry writing the end to a full disk.

After that the supervisor exits. Clients then derive the end from the files of shim and ranks.
"""


def determine_end(
    run_dir: RunDir, attempt: int, facts: EndFacts
) -> tuple[AttemptEnd, list[WorkerFailure]]:
    """Return how the attempt ended, and the failed ranks.

    ``facts`` are completed with what the logs of the engine and the ranks contain.
    """
    log = log_tail(run_dir.engine_log_path(attempt))
    failures = worker_failures(log)
    pulses = [p for p in facts.pulses.values() if p is not None]
    all_stopped = bool(pulses) and all(p.outcome is Outcome.STOPPED for p in pulses)
    end = classify_end(
        replace(
            facts,
            failures=tuple(failures),
            last_line=_last_line(run_dir, attempt, log, failures),
            forced_reason=None if all_stopped else facts.forced_reason,
        )
    )
    return end, failures


def _last_line(
    run_dir: RunDir, attempt: int, engine_log: str, failures: list[WorkerFailure]
) -> str | None:
    """Return the error line from the log of the first failed rank, or from the engine's log."""
    first = next((f.rank for f in failures if f.first), 0)
    rank_log = log_tail(run_dir.rank_log_path(attempt, first))
    return last_error_line(rank_log) or last_error_line(engine_log)


def final_snapshot(
    now: RunSnapshot,
    end: AttemptEnd,
    failures: list[WorkerFailure],
    *,
    ended_at: float,
    waiting: ScheduledRestart | None,
) -> RunSnapshot:
    """Return ``now``, the last snapshot of the live attempt, as the snapshot of its end.

    ``waiting`` is the scheduled restart, if another attempt follows.
    """
    ended = replace(
        now,
        state=end.state,
        detail=end.detail,
        exit_code=end.exit_code,
        ended_at=ended_at,
        elapsed_s=max(0.0, ended_at - (now.started_at or ended_at)),
        eta_s=None,
        throughput=replace(now.throughput, samples_per_s=None, steps_per_s=None),
    )
    if waiting is None:
        ended = replace(ended, stops=())
    else:
        ended = replace(ended, state=RunState.QUEUED, detail=waiting.describe())
    return with_exit_codes(ended, end, failures)


class EndRecorder:
    """Records the end of an attempt, on a disk that may be full."""

    def __init__(
        self, run_dir: RunDir, attempt: int, store: StoreWriter, recorder: HistoryRecorder
    ) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._store = store
        self._recorder = recorder

    def write_with_retry(self, snapshot: RunSnapshot, end: AttemptEnd) -> RunSnapshot:
        """Retry ``write`` for at most ``END_PATIENCE_S``. Return the snapshot with its note."""
        deadline = time.monotonic() + END_PATIENCE_S
        while True:
            snapshot, written = self.write(snapshot, end)
            if written or time.monotonic() >= deadline:
                return snapshot
            time.sleep(1.0)

    def write(self, snapshot: RunSnapshot, end: AttemptEnd) -> tuple[RunSnapshot, bool]:
        """Try once to write the end. Return the snapshot, and True if it was written.

        The returned snapshot has a note about what is missing from the history.
        """
        now_s = time.time()
        if self._recorder.failing:
            self._recorder.record({}, Batch(), None, now_s)
            if self._recorder.failing:
                return snapshot, False
        snapshot = replace(snapshot, history_note=self._recorder.note)
        state, detail, code = end.state, end.detail, end.exit_code
        try:
            self._store.write_snapshot(snapshot)
            self._store.set_state(self._attempt, now_s, state, detail, code)
            self._store.end_attempt(self._attempt, snapshot.ended_at or now_s)
        except sqlite3.Error:
            return snapshot, False
        return snapshot, True

    def release_shim(self) -> None:
        """Tell the shim that the end is recorded, so that it exits."""
        try:
            self._run_dir.engine_final_path(self._attempt).touch()
        except OSError as error:  # the disk cannot be written; the shim exits after its retries
            print(f"cannot tell the shim that the end is recorded: {error}", file=sys.stderr)
