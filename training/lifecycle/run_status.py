"""What is true of a run, whoever of its processes died: for front ends, without a supervisor.

The supervisor's own word is taken while it is alive. After that the store, the lock, the pulses and
``/proc`` tell whether the ranks continue without it, or how far the run had come.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace

from ltui.training.lifecycle.classify_end import EndFacts, classify_end
from ltui.training.lifecycle.kill_processes import run_processes
from ltui.training.lifecycle.queue_poller import rank_alive, read_pulses
from ltui.training.lifecycle.restart_rules import read_restart_history
from ltui.training.lifecycle.shim_files import engine_exit, latest_attempt, shim_identity
from ltui.training.lifecycle.supervisor_client import ControlClient
from ltui.training.problem import ProblemError
from ltui.training.process.identity import ProcessIdentity, any_process_has, boot_id, lock_holder
from ltui.training.state.record_fold import FoldState
from ltui.training.state.run_snapshot import (
    LIVE,
    RankSnapshot,
    RankState,
    RunSnapshot,
    RunState,
)
from ltui.training.state.snapshot_parts import progress, rank_snapshots, training_has_started
from ltui.training.store.checkpoint_manifest import list_checkpoints
from ltui.training.store.database_schema import NoHistoryError, StoreError
from ltui.training.store.history_reader import RunStore
from ltui.training.store.run_directory import RunDir
from ltui.training.tensor_queue.record_types import PulseState


def resolve_snapshot(run_dir: RunDir) -> RunSnapshot:
    """The run as it is now. ``StoreError`` or ``ProblemError`` where its files can't be read."""
    holder = lock_holder(run_dir.lock_path)
    if holder is not None:
        answer = ControlClient(run_dir).status(timeout_s=1.0)
        if answer is not None:
            return answer
    last = read_stored_snapshot(run_dir)
    if last.state not in LIVE:
        return replace(last, supervisor_pid=None)
    pulses = read_pulses(run_dir.queue_dir(last.attempt))
    now = _moved(last, pulses)
    if holder is not None and holder.alive():
        return replace(
            now,
            detail=f"the supervisor (pid {holder.pid}) does not answer",
            supervisor_pid=holder.pid,
        )
    return _unsupervised(run_dir, now, pulses)


def is_abandoned(run_dir: RunDir) -> bool:
    """Whether a supervisor died over the run and there is no keeper to start another."""
    try:
        if not run_dir.lock_path.stat().st_size or not os.access(run_dir.path, os.W_OK):
            return False  # Left in order, or never begun; or there is nothing that could be done.
    except OSError:
        return False
    if lock_holder(run_dir.lock_path) is not None:
        return False
    shim = shim_identity(run_dir)
    if shim is not None and shim.alive():
        return False
    try:
        return read_stored_snapshot(run_dir).state in LIVE
    except ProblemError:
        return False


def read_stored_snapshot(run_dir: RunDir) -> RunSnapshot:
    """As last written; where that can't be read or nothing was yet, what the other files say.

    Raises ``ProblemError`` where the specification can't be read either.
    """
    note: str | None = None
    if run_dir.db_path.exists() and run_dir.db_path.stat().st_size:
        try:
            with RunStore(run_dir) as store:
                return store.snapshot()
        except NoHistoryError:
            pass
        except StoreError as error:
            problem = error.problems[0]
            note = " ".join(word for word in (problem.what, problem.remedy) if word)
    return _from_files(run_dir, note)


def _from_files(run_dir: RunDir, note: str | None) -> RunSnapshot:
    """A run without history: whether it lives is left to be looked up."""
    spec = run_dir.read_spec()
    attempt = latest_attempt(run_dir)
    return RunSnapshot(
        id=run_dir.id,
        name=spec.name,
        state=RunState.STARTING,
        preset=spec.preset,
        command=spec.command,
        attempt=attempt or 1,
        created_at=spec.created_at,
        world_size=spec.nproc or None,
        checkpoints=tuple(list_checkpoints(run_dir.checkpoints_dir)),
        history_note=note or ("the run's history is gone." if attempt else None),
        log_dir=str(run_dir.logs_dir(attempt or 1)),
        run_dir=str(run_dir.path),
    )


