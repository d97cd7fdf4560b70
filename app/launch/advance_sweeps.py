"""Advance the sweeps of a home: look at the runs of their trials, decide, start, resume and stop.

The dispatcher of the run queue calls it once a second. What it has decided is stored before
anything is done, and is done again if this process is killed in between.
"""

from __future__ import annotations

import itertools
import shutil
import time
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from ltui.app.live.run_requests import send_request
from ltui.training.diagnosis.error_texts import is_out_of_memory
from ltui.training.lifecycle.run_queue import enqueue, enqueue_resume
from ltui.training.lifecycle.run_status import current_snapshot
from ltui.training.problem import ProblemError
from ltui.training.shared.defaults import STOP_TIMEOUT_S
from ltui.training.state.good_checkpoints import bad_loss, is_resumable
from ltui.training.state.run_labels import RunLabels
from ltui.training.state.run_queue import QueueEntry
from ltui.training.state.run_snapshot import LIVE, RunSnapshot, RunState
from ltui.training.state.verdicts import VerdictKind
from ltui.training.store.history_reader import RunStore
from ltui.training.store.labels_file import files_at_launch
from ltui.training.store.run_directory import RunDir
from ltui.training.sweep.decide import Seen, decide
from ltui.training.sweep.pruning import rung_steps
from ltui.training.sweep.record import State, Sweep, Trial, trial_spec
from ltui.training.sweep.suggest import suggest
from ltui.training.sweep.sweep_files import SweepDir, active_sweeps
from ltui.widgets.sanitise import clean_line

_MOST_POINTS = 20_000
"""Points of a curve up to which none are merged."""


def advance_sweeps(home: Path) -> None:
    """Do what is to be done now. What keeps a sweep from going on is stored in its record."""
    for sweep_dir in active_sweeps(home):
        try:
            _advance(sweep_dir)
            problem = ""
        except Exception as error:  # noqa: BLE001 - one sweep must not keep the others, nor the queue
            problem = clean_line(str(error) or type(error).__name__, 300)
        with suppress(ProblemError, OSError):
            if sweep_dir.read().problem != problem:
                sweep_dir.change(lambda now, text=problem: replace(now, problem=text))  # type: ignore[misc]


def _advance(sweep_dir: SweepDir) -> None:
    before = sweep_dir.read()
    seen: dict[str, Seen | None] = {}
    for trial in before.lives:
        run_dir = _run_of(sweep_dir, before, trial)
        with suppress(ProblemError):
            seen[run_dir.id] = _see(run_dir, before, trial) if run_dir.path.exists() else None
    sweep = sweep_dir.change(lambda now: decide(now, seen, suggest))
    for trial in sweep.lives:
        run = seen.get(sweep.run_id(trial))
        if trial.state == State.PLANNED and (run is None or run.state not in LIVE):
            _start(sweep_dir, sweep, trial)
        elif (
            trial.state == State.STOPPING and run is not None and run.state is not RunState.STOPPING
        ):
            with suppress(ProblemError):  # It has ended meanwhile, or is asked again.
                request = {"cmd": "stop", "timeout_s": STOP_TIMEOUT_S}
                send_request(_run_of(sweep_dir, sweep, trial), request)


def _run_of(sweep_dir: SweepDir, sweep: Sweep, trial: Trial) -> RunDir:
    return RunDir(sweep_dir.home / "runs" / sweep.run_id(trial))


def _see(run_dir: RunDir, sweep: Sweep, trial: Trial) -> Seen:
    """Return what is to be known of a run. Raise ``ProblemError`` if it cannot be read."""
    snapshot = current_snapshot(run_dir)
    metric = snapshot.metrics.get(sweep.metric)
    best = None
    if metric is not None:
        best = metric.best_min if sweep.mode == "min" else metric.best_max
    detail = snapshot.detail or ""
    if metric is None and snapshot.state is RunState.FINISHED:
        logged = ", ".join(sorted(snapshot.metrics)[:5]) or "nothing"
        detail = f"it never logged {sweep.metric}, but {logged}"
    reason = ""
    if any(v.kind == VerdictKind.OUT_OF_MEMORY for v in snapshot.verdicts) or (
        snapshot.state not in LIVE and is_out_of_memory("", detail)
    ):
        reason = State.OUT_OF_MEMORY
    elif bad_loss(snapshot.verdicts) is not None:
        reason = State.NAN
    return Seen(
        state=snapshot.state,
        attempt=snapshot.attempt,
        step=snapshot.global_step,
        last=None if metric is None else metric.last,
        best=best,
        reason=reason,
        detail=clean_line(detail, 300),
        resumable=is_resumable(snapshot),
        scores={} if sweep.prune is None else _scores(run_dir, sweep, trial, snapshot),
    )


def _scores(run_dir: RunDir, sweep: Sweep, trial: Trial, run: RunSnapshot) -> dict[int, float]:
    """Return the value of the metric at each rung that the run has passed since the last look.

    It is the last value at or before the steps of the rung. A rung before the first value has none.
    """
    scores: dict[int, float] = {}
    if (run.global_step or 0) < sweep.rung:
        return scores
    with RunStore(run_dir) as store:
        # With a step after the rung, what was logged at the rung is stored.
        passed = store.last_step() - (run.state in LIVE)
        for number in itertools.count():
            steps = rung_steps(sweep.prune or "", sweep.rung, sweep.reduction, number)
            if steps > passed:
                break
            if steps >= max(trial.scores, default=0) and steps not in trial.scores:
                curve = store.curve(sweep.metric, last_step=steps, max_points=_MOST_POINTS)
                if len(curve):
                    scores[steps] = float(curve.mean[-1])
    return scores


def _start(sweep_dir: SweepDir, sweep: Sweep, trial: Trial) -> None:
    """Put the run of a planned trial into the run queue: a new run, or the next attempt of one.

    A trial that cannot be started at all fails with the reason. Raise ``ProblemError`` if the next
    call may succeed.
    """
    run_dir = _run_of(sweep_dir, sweep, trial)
    environment = sweep_dir.environment()
    if run_dir.path.exists():
        try:
            enqueue_resume(run_dir, QueueEntry(), environment=environment)
        except ProblemError as error:
            _fail(sweep_dir, sweep, trial, error)
        return
    template = sweep_dir.template()
    try:
        spec = trial_spec(sweep, template, trial, time.time())
    except ProblemError as error:
        _fail(sweep_dir, sweep, trial, error)
        return
    # What a killed dispatcher has left of the same run.
    shutil.rmtree(run_dir.path.with_name(f".new-{run_dir.id}"), ignore_errors=True)

    def with_code(directory: RunDir) -> None:
        if template.freeze:
            shutil.copytree(sweep_dir.path / "code", directory.path / "code", symlinks=True)
            directory.write_spec(directory.read_spec().with_changes(freeze=True))

    enqueue(
        # The code of all trials is that of the moment at which the sweep was started.
        spec.with_changes(freeze=False),
        sweep_dir.home,
        QueueEntry(),
        private_files=files_at_launch(RunLabels(group=sweep.name)),
        interpreter_checked=True,
        fill=with_code,
        environment=environment,
    )


def _fail(sweep_dir: SweepDir, sweep: Sweep, trial: Trial, error: ProblemError) -> None:
    """Let a trial fail as if its next attempt had."""
    failed = Seen(
        state=RunState.FAILED, attempt=trial.after + 1, detail=clean_line(str(error), 300)
    )
    sweep_dir.change(lambda now: decide(now, {sweep.run_id(trial): failed}, suggest))
