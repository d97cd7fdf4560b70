"""Build the ``RunSnapshot`` of a live run from its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ltui.training.config.run_spec import RunSpec
from ltui.training.config.verdict_severity import BLOCKING_LEVELS
from ltui.training.diagnosis.judge import Judgement
from ltui.training.gpu.flop_utilisation import BatchFlops, model_flop_utilisation
from ltui.training.gpu.run_gpus import RunGpusView
from ltui.training.lifecycle.classify_end import AttemptEnd
from ltui.training.lifecycle.elastic_log import WorkerFailure
from ltui.training.process.identity import ProcessIdentity
from ltui.training.process.rank_usage import RankUsage
from ltui.training.state.freeze_warnings import all_warnings
from ltui.training.state.record_fold import FoldState
from ltui.training.state.run_snapshot import (
    LIVE,
    CheckpointInfo,
    RankSnapshot,
    RankState,
    RunSnapshot,
    RunState,
    Verdict,
)
from ltui.training.state.snapshot_from_fold import (
    Progress,
    at_least,
    metrics,
    progress,
    rank_snapshots,
)
from ltui.training.state.throughput import throughput, without_current_rates
from ltui.training.store.run_directory import RunDir
from ltui.training.supervise.untracked_program import Program
from ltui.training.tensor_queue.record_types import PulseState

WAITS_FOR_LIGHTNING = "waiting for the script to start Lightning"
NO_TELEMETRY = "no telemetry: process readings only"


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotInputs:
    """The parts from which a snapshot is built."""

    run_dir: RunDir
    spec: RunSpec
    attempt: int
    state: RunState
    detail: str | None
    started_at: float
    now_s: float
    now_ns: int
    fold: FoldState
    pulses: Mapping[int, PulseState | None]
    judgement: Judgement
    unreported_processes: Mapping[int, ProcessIdentity]
    """rank -> process, for ranks of a user command that have sent no telemetry."""
    program: Program
    """The observations about those processes."""
    readings: Mapping[int, RankUsage]
    gpus: RunGpusView
    gpu_verdicts: tuple[Verdict, ...]
    flops: BatchFlops | None
    changes: tuple[str, ...]
    restarted_because: str | None
    stops: tuple[str, ...]
    checkpoints: tuple[CheckpointInfo, ...]
    script_checkpoints: tuple[CheckpointInfo, ...] = ()
    history_note: str | None
    supervisor_pid: int
    start: Progress | None = None
    """The position at which a resumed attempt starts."""


def build_snapshot(inputs: SnapshotInputs) -> RunSnapshot:
    """Return the snapshot of a live run."""
    spec, fold = inputs.spec, inputs.fold
    position = at_least(progress(fold, inputs.pulses, inputs.now_ns), inputs.start)
    planned = spec.nproc if spec.command is None else inputs.program.world_size
    ranks = _ranks(inputs)
    speed = throughput(fold, inputs.now_ns)
    resting = inputs.state is RunState.PAUSED or any(
        v.level in BLOCKING_LEVELS and v.ended is None for v in inputs.judgement.verdicts
    )
    return RunSnapshot(
        id=inputs.run_dir.id,
        name=spec.name,
        state=inputs.state,
        detail=inputs.detail,
        preset=spec.preset,
        command=spec.command,
        attempt=inputs.attempt,
        created_at=spec.created_at,
        started_at=inputs.started_at,
        supervisor_pid=inputs.supervisor_pid,
        world_size=position.world_size or planned or None,
        epoch=position.epoch,
        global_step=position.global_step,
        max_steps=position.max_steps,
        max_epochs=position.max_epochs,
        batches_per_epoch=position.batches_per_epoch,
        elapsed_s=max(0.0, inputs.now_s - inputs.started_at),
        eta_s=None if resting else position.eta_s,
        metrics=metrics(fold),
        throughput=without_current_rates(speed) if resting else speed,
        ranks=ranks,
        gpus=inputs.gpus.gpus,
        gpu_note=inputs.gpus.note,
        verdicts=(*inputs.judgement.verdicts, *inputs.gpu_verdicts),
        checkpoints=inputs.checkpoints,
        script_checkpoints=inputs.script_checkpoints,
        history_note=inputs.history_note,
        log_dir=str(inputs.run_dir.logs_dir(inputs.attempt)),
        run_dir=str(inputs.run_dir.path),
        taken_at=inputs.now_s,
        changes=inputs.changes,
        restarted_because=inputs.restarted_because,
        stops=inputs.stops,
        cautions=all_warnings(fold),
        flops_per_batch=inputs.flops.flops if inputs.flops is not None else None,
        model_flop_utilisation=model_flop_utilisation(
            inputs.flops, ranks, {number: rank.hello for number, rank in fold.ranks.items()}
        ),
    )


def _ranks(inputs: SnapshotInputs) -> tuple[RankSnapshot, ...]:
    states = inputs.judgement.states
    silent = inputs.unreported_processes.keys() - inputs.pulses.keys()
    reported_states = {number: state for number, state in states.items() if number not in silent}
    reported = rank_snapshots(inputs.fold, inputs.pulses, reported_states, inputs.now_ns)
    ranks = {rank.rank: rank for rank in reported}
    starting = inputs.state is RunState.STARTING
    silent_state = _silent_state(inputs.state)
    for number, process in inputs.unreported_processes.items():
        ranks.setdefault(
            number,
            RankSnapshot(
                rank=number,
                pid=process.pid,
                state=states.get(number, silent_state),
                note=WAITS_FOR_LIGHTNING if starting else NO_TELEMETRY,
            ),
        )
    return tuple(_with_reading(ranks[r], inputs.readings.get(r)) for r in sorted(ranks))


def _silent_state(run: RunState) -> RankState:
    """Return the state of a rank without telemetry about which there is no verdict."""
    if run is RunState.STARTING:
        return RankState.STARTING
    return RankState.RUNNING if run in LIVE else RankState.ENDED


def _with_reading(rank: RankSnapshot, reading: RankUsage | None) -> RankSnapshot:
    if reading is None:
        return rank
    return replace(rank, cpu_percent=reading.cpu_percent, rss_bytes=reading.rss_bytes)


def with_exit_codes(
    snapshot: RunSnapshot, end: AttemptEnd, failures: list[WorkerFailure]
) -> RunSnapshot:
    """Return ``snapshot`` with the exit code and the reason of each rank."""
    codes = {f.rank: f.exit_code for f in failures}
    ranks_by_number = {rank.rank: rank for rank in snapshot.ranks}
    # Add ranks that failed before they sent telemetry.
    ranks_by_number |= {
        r: RankSnapshot(rank=r, state=RankState.DEAD) for r in codes if r not in ranks_by_number
    }
    ranks = []
    for _, rank in sorted(ranks_by_number.items()):
        code = codes.get(rank.rank, 0 if snapshot.exit_code == 0 else None)
        note = end.detail if rank.rank == end.first_failed_rank else rank.note
        ranks.append(
            replace(
                rank,
                exit_code=code,
                note=note,
                samples_per_s=None,
                cpu_percent=None,
                rss_bytes=None,
            )
        )
    return replace(snapshot, ranks=tuple(ranks))
