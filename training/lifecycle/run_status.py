"""Determine the current status of a run, whichever of its processes have died.

While the supervisor is alive, it answers. Otherwise the status is derived from the lock, the shim,
the history, the pulses and ``/proc``, which show whether the ranks continue without a supervisor,
or how far the run had come. Clients use this module. It changes nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace

from ltui.training.lifecycle.classify_end import EndFacts, classify_end
from ltui.training.lifecycle.job_snapshot import job_place, snapshot_of_job, with_job
from ltui.training.lifecycle.kill_processes import run_processes
from ltui.training.lifecycle.rank_queue_poller import rank_alive, read_pulses
from ltui.training.lifecycle.restart_rules import read_restart_history
from ltui.training.lifecycle.shim_files import engine_exit, latest_attempt, shim_identity
from ltui.training.lifecycle.supervisor_client import ControlClient
from ltui.training.problem import ProblemError
from ltui.training.process.identity import (
    ProcessIdentity,
    any_process_has,
    lock_from_earlier_boot,
    lock_holder,
)
from ltui.training.slurm.run_place import Place
from ltui.training.state.good_checkpoints import nan_since
from ltui.training.state.record_fold import FoldState
from ltui.training.state.run_snapshot import (
    LIVE,
    RankSnapshot,
    RankState,
    RunSnapshot,
    RunState,
)
from ltui.training.state.snapshot_from_fold import progress, rank_snapshots, training_has_started
from ltui.training.store.database_schema import NoHistoryError, StoreError
from ltui.training.store.history_place import (
    HistoryPlace,
    history_file,
    read_place,
    what_is_missing,
)
from ltui.training.store.history_reader import RunStore
from ltui.training.store.run_checkpoints import list_checkpoints
from ltui.training.store.run_directory import RunDir
from ltui.training.tensor_queue.record_types import Outcome, PulseState


def resolve_snapshot(run_dir: RunDir) -> RunSnapshot:
    """Return the current snapshot of the run, from its supervisor if that answers.

    Raises ``StoreError`` or ``ProblemError`` if the files of the run cannot be read.
    """
    if (snapshot := snapshot_of_job(run_dir)) is not None:
        return snapshot
    if (place := _place_elsewhere(run_dir)) is not None:
        return _copied_snapshot(run_dir, place)
    return with_job(run_dir, resolve_here(run_dir))


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
    pulses = read_pulses(run_dir.queue_dir(stored.attempt))
    current = _with_progress(stored, pulses)
    if supervisor is not None and supervisor.alive():
        return replace(
            current,
            detail=f"the supervisor (pid {supervisor.pid}) does not answer",
            supervisor_pid=supervisor.pid,
        )
    return _without_supervisor(run_dir, shim, current, pulses)


def nan_step(run_dir: RunDir) -> int | None:
    """Return the step since which the loss of a run is NaN; None if it is finite or not known."""
    try:
        return nan_since(resolve_snapshot(run_dir).verdicts)
    except ProblemError:
        return None


def is_abandoned(run_dir: RunDir) -> bool:
    """Return True if the supervisor of a live run died and there is no shim to restart it.

    This reads only the lock file if the run has ended regularly.
    """
    if (place := job_place(run_dir)) is not None and place.place is not Place.HERE:
        return False  # Its processes are on another machine, or its job waits.
    if _place_elsewhere(run_dir) is not None:
        return False
    try:
        if not run_dir.lock_path.stat().st_size or not os.access(run_dir.path, os.W_OK):
            return False  # Ended regularly or never started, or the run cannot be changed.
    except OSError:
        return False
    if lock_holder(run_dir.lock_path) is not None:
        return False
    shim = shim_identity(run_dir)
    try:
        is_live = _read_stored_snapshot(run_dir).state in LIVE
    except ProblemError:
        return False
    return is_live and not (shim is not None and shim.alive())


def _place_elsewhere(run_dir: RunDir) -> HistoryPlace | None:
    """Return where a run is live on another machine that shares its directory; None if it is not.

    The record of a SLURM job, if there is one, says more about where the run is.
    """
    place = read_place(run_dir)
    if place is None or not place.is_live_elsewhere or job_place(run_dir) is not None:
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
    return _snapshot_from_files(run_dir, note)


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
        detail="its supervisor is still starting",
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
        history_note=note or ("the run's history is gone." if attempt else None),
        log_dir=str(run_dir.logs_dir(attempt or 1)),
        run_dir=str(run_dir.path),
    )


def _with_progress(stored: RunSnapshot, pulses: Mapping[int, PulseState | None]) -> RunSnapshot:
    """Return ``stored`` with the current position of the ranks, as far as pulses show it."""
    position = progress(FoldState(), pulses, time.monotonic_ns())
    begun = stored.state in (RunState.STARTING, RunState.QUEUED) and training_has_started(
        p for p in pulses.values() if p is not None and rank_alive(p)
    )
    return replace(
        stored,
        # The supervisor may have died before it recorded the first step.
        state=RunState.RUNNING if begun else stored.state,
        taken_at=time.time(),
        epoch=stored.epoch if position.epoch is None else position.epoch,
        global_step=(stored.global_step if position.global_step is None else position.global_step),
    )


def _without_supervisor(
    run_dir: RunDir,
    shim: ProcessIdentity | None,
    current: RunSnapshot,
    pulses: Mapping[int, PulseState | None],
) -> RunSnapshot:
    """Return the snapshot of a live run whose supervisor is dead.

    ``shim`` was started last in this boot of the machine; it may be dead. ``current`` is the stored
    snapshot with the current position of the ranks.
    """
    rebooted = shim is None and lock_from_earlier_boot(run_dir.lock_path)
    # After a reboot another process may have the same pid and even the same start time.
    alive = {r for r, p in pulses.items() if p is not None and not rebooted and rank_alive(p)}
    ranks = _merged_ranks(current, pulses, alive)
    attempt = max(current.attempt, latest_attempt(run_dir) or 0)
    exit_ = engine_exit(run_dir, attempt)
    if shim is not None and shim.alive():
        detail = "its supervisor died; its shim process starts another"
        return replace(current, supervisor_pid=None, ranks=ranks, detail=detail)
    if remaining := len(alive) or len(run_processes(run_dir)):
        processes = "ranks continue" if alive else "processes are left"
        detail = f"its supervisor died; {remaining} {processes} without one"
        return replace(current, supervisor_pid=None, ranks=ranks, detail=detail)
    if _waits_to_start(run_dir, current, attempt):
        detail = "its supervisor died while it waited; the next ltui command continues it"
        return replace(current, supervisor_pid=None, detail=detail)
    if any_process_has("ltui.training.supervise.main", str(run_dir.path)):
        return replace(current, supervisor_pid=None, detail="its supervisor is still starting")
    end = classify_end(
        EndFacts(
            exit=exit_,
            pulses=pulses,
            rebooted=rebooted,
            checkpoints=tuple(list_checkpoints(run_dir.checkpoints_dir)),
            user_command=current.command is not None,
            global_step=current.global_step,
        )
    )
    return replace(
        current,
        supervisor_pid=None,
        ranks=tuple(replace(r, state=_final_state(r)) for r in ranks),
        state=end.state,
        detail=end.detail,
        exit_code=end.exit_code,
        ended_at=exit_.ended_at if exit_ else current.taken_at,
        eta_s=None,
        verdicts=(),
    )


def _waits_to_start(run_dir: RunDir, current: RunSnapshot, attempt: int) -> bool:
    """Return True if the run was queued for GPUs or for a restart."""
    if current.state is not RunState.QUEUED:
        return False
    waiting = read_restart_history(run_dir).waiting
    begun = run_dir.engine_start_path(attempt).exists()
    return not begun or (waiting is not None and waiting.attempt == attempt)


_POSITION_FIELDS = ("pid", "node", "state", "phase", "epoch", "batch", "global_step", "age_s")
"""Fields of a rank that its pulse shows."""


def _merged_ranks(
    stored: RunSnapshot, pulses: Mapping[int, PulseState | None], alive: set[int]
) -> tuple[RankSnapshot, ...]:
    """Return the stored ranks with the position and state that their pulses show.

    A rank of another node keeps its stored state, because only the agent of its node reads it.
    """
    previous = {r.rank: r for r in stored.ranks}
    states = {
        rank: _state_by_pulse(pulse, rank in alive)
        if pulse.node == 0 or rank not in previous
        else previous[rank].state
        for rank, pulse in pulses.items()
        if pulse is not None
    }
    current = {r.rank: r for r in rank_snapshots(FoldState(), pulses, states, time.monotonic_ns())}
    merged = {**current, **previous}
    for rank in current.keys() & previous.keys():
        position = {name: getattr(current[rank], name) for name in _POSITION_FIELDS}
        merged[rank] = replace(
            previous[rank], **position, cpu_percent=None, rss_bytes=None, samples_per_s=None
        )
    return tuple(merged[rank] for rank in sorted(merged))


def _state_by_pulse(pulse: PulseState, is_alive: bool) -> RankState:
    if is_alive:
        return RankState.OK
    # Without a history, only the pulse says that a rank that is gone left its loop regularly.
    left = pulse.outcome in (Outcome.FINISHED, Outcome.STOPPED)
    return RankState.ENDED if left else RankState.DEAD


def _final_state(rank: RankSnapshot) -> RankState:
    return RankState.ENDED if rank.state is RankState.ENDED else RankState.DEAD
