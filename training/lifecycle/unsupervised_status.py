"""The status of a live run whose supervisor does not answer.

The lock, the shim, the pulses and ``/proc`` show whether the ranks continue without a supervisor,
or how far the run had come.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from msgspec.structs import replace

from ltui.training.lifecycle.classify_end import EndFacts, classify_end
from ltui.training.lifecycle.rank_queue_poller import rank_alive, read_pulses
from ltui.training.lifecycle.restart_policy import read_restart_history
from ltui.training.lifecycle.run_processes import engine_exit, latest_attempt, run_processes
from ltui.training.lifecycle.supervisor_client import STILL_STARTING
from ltui.training.process.identity import (
    ProcessIdentity,
    any_process_has,
    has_just_started,
    lock_from_earlier_boot,
    lock_left_by_us,
    lock_was_copied,
)
from ltui.training.shared.record_types import Outcome, PulseState
from ltui.training.state.record_fold import FoldState
from ltui.training.state.run_snapshot import RankSnapshot, RankState, RunSnapshot, RunState
from ltui.training.state.snapshot_from_fold import (
    progress,
    rank_snapshots,
    training_has_started,
    without_current_rates,
)
from ltui.training.store.run_checkpoints import list_checkpoints
from ltui.training.store.run_directory import RunDir

NOT_RECORDED = "its end and the last records are not recorded"


def status_by_pulses(
    run_dir: RunDir,
    supervisor: ProcessIdentity | None,
    shim: ProcessIdentity | None,
    stored: RunSnapshot,
) -> RunSnapshot:
    """Return the snapshot of a live run. ``stored`` is the last one that its supervisor stored.

    ``shim`` was started last in this boot of the machine; it may be dead.
    """
    pulses = read_pulses(run_dir.queue_dir(stored.attempt))
    current = _with_progress(stored, pulses)
    if supervisor is not None and supervisor.alive():
        silent = f"the supervisor (pid {supervisor.pid}) does not answer"
        return replace(
            current,
            detail=STILL_STARTING if has_just_started(supervisor) else silent,
            supervisor_pid=supervisor.pid,
            ranks=_merged_ranks(current, pulses, None),
        )
    return _without_supervisor(run_dir, shim, current, pulses)


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
        taken_at=(now_s := time.time()),
        eta_s=None,
        # A rate that covers none of the last seconds is not the current one.
        throughput=without_current_rates(stored.throughput),
        elapsed_s=max(0.0, now_s - (stored.started_at or now_s)),
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
    # After a reboot another process may have the same pid and even the same start time. The
    # processes of a copy are those of the run that it was copied from.
    foreign = rebooted or lock_was_copied(run_dir.lock_path)
    alive = {r for r, p in pulses.items() if p is not None and not foreign and rank_alive(p)}
    ranks = _merged_ranks(current, pulses, alive)
    attempt = max(current.attempt, latest_attempt(run_dir) or 0)
    exit_ = engine_exit(run_dir, attempt)
    if any_process_has("ltui.training.supervise.main", str(run_dir.path)):
        # It has no lock yet, or it has taken the lock since that was read.
        return replace(current, supervisor_pid=None, ranks=ranks, detail=STILL_STARTING)
    if shim is not None and shim.alive():
        detail = "its supervisor died; its shim process starts another"
        return replace(current, supervisor_pid=None, ranks=ranks, detail=detail)
    if remaining := len(alive) or len(run_processes(run_dir)):
        processes = "ranks continue" if alive else "processes are left"
        detail = f"its supervisor died; {remaining} {processes} without one"
        return replace(current, supervisor_pid=None, ranks=ranks, detail=detail)
    if _waits_to_start(run_dir, current, attempt) and lock_left_by_us(run_dir.lock_path):
        detail = "its supervisor died while it waited; the next ltui command continues it"
        return replace(current, supervisor_pid=None, detail=detail)
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
    ended_at = exit_.ended_at if exit_ else current.taken_at
    lasted_s = None if ended_at is None else max(0.0, ended_at - (current.started_at or ended_at))
    return replace(
        current,
        supervisor_pid=None,
        elapsed_s=lasted_s,
        history_note="; ".join(t for t in (current.history_note, NOT_RECORDED) if t),
        ranks=tuple(
            r if r.state is RankState.ENDED else replace(r, state=RankState.DEAD) for r in ranks
        ),
        state=end.state,
        detail=end.detail,
        exit_code=end.exit_code,
        ended_at=ended_at,
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
    stored: RunSnapshot, pulses: Mapping[int, PulseState | None], alive: set[int] | None
) -> tuple[RankSnapshot, ...]:
    """Return the stored ranks with the position and state that their pulses show.

    A rank of another node keeps its stored state, because only the agent of its node reads it. All
    ranks keep it if ``alive`` is None.
    """
    previous = {r.rank: r for r in stored.ranks}
    states = {
        rank: previous[rank].state
        if rank in previous and (alive is None or pulse.node != 0)
        else _state_by_pulse(pulse, alive is None or rank in alive)
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
