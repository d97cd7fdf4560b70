"""Poll one run and make frames of it. Supervisor, store and logs may each be missing.

The figures are those of the supervisor's snapshot, and the curves are what it has stored. While it
does not answer, they keep their age. A thread between the run and its screen polls and posts one to
four frames per second, and errors as frames.
"""

from __future__ import annotations

import math
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from msgspec.structs import replace

from ltui.app.live.curve_arithmetic import LatestCurveRequest
from ltui.app.live.frame import (
    Frame,
    RankException,
    ResolvedVerdict,
    RunMark,
    checkpoint_marks,
    pause_mark,
    stored_marks,
)
from ltui.app.live.gpu_history import HISTORY_S, GpuHistory
from ltui.app.live.log_tail import LogTail
from ltui.app.live.run_curves import RunCurves, stored_attempt_ranks
from ltui.app.live.run_time import RunTime, read_time
from ltui.training.config.run_spec import RunSpec, VerdictLevel
from ltui.training.lifecycle.run_status import current_snapshot
from ltui.training.lifecycle.supervisor_client import ControlClient
from ltui.training.problem import ProblemError
from ltui.training.shared.record_types import StepField
from ltui.training.state.run_snapshot import LIVE, RunSnapshot, RunState, Verdict
from ltui.training.state.verdicts import is_gpu_kind
from ltui.training.store.code_record import CodeRecord, read_records
from ltui.training.store.database_schema import NoHistoryError, StoreError
from ltui.training.store.find_run import is_in_bin
from ltui.training.store.frozen_code import FrozenCode, changed_files, frozen_code_of
from ltui.training.store.history_place import history_file
from ltui.training.store.history_reader import RunStore, StoredEvent
from ltui.training.store.labels_file import with_given_name
from ltui.training.store.run_directory import RunDir

FASTEST_S, SLOWEST_S = 0.25, 1.0
"""Least and most seconds between two frames."""
MAX_CPU_FRACTION = 0.02
"""Fraction of a CPU core that frames may use: reading and drawing them and writing to the
terminal."""
_SMOOTHING = 0.2
"""Weight of the last frame in the mean cost of a frame."""


class FramePacer:
    """Chooses the time between frames so that a dashboard uses a limited fraction of a CPU core.

    A frame costs more with more ranks, and on a slow or busy processor.
    """

    def __init__(self) -> None:
        self._cost_s = 0.0

    def period_s(self, cpu_s: float) -> float:
        """Return the seconds until the next frame. ``cpu_s`` is the CPU time of the process for
        the last frame."""
        # A single expensive frame, such as the first one, must not slow down the next ones.
        cost_s = min(cpu_s, MAX_CPU_FRACTION * SLOWEST_S)
        self._cost_s += _SMOOTHING * (cost_s - self._cost_s)
        return min(SLOWEST_S, max(FASTEST_S, self._cost_s / MAX_CPU_FRACTION))


class RunGoneError(ProblemError):
    """The directory of the run does not exist any more."""


class Poller(Protocol):
    """The source of frames: ``run_poller.RunPoller``, or a fake in a test."""

    def poll(self, now: float, now_ns: int) -> Frame: ...
    def close(self) -> None: ...


