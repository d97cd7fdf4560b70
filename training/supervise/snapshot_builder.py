"""The parts of a live run put together as one ``RunSnapshot``."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ltui.training.config.run_spec import RunSpec
from ltui.training.config.verdict_levels import BLOCKING_LEVELS
from ltui.training.diagnosis.judge import Judgement
from ltui.training.gpu.flop_utilisation import BatchFlops, model_flop_utilisation
from ltui.training.gpu.run_gpus import RunGpusView
from ltui.training.lifecycle.attempt_plan import AttemptPlan
from ltui.training.lifecycle.classify_end import AttemptEnd
from ltui.training.lifecycle.elastic_log import WorkerFailure
from ltui.training.problem import ProblemError
from ltui.training.process.identity import ProcessIdentity
from ltui.training.process.rank_usage import RankUsage
from ltui.training.state.freeze_warnings import all_warnings
from ltui.training.state.metric_names import TRAIN_LOSS
from ltui.training.state.record_fold import FoldState, RankFold
from ltui.training.state.run_snapshot import (
    LIVE,
    CheckpointInfo,
    MetricValue,
    RankSnapshot,
    RankState,
    RunSnapshot,
    RunState,
    Verdict,
)
from ltui.training.state.snapshot_parts import (
    Progress,
    at_least,
    metrics,
    progress,
    rank_snapshots,
)
from ltui.training.state.throughput import throughput, without_current_rates
from ltui.training.store.checkpoint_manifest import list_checkpoints, verify
from ltui.training.store.history_reader import RunStore
from ltui.training.store.run_directory import RunDir
from ltui.training.supervise.untracked_program import Program
from ltui.training.tensor_queue.record_types import PulseState

WAITS_FOR_LIGHTNING = "waiting for the script to start Lightning"
NO_TELEMETRY = "no telemetry: process readings only"


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotInputs:
    """Everything that a snapshot is made of."""

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
    """Processes of a command that sends no telemetry."""
    program: Program
    """What those processes show."""
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
    """Where a resumed attempt starts."""


def build_snapshot(inputs: SnapshotInputs) -> RunSnapshot:
    spec, fold = inputs.spec, inputs.fold
    how_far = at_least(progress(fold, inputs.pulses, inputs.now_ns), inputs.start)
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
        world_size=how_far.world_size or planned or None,
        epoch=how_far.epoch,
        global_step=how_far.global_step,
        max_steps=how_far.max_steps,
        max_epochs=how_far.max_epochs,
        batches_per_epoch=how_far.batches_per_epoch,
        elapsed_s=max(0.0, inputs.now_s - inputs.started_at),
        eta_s=None if resting else how_far.eta_s,
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
    of_heard = {number: state for number, state in states.items() if number not in silent}
    known = rank_snapshots(inputs.fold, inputs.pulses, of_heard, inputs.now_ns)
    ranks = {rank.rank: rank for rank in known}
    starting = inputs.state is RunState.STARTING
    silent_state = _silent_state(inputs.state)
    for number, mark in inputs.unreported_processes.items():
        ranks.setdefault(
            number,
            RankSnapshot(
                rank=number,
                pid=mark.pid,
                state=states.get(number, silent_state),
                note=WAITS_FOR_LIGHTNING if starting else NO_TELEMETRY,
            ),
        )
    return tuple(_with_reading(ranks[r], inputs.readings.get(r)) for r in sorted(ranks))


def _silent_state(run: RunState) -> RankState:
    """The state of a rank that sends no telemetry and of which no verdict says more."""
    if run is RunState.STARTING:
        return RankState.STARTING
    return RankState.RUNNING if run in LIVE else RankState.ENDED


def _with_reading(rank: RankSnapshot, reading: RankUsage | None) -> RankSnapshot:
    if reading is None:
        return rank
    return replace(rank, cpu_percent=reading.cpu_percent, rss_bytes=reading.rss_bytes)


class CheckpointCatalog:
    """The run's checkpoints. Sizes are looked at in passing, checksums in a thread, each once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: tuple[CheckpointInfo, ...] = ()
        self._checked: dict[tuple[str, float | None], bool] = {}
        self._stale = True
        self._checking: threading.Thread | None = None

    def invalidate(self) -> None:
        self._stale = True

    def checkpoints(self) -> tuple[CheckpointInfo, ...]:
        """As far as is known now, the least trained first."""
        if self._stale:
            self._stale = False
            self._known = tuple(list_checkpoints(self._folder))
        self._check_one()
        return tuple(self._with_check(info) for info in self._known)

    def verified_checkpoints(self) -> tuple[CheckpointInfo, ...]:
        """As they are on disk now, the last one saved with its checksum; waits for that."""
        if self._checking is not None:
            self._checking.join()
        self._known = tuple(list_checkpoints(self._folder))
        newest = max(self._known, key=lambda c: c.saved_at or 0.0, default=None)
        if newest is not None and newest.ok is None:
            self._check(newest)
        return tuple(self._with_check(info) for info in self._known)

    def _with_check(self, info: CheckpointInfo) -> CheckpointInfo:
        checked = self._checked.get((info.path, info.saved_at))
        return info if info.ok is False or checked is None else replace(info, ok=checked)

    def _check_one(self) -> None:
        if self._checking is not None and self._checking.is_alive():
            return
        for info in reversed(self._known):
            if info.ok is None and (info.path, info.saved_at) not in self._checked:
                self._checking = threading.Thread(target=self._check, args=(info,), daemon=True)
                self._checking.start()
                return

    def _check(self, info: CheckpointInfo) -> None:
        key = (info.path, info.saved_at)
        if key not in self._checked:
            self._checked[key] = verify(info).ok is True


