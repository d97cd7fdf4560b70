"""Poll one run and make frames of it. Queues, supervisor, store and logs may each be missing.

There is no thread here: ``poller_thread.py`` calls ``poll`` one to four times a second.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ltui.app.live.attempt_queues import AttemptQueues
from ltui.app.live.frame import Frame, RankException, ResolvedVerdict
from ltui.app.live.gpu_history import GpuHistory
from ltui.app.live.live_values import LiveValues
from ltui.app.live.log_tail import LogTail
from ltui.app.live.metric_history import LatestCurveRequest
from ltui.app.live.run_curves import RunCurves
from ltui.app.live.run_marks import RunMark, checkpoint_marks, stored_marks
from ltui.app.live.stored_curves import stored_attempt_ranks, stored_gpu_samples
from ltui.training.config.run_spec import RunSpec
from ltui.training.lifecycle.recover_runs import current_snapshot
from ltui.training.lifecycle.supervisor_client import ControlClient
from ltui.training.problem import ProblemError
from ltui.training.state.metric_name_patterns import TRAIN_LOSS
from ltui.training.state.record_fold import FoldState, fold
from ltui.training.state.run_snapshot import (
    LIVE,
    RunSnapshot,
    Verdict,
)
from ltui.training.state.verdict_kinds import is_gpu_kind
from ltui.training.store.code_record import CodeRecord, read_records
from ltui.training.store.database_schema import StoreError
from ltui.training.store.history_place import history_file
from ltui.training.store.history_reader import RunStore
from ltui.training.store.labels_file import with_given_name
from ltui.training.store.run_directory import RunDir
from ltui.training.tensor_queue.record_types import PulseState

STATUS_S = 0.9
"""Seconds between two status requests to the supervisor."""
MAX_EVENTS = 64
"""Number of events in a frame: the latest ones."""
SHOWN_EVENT_KINDS = frozenset(
    {
        "attempt", "checkpoint_failed", "continued", "disk", "exception", "gpu_error", "mirror",
        "note", "on_verdict", "paused", "resumed", "stall_policy", "stopped", "telemetry_off",
        "verdict", "verdict_over",
    }
)  # fmt: skip
"""Kinds of events that are shown."""
RELOAD_S = 5.0
"""Minimum seconds between two loads of the stored history."""
_UNREADABLE = (StoreError, OSError, sqlite3.Error)
"""Errors of a history that is missing, damaged or locked."""


class RunPoller:
    """Collects everything that the dashboard shows of one run. To be used by one thread."""

    def __init__(self, run_dir: RunDir, requests: LatestCurveRequest | None = None) -> None:
        self.run_dir = run_dir
        self._client = ControlClient(run_dir)
        self._snapshot: RunSnapshot | None = None
        self._snapshot_at = 0.0
        self._status_requested_at = 0.0
        self._supervisor_answers = False
        self._attempt: int | None = None
        self._queues: AttemptQueues | None = None
        self._fold = FoldState()
        self._curves = RunCurves(requests or LatestCurveRequest())
        self._marks: tuple[RunMark, ...] = ()
        self._attempt_ranks: tuple[tuple[int, int], ...] = ()
        self._log: LogTail | None = None
        self._gpu_history = GpuHistory()
        self._gpus_loaded: set[int] = set()
        self._active_verdicts: dict[tuple[str, str, tuple[int, ...], tuple[int, ...]], Verdict] = {}
        self._resolved_verdicts: deque[ResolvedVerdict] = deque(maxlen=8)
        self._rank_exceptions: tuple[RankException, ...] = ()
        self._spec: RunSpec | None = None
        self._code: tuple[CodeRecord, ...] = ()
        self._hyperparameters: Mapping[str, Any] = {}
        self._events: deque[tuple[float, str]] = deque(maxlen=MAX_EVENTS)
        self._last_event = 0
        self._events_at = 0.0
        self._reload_due = True
        self._loaded_at = 0.0
        self._was_live = False
        self._history_error: str | None = None

    def close(self) -> None:
        """Close the queue files."""
        if self._queues is not None:
            self._queues.close()

    def poll(self, now: float, now_ns: int) -> Frame:
        """Return a frame as of ``now`` (unix seconds) and ``now_ns`` (CLOCK_MONOTONIC)."""
        if (
            self._snapshot is None
            or now - self._status_requested_at >= STATUS_S
            or now < self._status_requested_at
        ):
            self._refresh_snapshot(now)
        base = self._snapshot
        assert base is not None
        live = base.state in LIVE
        if base.attempt != self._attempt:
            self._begin_attempt(base.attempt)
        pulses = self._read_queues() if live or self._was_live else {}
        self._reload_after_end(live)
        self._load_history(now)
        self._load_requested_curves()
        self._read_events(now)
        if self._log is not None:
            self._log.poll(now)
            if not live:
                self._log.finish()
        self._was_live = live
        live_values = LiveValues(self._fold, pulses, now, now_ns, self._supervisor_answers)
        return self._frame(live_values.applied_to(base), now)

    # -- the supervisor and the store --------------------------------------------------------------

    def _refresh_snapshot(self, now: float) -> None:
        self._status_requested_at = now
        snapshot = self._client.status()
        self._supervisor_answers = snapshot is not None
        if snapshot is None:
            snapshot = current_snapshot(self.run_dir)
        if self._supervisor_answers or self._snapshot is None or snapshot.state not in LIVE:
            self._snapshot_at = now if self._supervisor_answers else (snapshot.taken_at or now)
        self._snapshot = snapshot = with_given_name(self.run_dir, snapshot)
        self._gpu_history.add(snapshot.gpus)
        self._curves.hides_step_loss = bool(snapshot.metrics) and TRAIN_LOSS not in snapshot.metrics
        self._curves.add_gpus(snapshot.gpus, snapshot.global_step, snapshot.epoch)
        self._track_verdicts(snapshot, now)

    def _track_verdicts(self, snapshot: RunSnapshot, now: float) -> None:
        active = {
            # The GPUs that a finding names change, so its place does not identify it.
            (v.kind, "" if is_gpu_kind(v.kind) else v.place or "", v.culprits, v.nodes): v
            for v in snapshot.verdicts
            if v.ended is None
        }
        if snapshot.state in LIVE:
            for key, verdict in self._active_verdicts.items():
                if key not in active and not any(k[0] == key[0] for k in active):
                    began = verdict.began if verdict.began is not None else now
                    lasted = ResolvedVerdict(
                        verdict=verdict, lasted_s=max(0.0, now - began), at=now
                    )
                    self._resolved_verdicts.append(lasted)
        self._active_verdicts = active

    def _load_history(self, now: float) -> None:
        if not self._reload_due or now - self._loaded_at < RELOAD_S:
            return
        self._loaded_at = now
        try:
            self._load_curves()
            self._reload_due = False
            self._history_error = None
        except _UNREADABLE as error:
            # A run that has just been created has no store yet; any other error is shown.
            if history_file(self.run_dir).path.exists():
                self._history_error = f"the history can't be read ({error})"

    def _read_events(self, now: float) -> None:
        """Read the events written since the last call, and the code of a new attempt.

        ``_load_history`` reports an unreadable history.
        """
        if abs(now - self._events_at) < RELOAD_S:
            return
        self._events_at = now
        if not self._code or self._code[-1].attempt != self._attempt:
            self._code = tuple(read_records(self.run_dir))
        with suppress(*_UNREADABLE), RunStore(self.run_dir) as store:
            for event in store.events(self._last_event):
                self._last_event = event.id
                if event.kind == "hyperparameters":
                    self._hyperparameters = dict(event.data.get("values") or {})
                elif event.kind in SHOWN_EVENT_KINDS:
                    self._events.append((event.t, event.text))
            self._marks = tuple(stored_marks(store))

    def _load_curves(self) -> None:
        with RunStore(self.run_dir) as store:
            self._curves.load(store)
            self._attempt_ranks = stored_attempt_ranks(store)
            self._rank_exceptions = _first_exceptions(store, self._attempt or 1)
            self._load_gpus(store)

    def _load_requested_curves(self) -> None:
        if self._curves.is_complete():
            return
        # Live points are shown without it; `_load_history` reports the error.
        with suppress(*_UNREADABLE), RunStore(self.run_dir) as store:
            self._curves.load_requested(store)

    def _load_gpus(self, store: RunStore) -> None:
        """Load the GPU readings recorded before this poller began, once for each GPU."""
        assert self._snapshot is not None
        for number in {gpu.number for gpu in self._snapshot.gpus} - self._gpus_loaded:
            self._gpu_history.load(number, stored_gpu_samples(store, number))
            self._gpus_loaded.add(number)

    # -- the ranks' queues -------------------------------------------------------------------------

    def _begin_attempt(self, attempt: int) -> None:
        if self._queues is not None:
            self._queues.close()
        self._attempt = attempt
        # A resume may have changed the specification.
        with suppress(ProblemError):
            self._spec = self.run_dir.read_spec()
        self._queues = AttemptQueues(self.run_dir.queue_dir(attempt))
        self._fold = FoldState()
        self._curves.forget_live()
        self._log = LogTail(self.run_dir.logs_dir(attempt))
        self._rank_exceptions = ()
        self._active_verdicts = {}
        self._reload_due, self._loaded_at = True, 0.0

    def _read_queues(self) -> dict[int, PulseState | None]:
        assert self._queues is not None
        if 0 in self._queues.open_files():
            # Its steps begin again at an earlier one, but the steps of a curve must ascend.
            self._curves.forget_live()
            self._reload_due = True
        for rank, poll in self._queues.poll():
            self._add_records(rank, poll.records, poll.missed)
        self._curves.throughput.add(self._fold, self._queues.ranks)
        return self._queues.pulses()

    def _add_records(self, rank: int, records: Any, missed: int) -> None:
        if missed and rank == 0:
            # Missed records are in the store, or are a gap there: collect live points again.
            self._curves.forget_live(throughput=False)
            self._reload_due = True
        self._fold = fold(self._fold, rank, records, missed)
        if rank == 0:
            self._curves.add_records(records)

    def _reload_after_end(self, live: bool) -> None:
        if self._was_live and not live:
            # The supervisor has written everything: load it once more, with the exceptions.
            self._reload_due, self._loaded_at = True, 0.0

    # -- the frame ---------------------------------------------------------------------------------

    def _frame(self, snapshot: RunSnapshot, now: float) -> Frame:
        times = [r.wall_s for r in self._fold.ranks.values() if r.wall_s is not None]
        log = self._log
        return Frame(
            snapshot=snapshot,
            now=now,
            supervisor_answers=self._supervisor_answers,
            snapshot_at=self._snapshot_at,
            last_record_at=max(times, default=None),
            curves=self._curves.requested(),
            curve_names=tuple(sorted(self._curves.available_names())),
            marks=(*self._marks, *checkpoint_marks(snapshot.checkpoints)),
            attempt_ranks=self._attempt_ranks,
            rates=self._curves.throughput.curves(),
            gpu_series=self._gpu_history.series(),
            resolved_verdicts=tuple(self._resolved_verdicts),
            rank_exceptions=self._rank_exceptions,
            last_steps={rank: f.last_step for rank, f in self._fold.ranks.items() if f.last_step},
            spec=self._spec,
            code=self._code,
            hyperparameters=self._hyperparameters,
            events=tuple(self._events),
            curves_version=self._curves.version,
            log=log.lines() if log else (),
            log_count=log.count if log else 0,
            error=self._history_error,
        )


def _first_exceptions(store: RunStore, attempt: int) -> tuple[RankException, ...]:
    """Return the first exception of each rank in ``attempt``, the earliest first."""
    exceptions: dict[int, RankException] = {}
    for event in sorted(store.events(), key=lambda event: event.t):
        if event.kind == "exception" and event.attempt == attempt and event.rank is not None:
            kind = str(event.data.get("type", "an exception"))
            message = str(event.data.get("message") or event.text)
            exceptions.setdefault(event.rank, RankException(event.rank, kind, message))
    return tuple(exceptions.values())