class PollerThread:
    """Calls ``post`` with a frame at each tick until ``stop``. ``post`` must not block."""

    def __init__(
        self, make_poller: Callable[[], Poller], post: Callable[[Frame], None], *, run_id: str
    ) -> None:
        self._make_poller, self._post = make_poller, post
        self._stopped = threading.Event()
        self._woken = threading.Event()
        self._last = Frame(
            snapshot=RunSnapshot(
                id=run_id, name=run_id, state=RunState.QUEUED, saves_checkpoints=None
            ),
            now=time.time(),
            supervisor_answers=False,
            snapshot_at=time.time(),
        )
        self._error_since: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"feed {run_id}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end; it ends within a tick."""
        self._stopped.set()
        self._woken.set()

    def wake(self) -> None:
        """Ask for the next frame at once, because a screen requests other curves."""
        self._woken.set()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        poller: Poller | None = None
        pace, cpu_before = FramePacer(), time.process_time()
        try:
            while not self._stopped.is_set():
                began = time.monotonic()
                try:
                    poller = poller or self._make_poller()
                    self._last = poller.poll(time.time(), time.monotonic_ns())
                    self._error_since = None
                    self._post_frame(self._last)
                except Exception as error:  # noqa: BLE001 - the thread's top: it becomes a message
                    self._post_frame(self._error_frame(error))
                cpu = time.process_time()
                period, cpu_before = pace.period_s(cpu - cpu_before), cpu
                spent = time.monotonic() - began
                # After a poll that waited long for files or the supervisor, rest for as long.
                rest = max(spent, 0.02)
                self._stopped.wait(rest)
                self._woken.wait(max(0.0, period - spent - rest))
                self._woken.clear()
        finally:
            if poller is not None:
                poller.close()

    def _error_frame(self, error: Exception) -> Frame:
        now = time.time()
        if isinstance(error, RunGoneError):
            snapshot, said = self._last.snapshot, error.problems[0]
            if snapshot.state in LIVE:
                snapshot = replace(snapshot, state=RunState.LOST, detail=said.what)
            text = f"The run's directory is gone: {said.what} {said.remedy or ''}"
            return replace(self._last, snapshot=snapshot, now=now, error=text, error_since=None)
        self._error_since = self._error_since or now
        text = str(error) or type(error).__name__
        return replace(self._last, now=now, error=text, error_since=self._error_since)

    def _post_frame(self, frame: Frame) -> None:
        if not self._stopped.is_set():
            self._post(frame)


def _gone(run_dir: RunDir) -> RunGoneError:
    if is_in_bin(run_dir) is None:
        return RunGoneError.of(where=run_dir.id, what="it was moved or removed.")
    remedy = f"To bring it back: ltui restore {run_dir.id}"
    return RunGoneError.of(where=run_dir.id, what="it was deleted.", remedy=remedy)