def _moved(stored: RunSnapshot, pulses: Mapping[int, PulseState | None]) -> RunSnapshot:
    """``stored``, where the ranks are now as far as pulses tell."""
    found = progress(FoldState(), pulses, time.monotonic_ns())
    begun = stored.state in (RunState.STARTING, RunState.QUEUED) and training_has_started(
        p for p in pulses.values() if p is not None and rank_alive(p)
    )
    return replace(
        stored,
        # The supervisor may have died before it saw the first step.
        state=RunState.RUNNING if begun else stored.state,
        taken_at=time.time(),
        epoch=stored.epoch if found.epoch is None else found.epoch,
        global_step=stored.global_step if found.global_step is None else found.global_step,
    )


def _unsupervised(
    run_dir: RunDir, stored: RunSnapshot, pulses: Mapping[int, PulseState | None]
) -> RunSnapshot:
    shim = shim_identity(run_dir)
    rebooted = _rebooted(run_dir, shim)
    # A process of this boot may have got the number and even the start time of one before it.
    alive = {r for r, p in pulses.items() if p is not None and not rebooted and rank_alive(p)}
    ranks = _ranks(stored, pulses, alive)
    attempt = max(stored.attempt, latest_attempt(run_dir) or 0)
    exit_ = engine_exit(run_dir, attempt)
    if shim is not None and shim.alive():
        detail = "its supervisor died; the keeper starts another"
        return replace(stored, supervisor_pid=None, ranks=ranks, detail=detail)
    if left := len(alive) or len(run_processes(run_dir)):
        what = "ranks continue" if alive else "processes are left"
        detail = f"its supervisor died; {left} {what} without one"
        return replace(stored, supervisor_pid=None, ranks=ranks, detail=detail)
    if _waits(run_dir, stored, attempt):
        detail = "its supervisor died while it waited; the next ltui command continues it"
        return replace(stored, supervisor_pid=None, detail=detail)
    if any_process_has("ltui.training.supervise.main", str(run_dir.path)):
        return replace(stored, supervisor_pid=None, detail="its supervisor is still starting")
    found = classify_end(
        EndFacts(
            exit=exit_,
            shim_died=False,
            pulses=pulses,
            rebooted=rebooted,
            checkpoints=tuple(list_checkpoints(run_dir.checkpoints_dir)),
            user_command=stored.command is not None,
            global_step=stored.global_step,
        )
    )
    return replace(
        stored,
        supervisor_pid=None,
        ranks=tuple(replace(r, state=_final(r)) for r in ranks),
        state=found.state,
        detail=found.detail,
        exit_code=found.exit_code,
        ended_at=exit_.ended_at if exit_ else stored.taken_at,
        eta_s=None,
        verdicts=(),
    )


def _waits(run_dir: RunDir, stored: RunSnapshot, attempt: int) -> bool:
    """Whether it had still to be started: for the first time, or again."""
    if stored.state is not RunState.QUEUED:
        return False
    waiting = read_restart_history(run_dir).waiting
    begun = run_dir.engine_start_path(attempt).exists()
    return not begun or (waiting is not None and waiting.attempt == attempt)


def _rebooted(run_dir: RunDir, shim: ProcessIdentity | None) -> bool:
    """Whether the run's processes belong to an earlier boot of the machine."""
    try:
        lines = run_dir.lock_path.read_text().split("\n")
    except OSError:
        return False
    return shim is None and len(lines) > 2 and lines[2] not in ("", boot_id())


def _ranks(
    stored: RunSnapshot, pulses: Mapping[int, PulseState | None], alive: set[int]
) -> tuple[RankSnapshot, ...]:
    """The stored ranks, moved to where their pulses are."""
    states = {
        rank: RankState.OK if rank in alive else RankState.DEAD
        for rank, pulse in pulses.items()
        if pulse is not None
    }
    fresh = {r.rank: r for r in rank_snapshots(FoldState(), pulses, states, time.monotonic_ns())}
    known = {r.rank: r for r in stored.ranks}
    merged = []
    for rank in sorted({*fresh, *known}):
        old, new = known.get(rank), fresh.get(rank)
        if old is None or new is None:
            merged.append(old or new)
            continue
        merged.append(
            replace(
                old,
                pid=new.pid,
                state=new.state,
                phase=new.phase,
                epoch=new.epoch,
                batch=new.batch,
                global_step=new.global_step,
                age_s=new.age_s,
                cpu_percent=None,
                rss_bytes=None,
                samples_per_s=None,
            )
        )
    return tuple(rank for rank in merged if rank is not None)


def _final(rank: RankSnapshot) -> RankState:
    return RankState.ENDED if rank.state is RankState.ENDED else RankState.DEAD
