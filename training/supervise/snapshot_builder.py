"""Build the ``RunSnapshot`` of a live attempt, and that of its end."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ltui.training.diagnosis.judge import Judgement
from ltui.training.gpu.flop_utilisation import model_flop_utilisation
from ltui.training.lifecycle.classify_end import AttemptEnd
from ltui.training.lifecycle.elastic_log import WorkerFailure
from ltui.training.lifecycle.restart_policy import ScheduledRestart
from ltui.training.process.process_activity import RankUsage
from ltui.training.shared.record_types import Phase
from ltui.training.slurm.run_place import job_of_environment, pause_cost
from ltui.training.state.freeze_checks import all_warnings
from ltui.training.state.record_fold import RankFold
from ltui.training.state.run_snapshot import (
    LIVE,
    FreezeWarning,
    JobSnapshot,
    RankSnapshot,
    RankState,
    RunSnapshot,
    RunState,
)
from ltui.training.state.snapshot_from_fold import (
    at_least,
    mean_batch_s,
    progress,
    rank_snapshots,
    throughput,
    without_current_rates,
)

if TYPE_CHECKING:
    from ltui.training.supervise.live_attempt import LiveAttempt

NO_TELEMETRY = "process readings only"


def _warnings(live: LiveAttempt) -> tuple[FreezeWarning, ...]:
    unwatched = live.machine.program.unwatched
    # Beside ranks that report it was a helper process.
    of_program = () if unwatched is None or live.has_pulses() else (unwatched,)
    return (*live.logs.warnings, *all_warnings(live.fold), *of_program)


def build_snapshot(
    live: LiveAttempt, judgement: Judgement, now_s: float, now_ns: int
) -> RunSnapshot:
    """Return the snapshot of a live run. ``now_ns`` is monotonic time."""
    spec, fold, machine, nodes = live.spec, live.fold, live.machine, live.nodes
    position = at_least(progress(fold, live.pulses, now_ns), live.start)
    planned = machine.program.world_size
    if spec.command is None:
        planned = spec.nproc * (1 if spec.nodes is None else len(spec.nodes.present))
    ranks = _ranks(live, judgement, now_ns)
    speed = throughput(fold, now_ns)
    job = job_of_environment(os.environ)
    resting = live.state is RunState.PAUSED or judgement.is_blocked
    return RunSnapshot(
        id=live.run_dir.id,
        name=spec.name,
        state=live.state,
        detail=_detail(live, job, now_s),
        preset=spec.preset,
        command=spec.command,
        program=fold.program or ("Keras" if machine.program.keras else None),
        saves_checkpoints=_saves_checkpoints(live),
        stop_signal=spec.stop_signal,
        attempt=live.number,
        created_at=spec.created_at,
        started_at=live.started_at,
        supervisor_pid=os.getpid(),
        world_size=position.world_size or planned or None,
        epoch=position.epoch,
        global_step=position.global_step,
        max_steps=position.max_steps,
        max_epochs=position.max_epochs,
        batches_per_epoch=position.batches_per_epoch,
        elapsed_s=max(0.0, now_s - live.started_at),
        eta_s=None if resting else position.eta_s,
        metrics=live.shown_metrics(now_s),
        throughput=without_current_rates(speed) if resting else speed,
        ranks=ranks,
        nodes=() if nodes is None else nodes.snapshots(live.local_ranks()),
        gpus=machine.gpu_view.gpus + (() if nodes is None else nodes.reports.gpus()),
        gpu_note=machine.gpu_view.note,
        verdicts=(
            *judgement.verdicts,
            *machine.gpu_verdicts,
            *(() if nodes is None else nodes.reports.gpu_verdicts()),
        ),
        checkpoints=live.catalog.checkpoints(),
        script_checkpoints=live.script_checkpoints.existing(now_s),
        history_note=live.recorder.note,
        combined_values=live.recorder.combined_values,
        log_dir=str(live.run_dir.logs_dir(live.number)),
        run_dir=str(live.run_dir.path),
        taken_at=now_s,
        changes=live.changes,
        restarted_because=live.restarted_because,
        stops=live.stops.descriptions(),
        cautions=_warnings(live),
        checkpoint_seconds=live.catalog.seconds,
        job=job,
        limit=live.limits.limit,
        flops_per_batch=live.flops.flops if live.flops is not None else None,
        model_flop_utilisation=model_flop_utilisation(
            live.flops,
            {r.rank: mean_batch_s(fold.ranks.get(r.rank) or RankFold(rank=r.rank)) for r in ranks},
            {number: rank.hello for number, rank in fold.ranks.items()},
        ),
    )


def _saves_checkpoints(live: LiveAttempt) -> bool | None:
    """Return None for a command of the user until a rank has said what trains there."""
    fold = live.fold
    if live.spec.command is None:
        return True
    if all(rank.hello is None for rank in fold.ranks.values()):
        return None
    # The ranks of a program that wait no more for each other cannot save together.
    together = fold.program is None or live.coordination_error() is None
    return fold.saves_checkpoints and together


def _state_detail(live: LiveAttempt) -> str | None:
    """Return a sentence that explains the state of the run, or None."""
    if live.restarts.scheduled is not None:
        return live.restarts.scheduled.describe()
    delays = None if live.nodes is None else live.nodes.delays_text(live.local_ranks())
    if live.stops.escalation is not None:
        text = live.stops.escalation.describe(
            time.monotonic(),
            saving=any(p and p.phase is Phase.CHECKPOINT for p in live.pulses.values()),
            stopped=live.have_stopped(),
        )
        return text if delays is None else f"{text}; {delays}"
    if live.state is RunState.PAUSING and delays is not None:
        return f"pausing: {delays}"
    if live.queued_because is not None:
        return live.queued_because
    if live.nodes is not None and (waiting := live.nodes.waiting_text()) is not None:
        return waiting
    if live.nodes is not None and (awaited := live.nodes.awaited_text(live.local_ranks())):
        return f"saving a checkpoint: {awaited}"
    if live.stops.error is not None:
        return live.stops.error
    if live.state is RunState.PAUSED:
        return f"paused at step {live.furthest_step()}"
    if not any(live.pulses.values()):
        if live.state is RunState.STARTING:
            return live.machine.program.stage()
        if live.state is RunState.RUNNING:
            return live.machine.program.describe(logs=live.has_logged)
    if live.queues.errors:
        rank, reason = next(iter(sorted(live.queues.errors.items())))
        return f"the queue of rank {rank} cannot be read: {reason}"
    return None


def _detail(live: LiveAttempt, job: JobSnapshot | None, now_s: float) -> str | None:
    detail = _state_detail(live)
    if job is None or live.state is not RunState.PAUSED:
        return detail
    return "; ".join(t for t in (detail, pause_cost(job, live.run_dir.id, now_s)) if t)


def _ranks(live: LiveAttempt, judgement: Judgement, now_ns: int) -> tuple[RankSnapshot, ...]:
    processes, readings = live.machine.unreported_processes, dict(live.machine.readings)
    silent = {rank for rank in processes if live.pulses.get(rank) is None}
    states = {rank: state for rank, state in judgement.states.items() if rank not in silent}
    if live.stops.escalation is not None and not live.fold.saves_checkpoints:
        # Ranks that the signal of a stop has ended, as requested.
        ended = (rank for rank, state in states.items() if state is RankState.DEAD)
        states |= dict.fromkeys(ended, RankState.ENDED)
    ranks = {rank.rank: rank for rank in rank_snapshots(live.fold, live.pulses, states, now_ns)}
    stage = live.machine.program.stage() if live.state is RunState.STARTING else NO_TELEMETRY
    for number in silent:
        ranks[number] = replace(
            ranks.get(number, RankSnapshot(rank=number)),
            pid=processes[number].pid,
            state=_silent_state(live.state, judgement.states.get(number)),
            note=stage,
        )
    if live.nodes is not None:
        _add_remote(live, ranks, readings)
    for number, reading in readings.items():
        if number in ranks:
            ranks[number] = replace(
                ranks[number], cpu_percent=reading.cpu_percent, rss_bytes=reading.rss_bytes
            )
    return tuple(ranks[number] for number in sorted(ranks))


def _add_remote(
    live: LiveAttempt, ranks: dict[int, RankSnapshot], readings: dict[int, RankUsage]
) -> None:
    """Add the ranks of other machines that send no telemetry yet, and what all of them use."""
    assert live.nodes is not None
    for node, machine in live.nodes.reports.machines().items():
        readings.update(machine.usage)
        for number, process in machine.processes.items():
            state = _silent_state(live.state, None)
            ranks.setdefault(
                number, RankSnapshot(rank=number, pid=process.pid, state=state, node=node)
            )


def _silent_state(run: RunState, judged: RankState | None) -> RankState:
    """Return the state of a rank without telemetry. ``judged``: that of a verdict on it, if any."""
    if judged not in (None, RankState.STARTING, RankState.UNKNOWN):
        return judged
    if run is RunState.STARTING:
        return RankState.STARTING
    return RankState.RUNNING if run in LIVE else RankState.ENDED


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
    codes = {f.rank: f.exit_code for f in failures}
    ranks = {rank.rank: rank for rank in now.ranks}
    for rank in codes.keys() - ranks.keys():  # failed before it sent telemetry
        ranks[rank] = RankSnapshot(rank=rank, state=RankState.DEAD)
    if end.state is RunState.STOPPED and not now.saves_checkpoints:
        # Ranks that the signal of a stop has ended, as requested.
        ranks = {number: replace(rank, state=RankState.ENDED) for number, rank in ranks.items()}
    # Processes that sent no pulse, such as those that only log values, have ended as well.
    begun = [rank for rank in ranks.values() if rank.state is RankState.STARTING]
    ranks |= {rank.rank: replace(rank, state=RankState.ENDED) for rank in begun}
    return replace(
        now,
        state=end.state if waiting is None else RunState.QUEUED,
        detail=end.detail if waiting is None else waiting.describe(),
        stops=() if waiting is None else now.stops,
        exit_code=end.exit_code,
        ended_at=ended_at,
        elapsed_s=max(0.0, ended_at - (now.started_at or ended_at)),
        eta_s=None,
        throughput=replace(now.throughput, samples_per_s=None, steps_per_s=None),
        ranks=tuple(
            replace(
                ranks[number],
                exit_code=codes.get(number, 0 if end.exit_code == 0 else None),
                note=end.detail if number == end.first_failed_rank else ranks[number].note,
                samples_per_s=None,
                cpu_percent=None,
                rss_bytes=None,
            )
            for number in sorted(ranks)
        ),
    )