STATUS_S = 0.9
"""Seconds between two requests to a supervisor that does not answer."""
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
"""Seconds between two looks at the events, and until an unreadable history is tried again."""
TIME_S = 15.0
"""Seconds between two readings of where the time of a run went."""
_UNREADABLE = (StoreError, OSError, sqlite3.Error)
"""Errors of a history that is missing, damaged or locked."""
_VerdictKey = tuple[str, str, tuple[int, ...], tuple[int, ...]]
"""Kind, place, culprits and nodes."""


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
        self._last_steps: Mapping[int, Sequence[float]] = {}
        self._curves = RunCurves(requests or LatestCurveRequest())
        self._marks: tuple[RunMark, ...] = ()
        self._pauses: list[RunMark] = []
        self._attempt_ranks: tuple[tuple[int, int], ...] = ()
        self._log: LogTail | None = None
        self._gpu_history = GpuHistory()
        self._gpus_loaded: set[int] = set()
        self._active_verdicts: dict[_VerdictKey, tuple[Verdict, int]] = {}
        """The active verdicts, with the last step at which they were seen."""
        self._resolved_verdicts: deque[ResolvedVerdict] = deque(maxlen=8)
        self._exceptions: list[StoredEvent] = []
        self._spec: RunSpec | None = None
        self._code: tuple[CodeRecord, ...] = ()
        self._frozen: FrozenCode | None = None
        self._code_changes: tuple[str, ...] = ()
        self._hyperparameters: Mapping[str, Any] = {}
        self._events: deque[tuple[float, str]] = deque(maxlen=MAX_EVENTS)
        self._last_event = 0
        self._events_at = 0.0
        self._history_failed_at = self._time_at = 0.0
        self._time: RunTime | None = None
        self._time_is_live = False
        self._was_live = False
        self._history_error: str | None = None

    def close(self) -> None:
        """End the poller, which keeps nothing open."""

    def poll(self, now: float, now_ns: int) -> Frame:  # noqa: ARG002 - simulated runs need it
        """Return a frame as of ``now`` (unix seconds). Raise ``RunGoneError`` for a deleted run."""
        if not self.run_dir.path.is_dir():
            raise _gone(self.run_dir)
        if self._supervisor_answers or not 0 <= now - self._status_requested_at < STATUS_S:
            self._refresh_snapshot(now)
        snapshot = self._snapshot
        assert snapshot is not None
        live = snapshot.state in LIVE
        if snapshot.attempt != self._attempt:
            self._begin_attempt(snapshot.attempt)
        elif self._was_live and not live:
            # Everything is written now: read it once more, with the exceptions.
            self._curves.forget()
            self._events_at = 0.0
        self._was_live = live
        self._curves.use_snapshot(snapshot)
        self._read_history(now, live)
        if self._log is not None:
            self._poll_log(self._log, now)
            if not live:
                self._log.finish()
        return self._frame(snapshot, now)

    def _poll_log(self, log: LogTail, now: float) -> None:
        log.poll(now)

    def _open_store(self) -> RunStore:
        return RunStore(self.run_dir)

    # -- the supervisor and the store --------------------------------------------------------------

    def _refresh_snapshot(self, now: float) -> None:
        self._status_requested_at = now
        snapshot = self._client.status()
        self._supervisor_answers = snapshot is not None
        if snapshot is None:
            snapshot = current_snapshot(self.run_dir)
            # Of a run in the run queue, no process has to answer.
            queued = snapshot.state is RunState.QUEUED and self.run_dir.queued_path.exists()
            self._supervisor_answers = queued
        if self._supervisor_answers or self._snapshot is None or snapshot.state not in LIVE:
            self._snapshot_at = now if self._supervisor_answers else (snapshot.taken_at or now)
        self._snapshot = snapshot = with_given_name(self.run_dir, snapshot)
        self._gpu_history.add(snapshot.gpus)
        self._track_verdicts(snapshot, now)

    def _track_verdicts(self, snapshot: RunSnapshot, now: float) -> None:
        active = {
            # The GPUs that a finding names change, so its place does not identify it.
            (v.kind, "" if is_gpu_kind(v.kind) else v.place or "", v.culprits, v.nodes): v
            for v in snapshot.verdicts
            if v.ended is None
        }
        step = snapshot.global_step or 0
        waiting: dict[_VerdictKey, tuple[Verdict, int]] = {}
        if snapshot.state in LIVE:
            for key, (verdict, last_step) in self._active_verdicts.items():
                if key in active or any(k[0] == key[0] for k in active):
                    continue
                if verdict.level == VerdictLevel.SLOW and step <= last_step:
                    # After its last step no rank is slow any more, but it has not recovered.
                    waiting[key] = verdict, last_step
                    continue
                began = verdict.began if verdict.began is not None else now
                lasted = ResolvedVerdict(verdict=verdict, lasted_s=max(0.0, now - began), at=now)
                self._resolved_verdicts.append(lasted)
        self._active_verdicts = {key: (v, step) for key, v in active.items()} | waiting

    def _read_history(self, now: float, live: bool) -> None:
        """Read what is new in the store, if anything can be."""
        events_due = abs(now - self._events_at) >= RELOAD_S
        if not (live or events_due or not self._curves.is_complete()):
            return
        if 0 <= now - self._history_failed_at < RELOAD_S:
            return
        try:
            with self._open_store() as store:
                self._curves.read(store, now)
                self._load_gpus(store)
                if live:
                    self._last_steps = store.last_steps(self._attempt or 1)
                if events_due:
                    self._events_at = now
                    self._read_events(store)
                self._read_time(now, live)
            self._history_error = None
        except NoHistoryError:
            pass  # The run has just been created.
        except _UNREADABLE as error:
            self._history_failed_at = now
            if history_file(self.run_dir).path.exists():
                self._history_error = f"the history can't be read ({error})"

    def _read_time(self, now: float, live: bool) -> None:
        if abs(now - self._time_at) >= TIME_S or (self._time_is_live and not live):
            self._time_at, self._time_is_live = now, live
            assert self._snapshot is not None
            self._time = read_time(self.run_dir, self._snapshot)

    def _read_events(self, store: RunStore) -> None:
        """Read the events written since the last call, and the code of a new attempt."""
        if not self._code or self._code[-1].attempt != self._attempt:
            self._code = tuple(read_records(self.run_dir))
        freezes = self._spec is not None and self._spec.freeze
        self._frozen = frozen_code_of(self.run_dir) if freezes else None
        if self._frozen is not None:
            self._code_changes = tuple(changed_files(self.run_dir, self._frozen))
        for event in store.events(self._last_event):
            self._last_event = event.id
            if event.kind == "hyperparameters":
                self._hyperparameters = dict(event.data.get("values") or {})
            elif event.kind in SHOWN_EVENT_KINDS:
                self._events.append((event.t, event.text))
            if event.kind == "paused":
                self._pauses.append(pause_mark(event))
            if event.kind == "exception" and event.rank is not None:
                self._exceptions.append(event)
        self._marks = (*stored_marks(store), *self._pauses)
        self._attempt_ranks = stored_attempt_ranks(store)

    def _load_gpus(self, store: RunStore) -> None:
        """Load the GPU readings recorded before this poller began, once for each GPU."""
        assert self._snapshot is not None
        for number in {gpu.number for gpu in self._snapshot.gpus} - self._gpus_loaded:
            self._gpu_history.load(number, store.gpu_history(number, HISTORY_S))
            self._gpus_loaded.add(number)

    def _begin_attempt(self, attempt: int) -> None:
        self._attempt = attempt
        # A resume may have changed the specification.
        with suppress(ProblemError):
            self._spec = self.run_dir.read_spec()
        self._curves.forget()
        self._last_steps = {}
        self._log = LogTail(self.run_dir.logs_dir(attempt))
        self._active_verdicts = {}
        self._events_at = self._history_failed_at = 0.0

    def _first_exceptions(self) -> tuple[RankException, ...]:
        """Return the first exception of each rank in this attempt, the earliest first."""
        exceptions: dict[int, RankException] = {}
        for event in sorted(self._exceptions, key=lambda event: event.t):
            if event.attempt == self._attempt and event.rank is not None:
                kind = str(event.data.get("type", "an exception"))
                message = str(event.data.get("message") or event.text)
                exceptions.setdefault(event.rank, RankException(event.rank, kind, message))
        return tuple(exceptions.values())

    # -- the frame ---------------------------------------------------------------------------------

    def _frame(self, snapshot: RunSnapshot, now: float) -> Frame:
        times = [row[StepField.WALL_S] for row in self._last_steps.values()]
        log = self._log
        return Frame(
            snapshot=snapshot,
            now=now,
            supervisor_answers=self._supervisor_answers,
            snapshot_at=self._snapshot_at,
            last_record_at=max((t for t in times if math.isfinite(t)), default=None),
            curves=self._curves.requested(),
            curve_names=tuple(sorted(self._curves.available_names())),
            marks=(*self._marks, *checkpoint_marks(snapshot.checkpoints)),
            attempt_ranks=self._attempt_ranks,
            rates=self._curves.rates(),
            gpu_series=self._gpu_history.series(),
            resolved_verdicts=tuple(self._resolved_verdicts),
            rank_exceptions=self._first_exceptions(),
            last_steps=self._last_steps,
            spec=self._spec,
            code=self._code,
            frozen=self._frozen,
            code_changes=self._code_changes,
            hyperparameters=self._hyperparameters,
            events=tuple(self._events),
            time=self._time,
            curves_version=self._curves.version,
            log=log.lines() if log else (),
            log_count=log.count if log else 0,
            error=self._history_error,
        )
