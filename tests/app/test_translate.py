"""From frames to view models: every state, every silence, nothing parsed, nothing invented."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ltui.app.live.frame import RankException, ResolvedVerdict
from ltui.app.live.run_poller import RunPoller
from ltui.app.presentation import gpu_view, run_details, run_view
from ltui.app.presentation.notifications import refusal
from ltui.app.presentation.run_configuration import settings
from ltui.app.presentation.run_report import show_lines
from ltui.app.presentation.run_view import RankMetricColumn
from ltui.app.presentation.snapshot_text import rank_line
from ltui.app.runs.run_entry import summarise
from ltui.training.config.run_spec import RunSpec
from ltui.training.shared.record_types import StepField
from ltui.training.state.good_checkpoints import last_good_checkpoint
from ltui.training.state.run_snapshot import (
    CheckpointInfo,
    JobSnapshot,
    RankState,
    RunState,
    Verdict,
)
from ltui.training.store.run_directory import RunDir
from ltui.widgets import formats
from ltui.widgets.columns import Column
from ltui.widgets.run_tables import RankTable
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import HeaderViewModel, RankRow
from tests.app.frames import NOW, curve, frame, gpu, rank, snapshot

STALL = Verdict(
    kind="stall",
    level="stalled",
    culprits=(2,),
    waiting=(0, 1, 3),
    place="augment.py:88",
    cause="rank 2 waits for its data",
    remedy="look at worker 4711",
    began=NOW - 8.2,
)
SLOW = Verdict(kind="straggler", level="slow", culprits=(1,), cause="rank 1 is slow")


def header(**changes: Any) -> HeaderViewModel:
    """Return the header of a run with these fields of its snapshot."""
    return run_view.header(frame(snapshot=snapshot(**changes)))


def rows(**changes: Any) -> Sequence[RankRow]:
    return run_view.rank_rows(frame(snapshot=snapshot(**changes)))


def ending(**changes: Any) -> list[str]:
    """Return what is said about a run that has ended."""
    return [cell.text for cell in run_view.end_cells(frame(**changes))]


def metrics_of(row: RankRow) -> list[str]:
    texts = [metric.cell.text for metric in row.metrics]
    assert len(texts) >= 3
    return texts


def test_header_of_a_run() -> None:
    view_model = header()
    assert (view_model.state_sign, view_model.state, view_model.tone) == ("●", "running", Tone.GOOD)
    assert view_model.epoch == "epoch 3/30"
    assert view_model.step.replace("\u2009", " ") == "step 1204/2930"
    assert view_model.share == pytest.approx(1204 / 2930)
    assert view_model.eta == "12 m 08 s left"
    assert view_model.banner is None
    assert view_model.notes == ()
    for state in RunState:
        view_model = header(state=state)
        assert len(view_model.state_sign) == 1
        assert view_model.state == state.value


def test_unknown_is_not_zero() -> None:
    view_model = header(epoch=None, global_step=None, max_steps=None, eta_s=None, elapsed_s=None)
    assert view_model.epoch == "epoch n/a"
    assert view_model.step == "step n/a"
    assert view_model.share is None
    assert view_model.eta == ""
    assert header(epoch=None, max_epochs=None).epoch == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"state": RunState.PAUSED},
        {"verdicts": (STALL,)},
        {"ranks": (rank(0), rank(1, state=RankState.DEAD))},
    ],
)
def test_a_run_at_rest_has_no_time_left(changes: dict[str, Any]) -> None:
    assert header(**changes).eta == ""


def test_a_duration_is_said_once_and_sentences_end() -> None:
    cause = "the process of rank 1 is stopped (SIGSTOP) in backward for 9 s"
    remedy = "To continue it: kill -CONT 4711"
    banner = header(verdicts=(replace(STALL, cause=cause, remedy=remedy),)).banner
    assert banner == f"STALLED: {cause}. {remedy}"


def test_a_stalled_rank_is_the_state_and_the_banner() -> None:
    states = [RankState.STALLED if i == 2 else RankState.WAITING for i in range(4)]
    ranks = tuple(rank(i, state=state) for i, state in enumerate(states))
    shown = frame(snapshot=snapshot(ranks=ranks, verdicts=(STALL,)))
    view_model = run_view.header(shown)
    assert (view_model.state_sign, view_model.state) == ("!", "STALLED")
    assert view_model.banner == "STALLED for 8.2 s: rank 2 waits for its data. look at worker 4711"
    assert view_model.banner_tone is Tone.BAD
    row = run_view.rank_rows(shown)[2]
    assert (row.state.text, row.note) == ("STALLED", "augment.py:88")
    assert run_view.ranks_title(shown) == "1 STALLED, 3 waiting"
    # So is a stall without a culprit.
    nobody = Verdict(kind="transport", level="stalled", cause="all wait", waiting=(0, 1, 2, 3))
    view_model = header(verdicts=(nobody,))
    assert (view_model.state_sign, view_model.state) == ("!", "STALLED")


def test_a_cleared_verdict_says_how_long_it_lasted_then_goes() -> None:
    over = ResolvedVerdict(verdict=STALL, lasted_s=12.0, at=NOW - 1)
    view_model = run_view.header(frame(resolved_verdicts=(over,)))
    assert view_model.banner == "Recovered after 12 s: rank 2 was stalled"
    assert view_model.banner_tone is Tone.GOOD
    later = frame(resolved_verdicts=(over,), now=NOW + run_view.RECOVERY_SHOWN_S)
    assert run_view.header(later).banner is None


def test_the_worst_verdict_is_the_banner() -> None:
    banner = str(header(verdicts=(SLOW, STALL)).banner)
    assert banner.startswith("STALLED for 8.2 s (+1 more, d): rank 2")
    alone = header(verdicts=(SLOW,))
    assert (alone.banner, alone.banner_tone) == ("Slow: rank 1 is slow", Tone.WARN)
    assert alone.state == "running"


def test_ranks_are_marked_as_the_verdict_says_also_before_their_states_are() -> None:
    dead = Verdict(kind="killed", level="dead", cause="rank 3 was killed", culprits=(3,))
    for verdicts, words in (
        ((SLOW, STALL, dead), ["waiting", "waiting", "STALLED", "DEAD"]),
        ((SLOW,), ["ok", "slow", "ok", "ok"]),
    ):
        assert [row.state.text for row in rows(verdicts=verdicts)] == words


@pytest.mark.parametrize(
    ("changes", "notes"),
    [
        (
            {
                "supervisor_answers": False, "snapshot_at": NOW - 12, "error": "disk gone",
                "error_since": NOW - 3,
            },
            (
                "the supervisor does not answer; figures are 12 s old",
                "the run can't be read, for 3.0 s: disk gone",
            ),
        ),
        (
            {"error": "the history can't be read (no database)"},
            ("the history can't be read (no database)",),
        ),
        (
            {"snapshot": snapshot(history_note="disk full since 14:03")},
            ("history incomplete: disk full since 14:03",),
        ),
    ],
)  # fmt: skip
def test_a_silent_supervisor_a_failing_feed_and_missing_history_are_said(
    changes: dict[str, Any], notes: tuple[str, ...]
) -> None:
    assert run_view.header(frame(**changes)).notes == notes


def test_silence_is_said_with_its_age_only_while_ranks_should_write() -> None:
    quiet = frame(last_record_at=NOW - 31)
    assert run_view.silence_text(quiet) == "no data for 31 s"
    assert run_view.silence_text(frame()) is None
    paused = replace(quiet, snapshot=snapshot(state=RunState.PAUSED))
    assert run_view.silence_text(paused) is None
    assert run_view.silence_text(frame(last_record_at=None)) is None


def test_a_rank_of_which_nothing_is_known_shows_no_figure() -> None:
    bare = rank(
        0, pid=None, phase=None, global_step=None, age_s=None, samples_per_s=None,
        cpu_percent=None, rss_bytes=None, recent_step_s=(), state=RankState.UNKNOWN,
    )  # fmt: skip
    first, second = rows(ranks=(rank(1), bare))
    assert second.rank == "r1", "rows are in the order of ranks"
    assert {first.pid, first.phase, first.step, first.age, *metrics_of(first)} == {"n/a"}


def test_readings_of_processes_that_ended_are_not_shown_as_if_they_stood() -> None:
    row = rows(state=RunState.FINISHED)[0]
    assert set(metrics_of(row)) == {"n/a"}
    assert row.age == ""
    assert row.pid == "4000"


def test_an_ended_rank_has_no_phase_and_says_that_its_loss_is_nan() -> None:
    nan = Verdict(
        kind="nan_loss", level="warning", culprits=(0,), cause="NaN", place="loss",
        evidence={"step": 41},
    )  # fmt: skip
    ended = rank(0, state=RankState.ENDED, phase="ended")
    run = snapshot(state=RunState.FINISHED, ranks=(ended,), world_size=1, verdicts=(nan,))
    (row,) = run_view.rank_rows(frame(snapshot=run))
    assert (row.phase, row.state.text, row.note) == ("", "ended", "loss NaN since step 41")
    assert "ended" not in rank_line(run, ended).split("ended", 1)[1]


def test_a_declared_metric_or_field_of_the_steps_is_a_column_of_the_rank_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    column = Column(key="wait", title="data wait", width=9, right=True)
    waiting = RankMetricColumn(column, lambda rank, _: formats.percent(rank.data_wait_share))
    monkeypatch.setattr(run_view, "RANK_METRICS", (*run_view.RANK_METRICS, waiting))
    shown = rows(ranks=(rank(0, data_wait_share=0.25),))
    assert column in RankTable().columns_of(shown)
    assert [cell.text for cell in RankTable().cells_of(shown[0])["wait"]] == ["25 %"]
    rate = RankMetricColumn(column, lambda _, step: formats.significant(step[StepField.LR], 4))
    monkeypatch.setattr(run_view, "RANK_METRICS", (rate,))
    values = [math.nan] * len(StepField)
    values[StepField.LR] = 0.25
    shown = run_view.rank_rows(frame(last_steps={0: tuple(values)}))
    assert [row.metrics[0].cell.text for row in shown[:2]] == ["0.2500", "n/a"]


def test_gpu_rows_say_stale_and_hot() -> None:
    gpus = (gpu(0), gpu(1, sampled_at=NOW - 30), gpu(2, temperature_c=91.0), gpu(3, error="lost"))
    good, old, hot, lost = gpu_view.gpu_rows(frame(snapshot=snapshot(gpus=gpus)))
    assert good.utilisation == pytest.approx(0.98)
    assert good.memory_text == "61.0 / 140 GiB"
    assert old.note == "30 s old"
    assert (hot.temperature.tone, hot.temperature.text) == (Tone.WARN, "91 °C!")
    assert lost.note == "lost"


def test_without_gpus_the_line_says_why_and_ranks_have_readings() -> None:
    run = snapshot(gpus=(), gpu_note="no NVIDIA driver on this machine")
    text = run_view.processes_text(frame(snapshot=run)).plain
    assert text.splitlines()[0] == "no NVIDIA driver on this machine"
    assert "pid 4000" in text
    assert "104 %" in text


def test_an_ending_names_the_first_rank_that_failed_and_the_checkpoint() -> None:
    assert ending() == []
    endings = (
        RankException(rank=1, type="RuntimeError", message="size\nmismatch"),
        RankException(rank=0, type="RuntimeError", message="peer gone"),
    )
    run = snapshot(state=RunState.FAILED, detail="rank 1 failed at step 1204")
    *texts, last = ending(snapshot=run, rank_exceptions=endings)
    assert texts == [
        *("rank 1 failed at step 1204", "rank 1 raised RuntimeError: size"),
        "after it, rank 0 failed too",
    ]
    assert last.startswith("newest checkpoint: step 1000, weights not checked, checksum ok")
    nan = Verdict(kind="nan_loss", level="warning", cause="NaN", evidence={"step": 900})
    saved = CheckpointInfo(path="/c/1", global_step=800, ok=True, weights="finite")
    bad = replace(saved, path="/c/2", global_step=1000, weights="NaN")
    run = replace(run, verdicts=(nan,), checkpoints=(saved, bad))
    last = ending(snapshot=run)[-1]
    assert last.startswith("newest checkpoint: step 1000, NaN weights, checksum ok")
    assert last.endswith("; the last checkpoint before the NaN is step 800")
    alone = replace(run, state=RunState.STOPPED, detail="stopped at step 1204", world_size=1)
    assert len(ending(snapshot=alone)) == 1, "the header has the loss"
    last = ending(snapshot=replace(run, checkpoints=(bad,)))[-1]
    assert last.endswith("; there is no checkpoint before the NaN")


def test_a_damaged_checkpoint_is_not_a_good_one() -> None:
    bad = CheckpointInfo(path="/c/2", global_step=2000, ok=False)
    good = CheckpointInfo(path="/c/1", global_step=1000, ok=True)
    assert last_good_checkpoint((bad, good)) is good
    assert last_good_checkpoint((bad,)) is None
    run = snapshot(state=RunState.STOPPED, checkpoints=())
    assert ending(snapshot=run)[-1] == "no checkpoint was saved"
    killed = replace(run, detail="killed on request at step 7; no checkpoint was saved")
    assert ending(snapshot=killed) == [killed.detail]


@pytest.mark.parametrize("evil", ["\x1b]0;pwned\x07name", "name\x1b[2J", "na\u202eme"])
def test_names_from_a_run_are_made_safe(evil: str) -> None:
    ranks = (rank(0, phase=evil, note=evil),)
    shown = frame(snapshot=snapshot(name=evil, preset=evil, history_note=evil, ranks=ranks))
    view_model = run_view.header(shown)
    (row,) = run_view.rank_rows(shown)
    for text in (view_model.name, view_model.preset, *view_model.notes, row.phase, row.note):
        assert not set(text) & set("\x1b\x07\u202e")


def test_details_tell_the_last_events_cleaned() -> None:
    happened = tuple((NOW + n, f"event {n} \x1b[31m[b]") for n in range(20))
    text = run_details.checkpoints_and_events(frame(events=happened)).plain
    assert "event 19 [b]" in text
    assert text.index("event 19 ") < text.index("event 0 ")
    assert "none yet" not in text.split("events")[1]


def test_a_stop_on_an_unknown_metric_keeps_its_caution() -> None:
    notes = header(stops=("when train/los < 0.01", "at step 500")).notes
    assert "has not logged train/los; did you mean train/loss?" in notes[0]
    known = "when train/loss < 0.01"
    assert header(stops=(known,)).notes == (f"stops {known}",)


def test_a_slow_rank_counts_as_slow_until_the_run_ends() -> None:
    run = snapshot(ranks=(rank(0), rank(1)), verdicts=(SLOW,))
    assert run_view.ranks_title(frame(snapshot=run)) == "1 SLOW, 1 ok"
    assert "1 SLOW, 1 ok" in "\n".join(show_lines(run, NOW))
    over = ResolvedVerdict(verdict=SLOW, lasted_s=12.0, at=NOW - 1)
    for state in (RunState.STOPPING, RunState.FINISHED):
        ended = frame(snapshot=snapshot(state=state), resolved_verdicts=(over,))
        assert run_view.header(ended).banner is None, "it was slow to the end"


def test_a_rank_recovers_from_being_slow_only_if_the_run_steps_on(tmp_path: Path) -> None:
    slow = replace(SLOW, began=NOW)
    poller = RunPoller(RunDir(tmp_path))
    for step, verdicts in ((70, (slow,)), (70, ()), (70, ())):
        poller._track_verdicts(snapshot(global_step=step, verdicts=verdicts), NOW + 30)
    assert not poller._resolved_verdicts, "it was slow to the last step"
    poller._track_verdicts(snapshot(global_step=71), NOW + 31)
    assert [one.verdict for one in poller._resolved_verdicts] == [slow]


def test_a_stopping_run_is_resumed_when_it_has_stopped() -> None:
    nan = Verdict(kind="nan_loss", level="warning", cause="loss NaN since step 101")
    stopping = snapshot(state=RunState.STOPPING, verdicts=(nan,))
    why = refusal(stopping, "resume", readonly=False)
    assert why == "brave-owl is still stopping. Resume it when it has stopped."


def test_a_killed_run_has_its_reason_in_the_list() -> None:
    detail = "killed on request (STALLED: rank 1 is stopped) at step 7; no checkpoint was saved"
    assert summarise(snapshot(state=RunState.STOPPED, detail=detail)).reason == detail
    stopped = snapshot(state=RunState.STOPPED, detail="stopped at step 7")
    assert summarise(stopped).reason == "", "the state's word says it"


def test_a_rank_of_a_resumed_run_has_no_step_before_it_loaded_its_checkpoint() -> None:
    (row,) = rows(attempt=2, ranks=(rank(0, state=RankState.STARTING, global_step=0),))
    assert row.step == "n/a"
    assert header(attempt=2).elapsed.startswith("for ")


# -- the details of a run: settings, where it was started from, whose checkpoints ---------------

SPEC = RunSpec(
    id="brave-owl-3f2a",
    name="brave-owl",
    created_at=NOW,
    cwd="/home/me",
    python="/venv/bin/python",
    preset="quickstart",
    start_from="old-pine-11aa:4500",
    config={
        "seed_everything": True,
        "trainer": {"max_epochs": 30, "logger": None, "callbacks": [], "run_name": ""},
        "model": {"class_path": "my.models.Digits", "init_args": {"learning_rate": 0.002}},
    },
)


def test_settings_are_the_leaves_under_short_names() -> None:
    assert settings(SPEC) == [
        ("seed_everything", "true"),
        ("trainer.max_epochs", "30"),
        ("trainer.callbacks", "[]"),
        ("trainer.run_name", "''"),
        ("model", "Digits"),
        ("model.learning_rate", "0.002"),
    ]
    exec_spec = replace(SPEC, config=None, command=("python", "train.py", "--name", "a b"))
    assert settings(exec_spec) == [("command", "python train.py --name 'a b'")]


def figures(**changes: Any) -> str:
    return run_details.metrics_and_configuration(frame(**changes)).plain


def checkpoints(**changes: Any) -> str:
    return run_details.checkpoints_and_events(frame(snapshot=snapshot(**changes))).plain


def test_figures_name_the_parent_the_settings_and_what_changed() -> None:
    text = figures(spec=SPEC, snapshot=snapshot(changes=("trainer.max_epochs=60",)))
    assert "started from\nold-pine-11aa:4500\n" in text
    assert "model.learning_rate  0.002" in text
    assert "changed for this attempt\ntrainer.max_epochs=60" in text


def test_hyperparameters_are_shown_for_a_script_whose_configuration_is_unknown() -> None:
    script = replace(SPEC, config=None, command=("python", "train.py"), start_from=None)
    values = {"width": 32, "name": "digits"}
    assert "width  32" in figures(spec=script, hyperparameters=values)
    assert "hyperparameters" not in figures(spec=SPEC, hyperparameters=values)


def test_the_learning_rate_of_the_last_step_is_a_figure() -> None:
    lines = figures(curves={run_details.LEARNING_RATE: curve([0.002, 0.0015])}).splitlines()
    (line,) = [line for line in lines if "learning rate" in line]
    assert line.split() == ["learning", "rate", "0.001500"]
    assert "learning rate" not in figures()


def test_checkpoints_of_the_script_are_marked_as_its_own() -> None:
    own = CheckpointInfo(
        path="/csv/15-0.160.ckpt", global_step=15, reason="best by val/loss = 0.16",
        saved_at=NOW - 5, size_bytes=2048,
    )  # fmt: skip
    text = checkpoints(checkpoints=(), script_checkpoints=(own,))
    assert text.startswith("checkpoints\nnone by ltui yet\n")
    assert "script's own callbacks\nstep 15, best by val/loss = 0.16, 2.00 KiB, 5 s ago\n" in text
    assert "/csv/15-0.160.ckpt" in text


def test_the_reason_of_a_checkpoint_is_made_safe() -> None:
    hostile = CheckpointInfo(path="/a.ckpt", global_step=15, reason="end\x1b]0;title\x07\x9b2J")
    for changes in ({"checkpoints": (hostile,)}, {"script_checkpoints": (hostile,)}):
        text = checkpoints(**changes)
        assert "step 15" in text
        assert not {"\x1b", "\x07", "\x9b"} & set(text)


def test_the_job_of_slurm_is_among_the_facts() -> None:
    job = JobSnapshot(id="12", node_names="n[07-08]", partition="gpu", ends_at=NOW + 3600)
    text = checkpoints(job=job)
    assert "SLURM job: 12 on n[07-08], partition gpu\ntime limit: 20" in text
    text = checkpoints(job=JobSnapshot(id="12"))
    assert "SLURM job: 12\n" in text
    assert "time limit" not in text


def test_the_header_says_when_the_job_ends() -> None:
    job = JobSnapshot(id="12", ends_at=NOW + 3 * 3600 + 600)
    assert header(job=job).job == "job ends in 3 h 10 m"
    assert header(job=job, state=RunState.STOPPED).job == ""


def test_the_time_of_the_last_checkpoints_is_shown() -> None:
    text = checkpoints(checkpoint_seconds=(2.0, 12.0, 3.0))
    assert "the last ones took up to 12 s\n" in text
