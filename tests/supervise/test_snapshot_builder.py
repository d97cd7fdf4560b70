"""The snapshot that a supervisor makes: rates at rest, and where a resumed attempt starts."""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from ltui.app.foreground.progress_display import plain_line
from ltui.app.state_words import state_word
from ltui.training.config.run_spec import RunSpec
from ltui.training.diagnosis.judge import Judgement
from ltui.training.diagnosis.judge_input import HealthHistory, position_facts
from ltui.training.diagnosis.rules.early_warnings import loss_warning
from ltui.training.gpu.flop_utilisation import BatchFlops
from ltui.training.gpu.run_gpus import RunGpusView
from ltui.training.lifecycle.classify_end import AttemptEnd
from ltui.training.lifecycle.stop_escalation import StopEscalation
from ltui.training.lifecycle.supervisor_client import AttemptPlan
from ltui.training.process.identity import identify
from ltui.training.shared.record_types import Phase, RecordKind
from ltui.training.state.record_fold import FoldState, fold
from ltui.training.state.run_snapshot import (
    CheckpointInfo,
    RankState,
    RunSnapshot,
    RunState,
    Throughput,
    Verdict,
)
from ltui.training.state.snapshot_from_fold import Progress
from ltui.training.store.history_writer import Batch, StoreWriter
from ltui.training.store.run_checkpoints import CheckpointCatalog, ScriptCheckpoints
from ltui.training.supervise.history_recorder import (
    restore_fold,
    starting_progress,
    stored_snapshot,
    with_values,
)
from ltui.training.supervise.live_attempt import LiveAttempt
from ltui.training.supervise.machine_readings import Program
from ltui.training.supervise.snapshot_builder import build_snapshot, final_snapshot
from tests.state.records import SECOND, labelled, pulse, step, steps
from tests.store.histories import StepRow, begin, run_dir, snapshot, step_row, write


def attempt(folder: Path, **changes: Any) -> Any:
    """Return the parts of a live attempt from which a snapshot is built."""
    plan = labelled(
        RecordKind.PLAN, {"max_steps": 1000, "max_epochs": 10, "batches_per_epoch": 100}
    )
    machine = SimpleNamespace(
        unreported_processes=changes.pop("unreported_processes", {}),
        readings={},
        gpu_view=RunGpusView(),
        gpu_verdicts=(),
        program=Program(),
    )
    run = run_dir(folder)
    values: dict[str, Any] = {
        "run_dir": run,
        "spec": RunSpec(id="a", name="a", created_at=1.0, cwd="/", python="python3", nproc=1),
        "number": 2,
        "state": RunState.RUNNING,
        "restarts": SimpleNamespace(scheduled=None),
        "queued_because": None,
        "furthest_step": lambda: None,
        "have_stopped": lambda: False,
        "has_logged": False,
        "queues": SimpleNamespace(errors={}),
        "started_at": 0.0,
        "fold": fold(FoldState(), 0, [plan, *steps(100, 0.1)]),
        "pulses": {0: pulse(0, Phase.FORWARD, 10.0, global_step=100)},
        "machine": machine,
        "flops": None,
        "changes": (),
        "restarted_because": None,
        "catalog": CheckpointCatalog(run.checkpoints_dir),
        "script_checkpoints": ScriptCheckpoints(),
        "recorder": SimpleNamespace(note=None, combined_values=0),
        "start": None,
        "nodes": None,
        "shown_metrics": lambda _: {},
        "limits": SimpleNamespace(limit=None),
        "logs": SimpleNamespace(warnings=()),
        "stops": SimpleNamespace(escalation=None, error=None, descriptions=tuple),
    }
    return SimpleNamespace(**{**values, **changes})


def built(live: Any, judged: Judgement | None = None) -> RunSnapshot:
    return build_snapshot(live, judged or judgement(RankState.OK), 12.0, 12 * SECOND)


def judgement(state: RankState, *verdicts: Verdict) -> Judgement:
    return Judgement(states={0: state}, verdicts=verdicts, ended=(), history=HealthHistory())


