"""Determine the current status of a run, whichever of its processes have died, and recover it.

While the supervisor is alive, it answers. Otherwise the history says how the run ended, or
``unsupervised_status.py`` derives the status. Clients use this module.

A run is abandoned if its supervisor and its shim are both dead. This happens when ranks of the
user's own launcher outlive both processes, when a supervisor dies before it has started a shim (a
run that waits for GPUs), and after a reboot. In each case the lock file still names the dead
supervisor. The next ltui command starts another supervisor, which continues to wait, or kills the
remaining processes and records the end of the run.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ltui.training.lifecycle.run_processes import (
    has_live_shim,
    kill_run_processes,
    latest_attempt,
    run_processes,
    shim_identity,
)
from ltui.training.lifecycle.supervisor_client import (
    STILL_STARTING,
    ControlClient,
    restart_supervisor,
)
from ltui.training.problem import ProblemError
from ltui.training.process.identity import has_just_started, lock_holder, lock_left_by_us
from ltui.training.state.good_checkpoints import nan_since
from ltui.training.state.run_queue import FAILED
from ltui.training.state.run_snapshot import LIVE, RunSnapshot, RunState, snapshot_from_json
from ltui.training.store.database_schema import NoHistoryError, StoreError
from ltui.training.store.history_place import (
    HistoryPlace,
    history_file,
    read_place,
    what_is_missing,
)
from ltui.training.store.history_reader import RunStore
from ltui.training.store.labels_file import with_given_name
from ltui.training.store.queue_files import may_start_here, published, read_entry, was_started
from ltui.training.store.run_checkpoints import list_checkpoints
from ltui.training.store.run_directory import RunDir, read_json

if TYPE_CHECKING:
    from ltui.training.slurm.run_place import RunPlace

HISTORY_GONE = "the run's history is gone."


def resolve_snapshot(run_dir: RunDir, *, in_queue: bool = True) -> RunSnapshot:
    """Return the current snapshot of the run, from its supervisor if that answers.

    Without ``in_queue``, the snapshot is that of the attempts that were started until now.
    Raises ``StoreError`` or ``ProblemError`` if the files of the run cannot be read.
    """
    if run_dir.slurm_dir.is_dir():
        # Imported here, and below, because few runs have a job.
        from ltui.training.lifecycle.job_control import snapshot_of_job, with_job

        snapshot = snapshot_of_job(run_dir) or with_job(run_dir, _resolve_without_job(run_dir))
    elif in_queue and waits_in_queue(run_dir):
        snapshot = _queued_snapshot(run_dir)
    else:
        snapshot = _resolve_without_job(run_dir)
    # The directory may be a copy, whose history has the id of the run that it was copied from.
    return with_given_name(run_dir, replace(snapshot, id=run_dir.id))


def waits_in_queue(run_dir: RunDir) -> bool:
    """Return True if a run is in the run queue, and no process of it has been started."""
    if not run_dir.queued_path.exists() or lock_holder(run_dir.lock_path) is not None:
        return False
    try:
        entry = read_entry(run_dir)
    except ProblemError:
        return True
    return entry is not None and not was_started(run_dir, entry)


def _queued_snapshot(run_dir: RunDir) -> RunSnapshot:
    """Return the snapshot of a queued run, or how it has left the queue.

    Raises ``ProblemError`` if its entry is damaged.
    """
    entry, stored = read_entry(run_dir), _read_stored_snapshot(run_dir)
    if entry is None:
        return _resolve_without_job(run_dir)
    if entry.ended is not None:
        could_not = f"it could not be started from the run queue: {entry.reason}"
        if entry.resume:
            detail = "; ".join(text for text in (stored.detail, could_not) if text)
            return replace(stored, detail=detail)
        again = f"`ltui queue retry {run_dir.id}` puts it back"
        why = f"{entry.reason}; " if entry.reason else ""
        detail = could_not if entry.ended == FAILED else f"{why}nothing was trained; {again}"
        return replace(stored, state=RunState(entry.ended), detail=detail)
    place = published(run_dir.home).get(run_dir.id)
    reason = (place and place.reason) or f"in the run queue of {entry.host}"
    return replace(
        stored,
        state=RunState.QUEUED,
        detail="held" if entry.held else reason,
        taken_at=time.time(),
        ended_at=None,
        exit_code=None,
        eta_s=None,
        ranks=(),
        gpus=(),
        verdicts=(),
    )


def _resolve_without_job(run_dir: RunDir) -> RunSnapshot:
    place = _place_elsewhere(run_dir)
    return resolve_here(run_dir) if place is None else _copied_snapshot(run_dir, place)


def resolve_here(run_dir: RunDir) -> RunSnapshot:
    """Return the snapshot of a run by the files and processes of this machine alone."""
    supervisor = lock_holder(run_dir.lock_path)
    if supervisor is not None:
        answer = ControlClient(run_dir).status(timeout_s=1.0)
        if answer is not None:
            return answer
    shim = shim_identity(run_dir)
    stored = _read_stored_snapshot(run_dir)
    if stored.state not in LIVE:
        return replace(stored, supervisor_pid=None)
    # Imported here because most runs that are shown have ended, and it loads NumPy.
    from ltui.training.lifecycle.unsupervised_status import status_by_pulses

    return status_by_pulses(run_dir, supervisor, shim, stored)


def nan_step(run_dir: RunDir) -> int | None:
    """Return the step since which the loss of a run is NaN; None if it is finite or not known."""
    try:
        return nan_since(resolve_snapshot(run_dir).verdicts)
    except ProblemError:
        return None


def is_abandoned(run_dir: RunDir) -> bool:
    """Return True if the supervisor of a live run died and there is no shim to restart it.

    This reads only the lock file if the run has ended regularly. A copy of a run directory is
    never abandoned: nothing of what somebody else's run contains starts by itself.
    """
    if (place := _place_of_job(run_dir)) is not None and not place.is_here:
        return False  # Its processes are on another machine, or its job waits.
    if _place_elsewhere(run_dir) is not None or waits_in_queue(run_dir):
        return False
    if not lock_left_by_us(run_dir.lock_path) or not os.access(run_dir.path, os.W_OK):
        return False  # Ended regularly, supervised, copied, or the run cannot be changed.
    try:
        return _read_stored_snapshot(run_dir).state in LIVE and not has_live_shim(run_dir)
    except ProblemError:
        return False


def _place_of_job(run_dir: RunDir) -> RunPlace | None:
    """Return where a run that SLURM starts is; None if SLURM does not start the run."""
    if not run_dir.slurm_dir.is_dir():
        return None
    from ltui.training.lifecycle.job_control import job_place

    return job_place(run_dir)


def _place_elsewhere(run_dir: RunDir) -> HistoryPlace | None:
    """Return where a run is live on another machine that shares its directory; None if it is not.

    The record of a SLURM job, if there is one, says more about where the run is.
    """
    place = read_place(run_dir)
    if place is None or not place.is_live_elsewhere or _place_of_job(run_dir) is not None:
        return None
    return place


def _copied_snapshot(run_dir: RunDir, place: HistoryPlace) -> RunSnapshot:
    """Return the last copied snapshot of a run that is live on another machine."""
    stored = _read_stored_snapshot(run_dir)
    if stored.state not in LIVE:
        return stored
    detail = "; ".join(text for text in (stored.detail, f"runs on {place.host}") if text)
    return replace(stored, detail=detail, supervisor_pid=None, history_note=None)


def _read_stored_snapshot(run_dir: RunDir) -> RunSnapshot:
    """Return the stored snapshot or, if there is none, a snapshot from the other files.

    Raises ``ProblemError`` if the specification cannot be read either.
    """
    note: str | None = None
    if history_file(run_dir).path.exists():
        try:
            with RunStore(run_dir) as store:
                snapshot = _of_latest_attempt(run_dir, store.snapshot())
            missing = (snapshot.history_note, what_is_missing(run_dir))
            return replace(snapshot, history_note="; ".join(t for t in missing if t) or None)
        except NoHistoryError:
            pass
        except StoreError as error:
            problem = error.problems[0]
            note = " ".join(text for text in (problem.what, problem.remedy) if text)
    return _ended_snapshot(run_dir, note) or _snapshot_from_files(run_dir, note)


def _ended_snapshot(run_dir: RunDir, note: str | None) -> RunSnapshot | None:
    """Return how the latest attempt ended; None if it has not ended, or no file says so."""
    try:
        ended = snapshot_from_json(read_json(run_dir.end_path) or {})
    except ValueError:
        return None
    if ended.state in LIVE or ended.attempt != latest_attempt(run_dir):
        return None
    return replace(
        ended,
        id=run_dir.id,
        checkpoints=tuple(list_checkpoints(run_dir.checkpoints_dir)),
        history_note=note or HISTORY_GONE,
        log_dir=str(run_dir.logs_dir(ended.attempt)),
        run_dir=str(run_dir.path),
    )


def _of_latest_attempt(run_dir: RunDir, stored: RunSnapshot) -> RunSnapshot:
    """Return ``stored``, unless a later attempt has begun of which no snapshot was written yet.

    The engine starts before its supervisor writes the first one, and the supervisor may die.
    """
    latest = latest_attempt(run_dir) or 0
    if stored.state in LIVE or latest <= stored.attempt:
        return stored
    shim = shim_identity(run_dir, latest)
    if not (shim is not None and shim.alive()) and not run_processes(run_dir):
        return stored
    return replace(
        stored,
        state=RunState.STARTING,
        detail=STILL_STARTING,
        attempt=latest,
        started_at=None,
        ended_at=None,
        exit_code=None,
        ranks=(),
        verdicts=(),
        log_dir=str(run_dir.logs_dir(latest)),
    )


def _snapshot_from_files(run_dir: RunDir, note: str | None) -> RunSnapshot:
    """Return the snapshot of a run without history. Its state is still to be determined."""
    spec = run_dir.read_spec()
    attempt = latest_attempt(run_dir)
    supervisor = lock_holder(run_dir.lock_path)
    if attempt == 1 and note is None and supervisor is not None and has_just_started(supervisor):
        gone = None  # It has not written any yet.
    else:
        gone = HISTORY_GONE if attempt else None
    return RunSnapshot(
        id=run_dir.id,
        name=spec.name,
        state=RunState.STARTING,
        preset=spec.preset,
        command=spec.command,
        saves_checkpoints=True if spec.command is None else None,
        stop_signal=spec.stop_signal,
        attempt=attempt or 1,
        created_at=spec.created_at,
        world_size=spec.nproc or None,
        checkpoints=tuple(list_checkpoints(run_dir.checkpoints_dir)),
        history_note=note or gone,
        log_dir=str(run_dir.logs_dir(attempt or 1)),
        run_dir=str(run_dir.path),
    )


_RECORDED_S = 10.0
"""Seconds to wait until the new supervisor has recorded the end of the run."""


def current_snapshot(run: RunDir) -> RunSnapshot:
    """Recover the run first if it is abandoned, then return ``resolve_snapshot``."""
    recover_run(run)
    snapshot = resolve_snapshot(run)
    if snapshot.state is RunState.QUEUED and run.queued_path.exists():
        # Imported here because few runs are queued.
        from ltui.training.lifecycle.dispatcher_process import ensure_dispatcher

        entry = read_entry(run)
        if entry is not None and may_start_here(entry):
            ensure_dispatcher(run.home)
    return snapshot


def recover_run(run: RunDir, timeout_s: float = _RECORDED_S) -> bool:
    """Recover the run if it is abandoned, and return True if it was.

    Returns when the run waits in the queue again, has left it, or its end is recorded. It raises no
    errors: a run that cannot be recovered, for example on a read-only disk, is shown as it is.
    """
    if not is_abandoned(run):
        return False
    try:
        restart_supervisor(run)
    except (ProblemError, OSError):
        # No supervisor can be started, so do not leave the run's processes running.
        if lock_holder(run.lock_path) is None:
            kill_run_processes(run)
    deadline = time.monotonic() + timeout_s
    while lock_holder(run.lock_path) is not None and time.monotonic() < deadline:
        if stays_live(run):
            break
        time.sleep(0.02)
    return True


def stays_live(run_dir: RunDir) -> bool:
    """Return True if the run continues: its supervisor is not only recording the end."""
    state = resolve_snapshot(run_dir).state
    return state in LIVE and (state is RunState.QUEUED or has_live_shim(run_dir))