def stored_state(run_dir: RunDir) -> RunState | None:
    """The state that an earlier supervisor left, where that is one of a live run."""
    snapshot = stored_snapshot(run_dir)
    return None if snapshot is None or snapshot.state not in LIVE else snapshot.state


def stored_snapshot(run_dir: RunDir) -> RunSnapshot | None:
    """The run as an earlier supervisor left it; None where that can't be read."""
    try:
        with RunStore(run_dir) as store:
            return store.snapshot()
    except ProblemError:
        return None


def starting_progress(plan: AttemptPlan, before: RunSnapshot | None) -> Progress | None:
    """Where a resumed attempt starts, and as far as is known how long the run will be.

    ``before``: the run as its last attempt left it. What ``--set`` changed may have changed the
    run's length.
    """
    if plan.resume_step is None:
        return None
    if before is None:
        return Progress(global_step=plan.resume_step)
    epochs = [c.epoch for c in before.checkpoints if c.global_step == plan.resume_step]
    same_length = not plan.changes
    return Progress(
        global_step=plan.resume_step,
        epoch=epochs[-1] if epochs else None,
        max_steps=before.max_steps if same_length else None,
        max_epochs=before.max_epochs if same_length else None,
        batches_per_epoch=before.batches_per_epoch if same_length else None,
    )


def restore_fold(run_dir: RunDir, attempt: int) -> FoldState:
    """What the store knows of ``attempt`` (or of the one before), to fold on from.

    Who the ranks are and how long the run will be may long have left the rings.
    """
    try:
        with RunStore(run_dir) as store:
            snapshot = store.snapshot()
            told = store.hello_and_plan(attempt)
    except (ProblemError, sqlite3.Error):
        return FoldState()
    ranks = {
        rank: RankFold(rank=rank, hello=kinds.get("hello"), plan=kinds.get("plan"))
        for rank, kinds in told.items()
    }
    logged: dict[str, MetricValue] = dict(snapshot.metrics)
    loss = logged.pop(TRAIN_LOSS, None)
    if logged or loss is not None:
        first = ranks.get(0) or RankFold(rank=0)
        ranks[0] = replace(first, metrics=logged, loss=loss)
    # Of the whole run: a resume does not begin to count anew.
    best = snapshot.throughput.best_samples_per_s
    told_before = snapshot.cautions if snapshot.attempt == attempt else ()
    return FoldState(ranks=ranks, best_samples_per_s=best, warnings=told_before)


def with_exit_codes(
    snapshot: RunSnapshot, found: AttemptEnd, failures: list[WorkerFailure]
) -> RunSnapshot:
    """Exit codes and reasons beside the ranks that they are of."""
    codes = {f.rank: f.exit_code for f in failures}
    known = {rank.rank: rank for rank in snapshot.ranks}
    # One that failed before it was ever seen is a rank of the run all the same.
    known |= {r: RankSnapshot(rank=r, state=RankState.DEAD) for r in codes if r not in known}
    ranks = []
    for _, rank in sorted(known.items()):
        code = codes.get(rank.rank, 0 if snapshot.exit_code == 0 else None)
        note = found.detail if rank.rank == found.first_failed_rank else rank.note
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
