"""From frames to view models: every state, every silence, nothing parsed, nothing invented."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from msgspec.structs import replace

from ltui.app.live.frame import RankException, ResolvedVerdict
from ltui.app.live.run_poller import RunPoller
from ltui.app.presentation import gpu_view, run_details, run_view
from ltui.app.presentation.notifications import refusal
from ltui.app.presentation.run_report import show_lines
from ltui.app.presentation.run_view import RankMetricColumn
from ltui.app.presentation.snapshot_text import rank_line
from ltui.app.runs.run_entry import summarise
from ltui.training.shared.record_types import StepField
from ltui.training.state.good_checkpoints import last_good_checkpoint
from ltui.training.state.run_snapshot import CheckpointInfo, RankState, RunState, Verdict
from ltui.training.store.run_directory import RunDir
from ltui.widgets import formats
from ltui.widgets.columns import Column
from ltui.widgets.run_tables import RankTable
from ltui.widgets.tone import Tone
from tests.app.frames import NOW, frame, gpu, rank, snapshot

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


def test_header_of_a_run() -> None:
    view_model = run_view.header(frame())
    assert (view_model.state_sign, view_model.state, view_model.tone) == ("●", "running", Tone.GOOD)
    assert view_model.epoch == "epoch 3/30"
    assert view_model.step.replace("\u2009", " ") == "step 1204/2930"
    assert view_model.share == pytest.approx(1204 / 2930)
    assert view_model.eta == "12 m 08 s left"
    assert view_model.banner is None
    assert view_model.notes == ()


@pytest.mark.parametrize("state", list(RunState))
def test_every_state_has_a_sign_and_a_word(state: RunState) -> None:
    view_model = run_view.header(frame(snapshot=snapshot(state=state)))
    assert len(view_model.state_sign) == 1
    assert view_model.state == state.value


def test_unknown_is_not_zero() -> None:
    bare = snapshot(epoch=None, global_step=None, max_steps=None, eta_s=None, elapsed_s=None)
    view_model = run_view.header(frame(snapshot=bare))
    assert view_model.epoch == "epoch n/a"
    assert view_model.step == "step n/a"
    assert view_model.share is None
    assert view_model.eta == ""
    without_epochs = snapshot(epoch=None, max_epochs=None)
    assert run_view.header(frame(snapshot=without_epochs)).epoch == ""


def test_a_paused_run_has_no_time_left() -> None:
    assert run_view.header(frame(snapshot=snapshot(state=RunState.PAUSED))).eta == ""


def test_a_stalled_run_has_no_time_left() -> None:
    assert run_view.header(frame(snapshot=snapshot(verdicts=(STALL,)))).eta == ""
    ranks = (rank(0), rank(1, state=RankState.DEAD))
    assert run_view.header(frame(snapshot=snapshot(ranks=ranks))).eta == ""


def test_a_duration_is_said_once_and_sentences_end() -> None:
    stopped = replace(
        STALL,
        cause="the process of rank 1 is stopped (SIGSTOP) in backward for 9 s",
        remedy="To continue it: kill -CONT 4711",
    )
    banner = run_view.header(frame(snapshot=snapshot(verdicts=(stopped,)))).banner
    assert banner == (
        "STALLED: the process of rank 1 is stopped (SIGSTOP) in backward for 9 s. "
        "To continue it: kill -CONT 4711"
    )


def test_a_stalled_rank_is_the_state_and_the_banner() -> None:
    ranks = tuple(
        rank(i, state=RankState.STALLED if i == 2 else RankState.WAITING) for i in range(4)
    )
    run = snapshot(ranks=ranks, verdicts=(STALL,))
    view_model = run_view.header(frame(snapshot=run))
    assert (view_model.state_sign, view_model.state) == ("!", "STALLED")
    assert view_model.banner == "STALLED for 8.2 s: rank 2 waits for its data. look at worker 4711"
    assert view_model.banner_tone is Tone.BAD
    rows = run_view.rank_rows(frame(snapshot=run))
    assert rows[2].state.text == "STALLED"
    assert rows[2].note == "augment.py:88"
    assert run_view.ranks_title(frame(snapshot=run)) == "1 STALLED, 3 waiting"


def test_a_cleared_verdict_says_how_long_it_lasted_then_goes() -> None:
    over = ResolvedVerdict(verdict=STALL, lasted_s=12.0, at=NOW - 1)
    view_model = run_view.header(frame(resolved_verdicts=(over,)))
    assert view_model.banner == "Recovered after 12 s: rank 2 was stalled"
    assert view_model.banner_tone is Tone.GOOD
    later = frame(resolved_verdicts=(over,), now=NOW + run_view.RECOVERY_SHOWN_S)
    assert run_view.header(later).banner is None


def test_the_worst_verdict_is_the_banner() -> None:
    slow = Verdict(kind="slow", level="slow", cause="rank 1 is slow")
    view_model = run_view.header(frame(snapshot=snapshot(verdicts=(slow, STALL))))
    assert view_model.banner is not None
    assert view_model.banner.startswith("STALLED for 8.2 s (+1 more, d): rank 2")
    alone = run_view.header(frame(snapshot=snapshot(verdicts=(slow,))))
    assert (alone.banner, alone.banner_tone) == ("Slow: rank 1 is slow", Tone.WARN)
    assert alone.state == "running"


def test_ranks_are_marked_as_the_verdict_says_also_before_their_states_are() -> None:
    dead = Verdict(kind="killed", level="dead", cause="rank 3 was killed", culprits=(3,))
    slow = Verdict(kind="straggler", level="slow", cause="rank 1 is slow", culprits=(1,))
    shown = frame(snapshot=snapshot(verdicts=(slow, STALL, dead)))
    words = [row.state.text for row in run_view.rank_rows(shown)]
    assert words == ["waiting", "waiting", "STALLED", "DEAD"]
    only_slow = frame(snapshot=snapshot(verdicts=(slow,)))
    assert [r.state.text for r in run_view.rank_rows(only_slow)] == ["ok", "slow", "ok", "ok"]


def test_a_stall_without_a_culprit_is_the_state_of_the_run() -> None:
    nobody = Verdict(kind="transport", level="stalled", cause="all wait", waiting=(0, 1, 2, 3))
    view_model = run_view.header(frame(snapshot=snapshot(verdicts=(nobody,))))
    assert (view_model.state_sign, view_model.state) == ("!", "STALLED")


def test_a_silent_supervisor_and_a_failing_feed_are_said_with_their_age() -> None:
    shown = frame(
        supervisor_answers=False, snapshot_at=NOW - 12, error="disk gone", error_since=NOW - 3
    )
    assert run_view.header(shown).notes == (
        "the supervisor does not answer; figures are 12 s old",
        "the run can't be read, for 3.0 s: disk gone",
    )
    once = frame(error="the history can't be read (no database)")
    assert run_view.header(once).notes == ("the history can't be read (no database)",)


def test_incomplete_history_is_said() -> None:
    run = snapshot(history_note="disk full since 14:03")
    assert run_view.header(frame(snapshot=run)).notes == (
        "history incomplete: disk full since 14:03",
    )


def test_silence_is_said_with_its_age_only_while_ranks_should_write() -> None:
    quiet = frame(last_record_at=NOW - 31)
    assert run_view.silence_text(quiet) == "no data for 31 s"
    assert run_view.silence_text(frame()) is None
    paused = replace(quiet, snapshot=snapshot(state=RunState.PAUSED))
    assert run_view.silence_text(paused) is None
    assert run_view.silence_text(frame(last_record_at=None)) is None


def test_rows_are_in_the_order_of_ranks() -> None:
    run = snapshot(ranks=tuple(rank(i) for i in (3, 0, 2, 1)))
    assert [row.rank for row in run_view.rank_rows(frame(snapshot=run))] == [
        "r0",
        "r1",
        "r2",
        "r3",
    ]


def test_a_rank_of_which_nothing_is_known_shows_no_figure() -> None:
    bare = rank(
        0, pid=None, phase=None, global_step=None, age_s=None, samples_per_s=None,
        cpu_percent=None, rss_bytes=None, recent_step_s=(), state=RankState.UNKNOWN,
    )  # fmt: skip
    (row,) = run_view.rank_rows(frame(snapshot=snapshot(ranks=(bare,))))
    metrics = [metric.cell.text for metric in row.metrics]
    assert len(metrics) >= 3
    assert {row.pid, row.phase, row.step, row.age, *metrics} == {"n/a"}


def test_readings_of_processes_that_ended_are_not_shown_as_if_they_stood() -> None:
    (row, *_) = run_view.rank_rows(frame(snapshot=snapshot(state=RunState.FINISHED)))
    metrics = [metric.cell.text for metric in row.metrics]
    assert len(metrics) >= 3
    assert set(metrics) == {"n/a"}
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


def test_a_declared_metric_is_a_column_of_the_rank_table(monkeypatch: pytest.MonkeyPatch) -> None:
    column = Column(key="wait", title="data wait", width=9, right=True)
    waiting = RankMetricColumn(column, lambda rank, _: formats.percent(rank.data_wait_share))
    monkeypatch.setattr(run_view, "RANK_METRICS", (*run_view.RANK_METRICS, waiting))
    rows = run_view.rank_rows(frame(snapshot=snapshot(ranks=(rank(0, data_wait_share=0.25),))))
    table = RankTable()
    assert column in table.columns_of(rows)
    assert [cell.text for cell in table.cells_of(rows[0])["wait"]] == ["25 %"]


def test_a_field_of_the_step_records_is_a_column_of_the_rank_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    column = Column(key="lr", title="rate", width=9, right=True)
    rate = RankMetricColumn(column, lambda _, step: formats.significant(step[StepField.LR], 4))
    monkeypatch.setattr(run_view, "RANK_METRICS", (rate,))
    values = [math.nan] * len(StepField)
    values[StepField.LR] = 0.25
    rows = run_view.rank_rows(frame(last_steps={0: tuple(values)}))
    assert [row.metrics[0].cell.text for row in rows[:2]] == ["0.2500", "n/a"]


def test_gpu_rows_say_stale_and_hot() -> None:
    run = snapshot(
        gpus=(gpu(0), gpu(1, sampled_at=NOW - 30), gpu(2, temperature_c=91.0), gpu(3, error="lost"))
    )
    rows = gpu_view.gpu_rows(frame(snapshot=run))
    assert rows[0].utilisation == pytest.approx(0.98)
    assert rows[0].memory_text == "61.0 / 140 GiB"
    assert rows[1].note == "30 s old"
    assert rows[2].temperature.tone is Tone.WARN
    assert rows[2].temperature.text == "91 °C!"
    assert rows[3].note == "lost"


def test_without_gpus_the_line_says_why_and_ranks_have_readings() -> None:
    run = snapshot(gpus=(), gpu_note="no NVIDIA driver on this machine")
    text = run_view.processes_text(frame(snapshot=run)).plain
    assert text.splitlines()[0] == "no NVIDIA driver on this machine"
    assert "pid 4000" in text
    assert "104 %" in text


def test_an_ending_names_the_first_rank_that_failed() -> None:
    endings = (
        RankException(rank=1, type="RuntimeError", message="size\nmismatch"),
        RankException(rank=0, type="RuntimeError", message="peer gone"),
    )
    run = snapshot(state=RunState.FAILED, detail="rank 1 failed at step 1204")
    texts = [cell.text for cell in run_view.end_cells(frame(snapshot=run, rank_exceptions=endings))]
    assert texts[0] == "rank 1 failed at step 1204"
    assert texts[1] == "rank 1 raised RuntimeError: size"
    assert texts[2] == "after it, rank 0 failed too"
    assert texts[3].startswith("newest checkpoint: step 1000, weights not checked, checksum ok")
    nan = Verdict(kind="nan_loss", level="warning", cause="NaN", evidence={"step": 900})
    saved = CheckpointInfo(path="/c/1", global_step=800, ok=True, weights="finite")
    bad = replace(saved, path="/c/2", global_step=1000, weights="NaN")
    run = replace(run, verdicts=(nan,), checkpoints=(saved, bad))
    last = run_view.end_cells(frame(snapshot=run))[-1].text
    assert last.startswith("newest checkpoint: step 1000, NaN weights, checksum ok")
    assert last.endswith("; the last checkpoint before the NaN is step 800")
    alone = replace(run, state=RunState.STOPPED, detail="stopped at step 1204", world_size=1)
    assert len(run_view.end_cells(frame(snapshot=alone))) == 1, "the header has the loss"
    run = replace(run, checkpoints=(bad,))
    assert run_view.end_cells(frame(snapshot=run))[-1].text.endswith(
        "; there is no checkpoint before the NaN"
    )


def test_a_damaged_checkpoint_is_not_a_good_one() -> None:
    bad = CheckpointInfo(path="/c/2", global_step=2000, ok=False)
    good = CheckpointInfo(path="/c/1", global_step=1000, ok=True)
    assert last_good_checkpoint((bad, good)) is good
    assert last_good_checkpoint((bad,)) is None
    run = snapshot(state=RunState.STOPPED, checkpoints=())
    assert run_view.end_cells(frame(snapshot=run))[-1].text == "no checkpoint was saved"
    killed = replace(run, detail="killed on request at step 7; no checkpoint was saved")
    assert [cell.text for cell in run_view.end_cells(frame(snapshot=killed))] == [killed.detail]


def test_a_live_run_has_no_ending() -> None:
    assert run_view.end_cells(frame()) == ()


@pytest.mark.parametrize("evil", ["\x1b]0;pwned\x07name", "name\x1b[2J", "na\u202eme"])
def test_names_from_a_run_are_made_safe(evil: str) -> None:
    run = snapshot(
        name=evil, preset=evil, history_note=evil, ranks=(rank(0, phase=evil, note=evil),)
    )
    view_model = run_view.header(frame(snapshot=run))
    (row,) = run_view.rank_rows(frame(snapshot=run))
    for text in (view_model.name, view_model.preset, *view_model.notes, row.phase, row.note):
        assert not set(text) & set("\x1b\x07\u202e")


def test_details_tell_the_last_events_cleaned() -> None:
    happened = tuple((NOW + n, f"event {n} \x1b[31m[b]") for n in range(20))
    text = run_details.checkpoints_and_events(frame(events=happened)).plain
    assert "event 19 [b]" in text
    assert text.index("event 19 ") < text.index("event 0 ")
    assert "none yet" not in text.split("events")[1]


def test_a_stop_on_an_unknown_metric_keeps_its_caution() -> None:
    stops = ("when train/los < 0.01", "at step 500")
    notes = run_view.header(frame(snapshot=snapshot(stops=stops))).notes
    assert "has not logged train/los; did you mean train/loss?" in notes[0]
    known = snapshot(stops=("when train/loss < 0.01",))
    assert run_view.header(frame(snapshot=known)).notes == ("stops when train/loss < 0.01",)


def test_a_slow_rank_counts_as_slow_until_the_run_ends() -> None:
    slow = Verdict(kind="straggler", level="slow", culprits=(1,), cause="rank 1 is slow")
    run = snapshot(ranks=(rank(0), rank(1)), verdicts=(slow,))
    assert run_view.ranks_title(frame(snapshot=run)) == "1 SLOW, 1 ok"
    assert "1 SLOW, 1 ok" in "\n".join(show_lines(run, NOW))
    over = ResolvedVerdict(verdict=slow, lasted_s=12.0, at=NOW - 1)
    for state in (RunState.STOPPING, RunState.FINISHED):
        ended = frame(snapshot=snapshot(state=state), resolved_verdicts=(over,))
        assert run_view.header(ended).banner is None, "it was slow to the end"


def test_a_rank_recovers_from_being_slow_only_if_the_run_steps_on(tmp_path: Path) -> None:
    slow = Verdict(kind="straggler", level="slow", culprits=(1,), cause="rank 1 is slow", began=NOW)
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
    starting = rank(0, state=RankState.STARTING, global_step=0)
    (row,) = run_view.rank_rows(frame(snapshot=snapshot(attempt=2, ranks=(starting,))))
    assert row.step == "n/a"
    assert run_view.header(frame(snapshot=snapshot(attempt=2))).elapsed.startswith("for ")