def test_a_rank_that_dies_before_its_first_step_stood_where_it_resumed(tmp_path: Path) -> None:
    resumed = Progress(global_step=193)
    for at, shown in ((0, 193), (195, 195)):
        live = attempt(
            tmp_path / str(at), start=resumed, pulses={0: pulse(0, Phase.SETUP, global_step=at)}
        )
        assert LiveAttempt.furthest_step(live) == shown
    assert LiveAttempt.furthest_step(attempt(tmp_path / "none", start=resumed, pulses={})) is None


def test_flop_utilisation_counts_every_batch(tmp_path: Path) -> None:
    """With accumulated gradients, the batch in which the optimizer steps is the longest."""
    label = {"device_name": "NVIDIA H100 80GB HBM3", "precision": "bf16-mixed"}
    records = [labelled(RecordKind.HELLO, label)]
    end_s = 0.0
    for number in range(1, 41):
        duration_s = 0.5 if number % 4 == 0 else 0.1
        end_s += duration_s
        records.append(step(number // 4, end_s, batch=number, step_s=duration_s))
    counted = BatchFlops(0.2 * 494.75e12)  # half of the peak at 0.2 s a batch
    shown = built(attempt(tmp_path, fold=fold(FoldState(), 0, records), flops=counted))
    assert shown.model_flop_utilisation == pytest.approx(0.5, rel=0.05)


def test_no_rank_of_an_ended_command_without_telemetry_is_said_to_run(tmp_path: Path) -> None:
    silent: dict[str, Any] = {
        "fold": FoldState(),
        "pulses": {},
        "unreported_processes": {0: identify(os.getpid())},
    }
    no_ranks = replace(judgement(RankState.OK), states={})
    states = [
        built(attempt(tmp_path, state=state, **silent), no_ranks).ranks[0].state
        for state in (RunState.STARTING, RunState.RUNNING, RunState.FAILED)
    ]
    assert states == [RankState.STARTING, RankState.RUNNING, RankState.ENDED]


def test_a_run_has_a_rate_and_a_time_left_unless_it_is_paused_or_stalled(tmp_path: Path) -> None:
    moves = built(attempt(tmp_path))
    assert moves.throughput.samples_per_s == pytest.approx(320)
    assert moves.ranks[0].samples_per_s == pytest.approx(320)
    assert moves.eta_s is not None
    stall = Verdict(kind="stall", level="stalled", culprits=(0,), cause="rank 0 waits")
    paused = built(attempt(tmp_path, state=RunState.PAUSED), judgement(RankState.PAUSED))
    stalled = built(attempt(tmp_path), judgement(RankState.STALLED, stall))
    for shown in (paused, stalled):
        assert shown.throughput.samples_per_s is None
        assert shown.throughput.best_samples_per_s == pytest.approx(320)
        assert shown.ranks[0].samples_per_s is None
        assert shown.eta_s is None


def test_a_resumed_attempt_shows_the_step_that_it_starts_from(tmp_path: Path) -> None:
    saved = (CheckpointInfo(path="/c", global_step=640, epoch=6),)
    before = snapshot(max_steps=1000, max_epochs=10, checkpoints=saved)
    start = starting_progress(AttemptPlan(resume_from=Path("/c"), resume_step=640), before)
    for pulses in ({}, {0: pulse(0, Phase.SETUP)}):
        shown = built(
            attempt(tmp_path, state=RunState.STARTING, fold=FoldState(), pulses=pulses, start=start)
        )
        assert (shown.global_step, shown.max_steps) == (640, 1000)
        assert (shown.epoch, shown.max_epochs) == (6, 10)
    further = {0: pulse(0, Phase.FORWARD, global_step=641, epoch=6)}
    assert built(attempt(tmp_path, pulses=further, start=start)).global_step == 641
    # What was changed may have changed the length of the run.
    changed = AttemptPlan(resume_step=640, changes=("trainer.max_epochs=60",))
    assert starting_progress(changed, before).max_steps is None  # type: ignore[union-attr]
    assert starting_progress(AttemptPlan(), before) is None


def test_the_best_rate_is_of_the_whole_run(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    store = StoreWriter(run.db_path)
    begin(store)
    store.write_snapshot(snapshot(attempt=1, throughput=Throughput(best_samples_per_s=900.0)))
    store.close()
    assert restore_fold(run, 2, stored_snapshot(run)).best_samples_per_s == 900.0


@pytest.mark.parametrize("has_loss", [True, False])
def test_rows_without_a_loss_are_no_loss_of_nan_after_a_resume(
    tmp_path: Path, has_loss: bool
) -> None:
    """Rows have no loss on a GPU or without a Trainer: the loss is then logged as a metric."""
    store = StoreWriter(run_dir(tmp_path).db_path)
    begin(store)
    rows: list[StepRow] = [
        (0, n, step_row(n, 0.5 if has_loss else math.nan)) for n in range(1, 101)
    ]
    sample = (0, 101, "train/loss", 100, 0, 1.0, 0.5)
    write(store, 1, [Batch(steps=rows, samples=[sample])])
    begin(store, 2, resumed_step=100)
    resumed = with_values(FoldState(), store.stored_values(store.spans(2)))
    store.close()
    assert resumed.ranks[0].metrics["train/loss"].last == 0.5
    resumed = fold(resumed, 0, steps(20, 0.1, first=101, loss=math.nan))
    assert (loss_warning(resumed) is not None) == has_loss


@pytest.mark.parametrize(("phase", "epoch"), [(Phase.STARTING, 0), (Phase.COMPUTE, -1)])
def test_an_unknown_epoch_is_neither_shown_nor_evidence(
    tmp_path: Path, phase: Phase, epoch: int
) -> None:
    unknown = pulse(0, phase, epoch=epoch, batch=0, global_step=0)
    shown = built(attempt(tmp_path, pulses={0: unknown}, fold=FoldState()))
    assert "epoch" not in plain_line(shown)
    facts = position_facts({0: unknown})["0"]
    assert (facts["epoch"], facts["batch"]) == (None, None)


@pytest.mark.parametrize("saves", [False, True])
def test_a_rank_that_the_signal_of_a_stop_has_ended_is_not_dead(
    tmp_path: Path, saves: bool
) -> None:
    hello = labelled(RecordKind.HELLO, {"program": "PyTorch", "saves": saves})
    live = attempt(tmp_path, state=RunState.STOPPING, fold=fold(FoldState(), 0, [hello]))
    dead = judgement(RankState.DEAD)
    assert state_word(built(live, dead)) == "RANK DEAD"
    live.stops.escalation = StopEscalation(0.0, 60.0, telemetry=False)
    assert state_word(built(live, dead)) == ("RANK DEAD" if saves else "stopping")


@pytest.mark.parametrize("state", [RunState.FINISHED, RunState.FAILED])
def test_no_rank_of_an_ended_run_is_starting(tmp_path: Path, state: RunState) -> None:
    """A program without an optimizer of torch has sent values, but no pulse."""
    hello = labelled(RecordKind.HELLO, {"program": "Keras", "saves": False})
    live = attempt(tmp_path, fold=fold(FoldState(), 0, [hello]), pulses={0: None})
    now = built(live, judgement(RankState.STARTING))
    end = AttemptEnd(state=state, detail="x", exit_code=0)
    (rank,) = final_snapshot(now, end, [], ended_at=13.0, waiting=None).ranks
    assert rank.state is RankState.ENDED


@pytest.mark.parametrize(
    ("hello", "error", "saves"),
    [
        (None, None, None),
        ({"program": "PyTorch", "saves": False}, None, False),
        ({"program": "PyTorch", "saves": True}, None, True),
        ({"program": "PyTorch DDP", "saves": True}, "a rank did not come", False),
        ({}, None, True),
    ],
)
def test_a_checkpoint_is_promised_once_the_program_is_known(
    tmp_path: Path, hello: dict[str, Any] | None, error: str | None, saves: bool | None
) -> None:
    live = attempt(tmp_path, coordination_error=lambda: error)
    assert built(live).saves_checkpoints is True
    live.spec = replace(live.spec, command=("python", "a.py"), stop_signal="SIGINT")
    live.fold = fold(
        FoldState(), 0, [labelled(RecordKind.HELLO, hello)] if hello is not None else []
    )
    shown = built(live)
    assert (shown.saves_checkpoints, shown.stop_signal) == (saves, "SIGINT")
