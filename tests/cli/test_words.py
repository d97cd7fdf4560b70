"""A run as text: nothing invented where a value is missing, nothing hostile let through."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from ltui.app.commands.runs import runs_lines
from ltui.app.commands.stop_and_pause import stop_lines
from ltui.app.foreground.follow_run import exit_code
from ltui.app.foreground.progress_display import (
    PLAIN_EPOCH_S,
    PlainLines,
    display_for,
    panel_lines,
    plain_line,
)
from ltui.app.presentation.notifications import stop_effect, stop_progress
from ltui.app.presentation.run_report import columns, end_report, show_lines
from ltui.app.runs.run_entry import RunEntry, run_document, summarise
from ltui.app.runs.run_rows import run_row
from ltui.app.screens.run_commands import stop_question
from ltui.app.state_words import state_sentence, state_sign, state_word
from ltui.training.json_codec import to_json
from ltui.training.state.run_snapshot import (
    CheckpointInfo,
    MetricValue,
    NodeSnapshot,
    RankSnapshot,
    RankState,
    RunSnapshot,
    RunState,
    Throughput,
    Verdict,
    snapshot_from_json,
)
from ltui.training.store.run_directory import RunDir
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import Cell

EMPTY = RunSnapshot(id="brave-owl-3f2a", name="brave-owl", state=RunState.STARTING)
BUSY = replace(
    EMPTY,
    state=RunState.RUNNING,
    preset="quickstart",
    epoch=2,
    max_epochs=30,
    global_step=1204,
    max_steps=2930,
    world_size=2,
    elapsed_s=61.0,
    eta_s=12.0,
    metrics={
        "train/loss": MetricValue(last=0.84211, step=1204),
        "val/acc": MetricValue(last=0.951, step=1100),
        "lr-Adam": MetricValue(last=0.001, step=1204),
    },
    throughput=Throughput(samples_per_s=31400.0, data_wait_share=0.04),
    ranks=(
        RankSnapshot(rank=0, state=RankState.OK, device="cpu", phase="backward", age_s=0.012),
        RankSnapshot(rank=1, state=RankState.STALLED, device="cpu", phase="fetch data", age_s=8.2),
    ),
)
WELL = replace(BUSY, ranks=tuple(replace(r, state=RankState.OK) for r in BUSY.ranks))
SOUND = CheckpointInfo(path="/c/a.ckpt", global_step=1204, ok=True, reason="stop")
HOSTILE = "\x1b]0;owned\x07\x1b[2J[bold]x[/bold]\nsecond"


def run_lines(runs: Sequence[RunSnapshot], now: float) -> list[str]:
    """The lines of ``ltui runs``."""
    folder = RunDir(Path("/runs/calm-fox-1a2b"))
    return runs_lines([RunEntry(run_dir=folder, summary=summarise(run)) for run in runs], now)


def test_what_is_not_known_is_not_shown_as_a_number() -> None:
    text = "\n".join([*show_lines(EMPTY, 0.0), *run_lines([EMPTY], 0.0), plain_line(EMPTY)])
    assert "0" not in text.replace("brave-owl-3f2a", "")
    assert "None" not in text
    assert "n/a" in text


def test_a_busy_run_in_one_line() -> None:
    line = plain_line(WELL).replace("\u2009", " ")
    for part in (
        "running",
        "epoch 3/30",
        "step 1204/2930",
        "train/loss 0.8421",
        "val/acc 0.9510",
        "31.4 k samples/s",
        "4 % waiting for data",
        "2 ranks ok",
    ):
        assert part in line
    assert "lr-Adam" not in line


STALL = Verdict(kind="stall", level="stalled", cause="rank 1 waits", remedy="Look at it.")
NAN = Verdict(
    kind="nan_loss",
    level="warning",
    culprits=(0, 1),
    cause="the loss of ranks 0 and 1 is not a finite number (NaN) since step 152",
    evidence={"step": 152, "first_rank": 1},
)
NAN_WORDS = "running, loss NaN since step 152"
DEAD = Verdict(
    kind="killed",
    level="dead",
    culprits=(1,),
    cause="rank 1 was killed by SIGKILL (not the out-of-memory killer)",
    confidence=0.95,
    evidence={
        "reasons": {"1": "was killed by SIGKILL (not the out-of-memory killer)"},
        "consequences": {"0": "raised RuntimeError"},
    },
)


@pytest.mark.parametrize(
    ("verdicts", "word"),
    [((STALL,), "STALLED"), ((DEAD,), "RANK DEAD"), ((NAN,), NAN_WORDS), ((), "running")],
)
def test_every_presenter_uses_one_word_for_the_state(
    verdicts: tuple[Verdict, ...], word: str
) -> None:
    run = replace(WELL, verdicts=verdicts)
    assert state_word(run) == word
    assert state_sign(run)[1] == word
    assert word in run_lines([run], 0.0)[1]
    assert f"state       {word}" in "\n".join(show_lines(run, 0.0))
    assert plain_line(run).split("  ")[1] == word
    assert panel_lines(run, "", 100)[0][0].endswith(word)
    over = replace(run, verdicts=tuple(replace(v, ended=5.0) for v in verdicts))
    assert state_word(over) == "running"


def test_a_stalled_rank_without_a_verdict_yet_is_named_as_well() -> None:
    assert state_word(BUSY) == "STALLED"
    assert "1 STALLED, 1 ok" in plain_line(BUSY)
    assert "samples/s" not in plain_line(BUSY)


def test_a_run_that_ended_with_a_nan_loss_says_so_everywhere() -> None:
    run = replace(WELL, state=RunState.FINISHED, detail="finished at step 300", verdicts=(NAN,))
    said = "loss NaN since step 152, first on rank 1"
    (line,) = run_lines([run], 0.0)[1:]
    assert "finished, loss NaN since step 152" in line
    assert said in line
    assert state_sign(run)[2] is Tone.WARN
    document = run_document(run)
    assert document["state_word"] == "finished, loss NaN since step 152"
    assert document["detail"] == "finished at step 300; loss NaN since step 152"
    assert run_row(RunEntry(run_dir=RunDir(Path("r")), summary=summarise(run)), 0.0).state == Cell(
        text="loss NaN since step 152", tone=Tone.WARN
    )
    assert end_report(run)[0].endswith(f"finished at step 300; {said}")
    assert said in "\n".join(show_lines(run, 0.0))


@pytest.mark.parametrize("evidence", [{"loss": "infinite"}, {}], ids=["current", "older version"])
def test_an_infinite_loss_is_named(evidence: dict[str, str]) -> None:
    infinite = replace(NAN, cause="the loss of rank 0 is infinite since step 7", evidence=evidence)
    run = replace(WELL, state=RunState.FINISHED, verdicts=(infinite,))
    assert end_report(run)[0].endswith("loss inf")


def test_a_loss_that_is_not_finite_survives_the_store() -> None:
    value = MetricValue(last=math.nan, step=152, best_min=0.1)
    metrics = {"train/loss": value, "kl": replace(value, last=-math.inf)}
    document = json.loads(json.dumps(to_json(replace(WELL, metrics=metrics))))
    assert [one["last"] for one in document["metrics"].values()] == ["NaN", "-Infinity"]
    read = snapshot_from_json(document)
    assert math.isnan(read.metrics["train/loss"].last)
    assert read.metrics["kl"].last == -math.inf
    assert "train/loss NaN" in plain_line(read)


def test_a_summary_begins_with_the_validation_metric_and_says_how_many_more_there_are() -> None:
    logged = ("zeta", *(f"layer_{n}" for n in range(10)), "lr", "train_loss", "val_acc", "val_loss")
    metrics = {name: MetricValue(last=0.5, step=3) for name in logged}
    metrics["train/loss"] = MetricValue(last=1.0, step=3, measured=True)
    text = "\n".join(end_report(replace(EMPTY, state=RunState.FINISHED, metrics=metrics)))
    shown = [line.split()[0] for line in text.splitlines() if " at step 3" in line]
    assert shown[:5] == ["val_loss", "val_acc", "train_loss", "train/loss", "zeta"]
    assert shown[5:] == [f"layer_{n}" for n in range(7)]
    assert "+4 more: ltui show brave-owl-3f2a" in text
    assert "1.000  at step 3  (loss of each step, measured by ltui)" in text
    assert "train_loss" in plain_line(replace(EMPTY, metrics=metrics)).split("val_acc")[1]


@pytest.mark.parametrize(
    "detail",
    [
        "rank 1 ended without an exception (killed, or it exited by itself) at step 1204",
        "rank 1 was killed by SIGKILL at step 1204",
        "the command exited with code 1: some line",
    ],
)
def test_the_headline_of_a_dead_rank_is_what_the_diagnosis_found(detail: str) -> None:
    run = replace(WELL, state=RunState.CRASHED, detail=detail, verdicts=(DEAD,))
    said = f"at step 1204: {DEAD.cause}"
    assert state_sentence(run) == f"crashed {said}"
    assert end_report(run)[0].endswith(f"crashed {said}")
    assert said in "\n".join(show_lines(run, 0.0))
    assert said.removeprefix("at ") in run_lines([run], 0.0)[1]
    assert "r1   cpu                  fetch data" in "\n".join(show_lines(run, 0.0))
    assert "killed by SIGKILL" in show_lines(run, 0.0)[-1]


@pytest.mark.parametrize(
    ("detail", "verdict"),
    [
        ("rank 1 raised ValueError: no", DEAD),
        ("rank 0 was killed by SIGSEGV", DEAD),
        ("rank 1 was killed by SIGSEGV", DEAD),
        ("rank 1 was killed by SIGKILL (not the out-of-memory killer) at step 7", DEAD),
        ("rank 1 ended without an exception", replace(DEAD, confidence=0.55)),
    ],
)
def test_a_verdict_that_knows_less_does_not_replace_the_sentence(
    detail: str, verdict: Verdict
) -> None:
    run = replace(WELL, state=RunState.CRASHED, detail=detail, verdicts=(verdict,))
    assert state_sentence(run) == f"crashed: {detail}"


def test_the_age_of_a_run_is_not_that_of_its_attempt() -> None:
    run = replace(WELL, created_at=100.0, started_at=7100.0, attempt=2)
    assert "2 h ago (attempt 2: 5 m ago)" in run_lines([run], 7430.0)[1]
    assert "started 2 h ago, attempt 2 started 5 m ago" in "\n".join(show_lines(run, 7430.0))
    # The first attempt of a queued run begins long after it was asked for.
    first = replace(run, attempt=1)
    assert run_lines([first], 7430.0)[1].split("  ")[-1].strip() == "5 m ago"
    assert "started 5 m ago" in "\n".join(show_lines(first, 7430.0))
    assert "attempt" not in run_lines([first], 7430.0)[1]
    queued = replace(first, state=RunState.QUEUED, started_at=None, global_step=None)
    assert "2 h ago" not in run_lines([queued], 7430.0)[1]
    assert "  queued 2 h ago" in "\n".join(show_lines(queued, 7430.0))


def test_a_run_without_a_loss_shows_what_it_logs() -> None:
    metrics = {"reward": MetricValue(last=1.5, step=9), "lr-Adam": MetricValue(last=0.1, step=9)}
    assert "reward 1.500" in plain_line(replace(WELL, metrics=metrics))
    assert "lr-Adam" not in plain_line(replace(WELL, metrics=metrics))


def test_the_panel_names_every_rank_up_to_eight_and_counts_the_rest() -> None:
    ranks = tuple(RankSnapshot(rank=n, state=RankState.OK) for n in range(12))
    lines = [line for line, _ in panel_lines(replace(BUSY, ranks=ranks), "hint", 100)]
    assert sum(line.startswith("r") for line in lines) == 8
    assert "and 4 ranks ok" in lines
    assert lines[-1] == "hint"


def test_nothing_that_a_run_wrote_reaches_the_terminal_as_a_command() -> None:
    texts = ("name", "preset", "detail", "history_note", "gpu_note", "log_dir", "run_dir")
    run = replace(
        BUSY,
        **dict.fromkeys(texts, HOSTILE),
        metrics={
            HOSTILE: MetricValue(last=1.0, step=1),
            f"val{HOSTILE}": MetricValue(last=1.0, step=1),
        },
        ranks=(RankSnapshot(rank=0, note=HOSTILE, phase=HOSTILE, device=HOSTILE),),
        verdicts=(Verdict(kind="k", level="stalled", cause=HOSTILE, remedy=HOSTILE),),
        checkpoints=(replace(SOUND, path=HOSTILE, reason=HOSTILE),),
        script_checkpoints=(replace(SOUND, path=HOSTILE, reason=HOSTILE),),
        state=RunState.STOPPED,
    )
    lines = [
        *show_lines(run, 0.0),
        *end_report(run),
        *run_lines([run], 0.0),
        plain_line(run),
        *(line for line, _ in panel_lines(run, "", 100)),
    ]
    for line in lines:
        assert "\x1b" not in line
        assert "\x07" not in line
        assert "\n" not in line


@pytest.mark.parametrize(
    ("state", "checkpoints", "code"),
    [
        (RunState.FINISHED, (), 0),
        (RunState.FAILED, (SOUND,), 1),
        (RunState.CRASHED, (SOUND,), 1),
        (RunState.LOST, (), 1),
        (RunState.STOPPED, (SOUND,), 3),
        (RunState.STOPPED, (), 1),
        (RunState.STOPPED, (replace(SOUND, ok=False),), 1),
        (RunState.STOPPED, (replace(SOUND, ok=False), replace(SOUND, ok=None)), 3),
    ],
)
def test_exit_codes(state: RunState, checkpoints: tuple[CheckpointInfo, ...], code: int) -> None:
    ended = replace(BUSY, state=state, checkpoints=checkpoints)
    assert exit_code(ended) == code
    stopped_without = state is RunState.STOPPED and code == 1
    assert exit_code(ended, interrupted=True) == (0 if stopped_without else code)


def test_an_ending_says_what_to_do_next() -> None:
    stopped = replace(BUSY, state=RunState.STOPPED, checkpoints=(SOUND,), log_dir="/r/logs/1")
    text = "\n".join(end_report(stopped)).replace("\u2009", " ")
    assert "step 1204, weights not checked, checksum ok, saved at the stop: /c/a.ckpt" in text
    assert "ltui resume brave-owl-3f2a" in text
    assert "/r/logs/1" in text
    damaged = replace(stopped, checkpoints=(replace(SOUND, ok=False),))
    assert "ltui resume" not in "\n".join(end_report(damaged))


def test_a_program_whose_samples_are_not_known_has_steps_per_second() -> None:
    run = replace(WELL, throughput=Throughput(steps_per_s=17.62))
    assert "17.6 steps/s" in plain_line(run)
    assert "throughput  17.6 steps/s\n" in "\n".join(show_lines(run, 0.0))
    stopped = replace(run, state=RunState.STOPPED)
    assert "steps/s" not in "\n".join(show_lines(stopped, 0.0))


def test_show_counts_ranks_once_and_says_when_a_checkpoint_was_saved() -> None:
    ranks = tuple(replace(rank, state=RankState.ENDED) for rank in BUSY.ranks)
    saved = replace(SOUND, reason="request", size_bytes=785 * 1024)
    run = replace(BUSY, state=RunState.STOPPED, ranks=ranks, checkpoints=(saved,))
    text = "\n".join(show_lines(run, 0.0))
    assert "ranks     2, both ended" in text
    assert "step 1204, weights not checked, checksum ok, saved on request, 785 KiB" in text


def test_plain_lines_come_with_epochs_and_once_a_minute() -> None:
    stream = io.StringIO()
    lines = PlainLines(stream)

    def count_after(run: RunSnapshot, now: float) -> int:
        lines.update(run, now, "")
        return stream.getvalue().count("\n")

    assert count_after(WELL, 0.0) == 1
    assert count_after(replace(WELL, global_step=1205), 5.0) == 1
    assert count_after(replace(WELL, epoch=3), 6.0) == 1, "epochs of seconds are not one line each"
    assert count_after(replace(WELL, epoch=4), PLAIN_EPOCH_S) == 2
    assert count_after(replace(WELL, epoch=4, global_step=1300), 60.0) == 2
    assert count_after(replace(WELL, epoch=4, global_step=1301), 70.0) == 3
    stalled = replace(WELL, epoch=4, global_step=1301, verdicts=(STALL,))
    assert count_after(stalled, 71.0) == 4, "a change of state is said at once"
    waiting = replace(WELL, epoch=4, state=RunState.STOPPING, detail="waiting, 1 s of 60 s")
    assert count_after(waiting, 72.0) == 5
    assert count_after(replace(waiting, detail="waiting, 2 s of 60 s"), 73.0) == 5
    assert count_after(waiting, 300.0) == 5, "the same line again says nothing"


def test_the_first_plain_line_has_no_fractions_of_a_second() -> None:
    assert plain_line(replace(EMPTY, elapsed_s=0.0016)) == "starting"
    assert plain_line(replace(EMPTY, elapsed_s=5.13)) == "5 s  starting"


def test_a_pause_is_not_said_twice() -> None:
    paused = replace(WELL, state=RunState.PAUSED, detail="paused at step 1204")
    assert plain_line(paused).lower().count("paused") == 1
    assert "no room" in plain_line(replace(paused, detail="no room"))


def test_a_pipe_and_a_dumb_terminal_get_plain_lines() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert isinstance(display_for(io.StringIO(), {"TERM": "xterm"}), PlainLines)
    assert isinstance(display_for(Terminal(), {"TERM": "dumb"}), PlainLines)
    assert isinstance(display_for(Terminal(), {}), PlainLines)


def test_columns_line_up() -> None:
    assert columns([("a", "1"), ("bbb", "22")], frozenset({1})) == ["a     1", "bbb  22"]
    assert columns([]) == []


def test_a_script_that_has_not_started_lightning_is_no_unknown_rank() -> None:
    run = replace(WELL, ranks=(RankSnapshot(rank=0, state=RankState.UNKNOWN),))
    assert "the ranks are starting" in plain_line(run)
    assert "unknown" not in plain_line(run)


def test_what_a_run_waits_for_is_said_wherever_it_is_named() -> None:
    waits = "waiting for node 1 of 2 to join, 12 s of 600 s"
    run = RunSnapshot(
        id="calm-owl-0001", name="calm-owl", state=RunState.STARTING, world_size=4, elapsed_s=12.0,
        detail=f"{waits}; on each of them: ltui join a:1 --key-file k",
        nodes=(NodeSnapshot(node=0, name="a"), NodeSnapshot(node=1, name="node 1")),
        ranks=tuple(RankSnapshot(rank=rank, state=RankState.UNKNOWN) for rank in range(2)),
    )  # fmt: skip
    entry = RunEntry(run_dir=RunDir(Path("calm-owl-0001")), summary=summarise(run), snapshot=run)
    assert waits in "\n".join(runs_lines([entry], now=0.0))
    assert run_row(entry, 0.0).note.text == waits
    assert f"4  {waits}" in "\n".join(show_lines(run, now=0.0))
    assert plain_line(run).count(waits) == 1
    dead = replace(run, ranks=(RankSnapshot(rank=0, state=RankState.DEAD),))
    assert "1 rank DEAD" in "\n".join(show_lines(dead, now=0.0))


@pytest.mark.parametrize(
    ("saves", "promised"),
    [
        (True, "stops it with a checkpoint"),
        (False, "ends it by SIGINT, without a checkpoint"),
        (None, "stops it (whether with a checkpoint is known once it trains)"),
    ],
)
def test_only_a_run_that_can_save_is_promised_a_checkpoint(
    saves: bool | None, promised: str
) -> None:
    snapshot = replace(BUSY, saves_checkpoints=saves, stop_signal="SIGINT")
    assert stop_effect(snapshot) == promised
    for text in (stop_progress(snapshot), stop_question(snapshot)):
        promises = "a checkpoint" in text.replace("without a checkpoint", "")
        assert promises is saves or saves is None


def test_a_stop_says_once_which_checkpoint_is_the_newest() -> None:
    bad = CheckpointInfo(path="/c/2", global_step=9, ok=True, weights="NaN")
    run = replace(WELL, state=RunState.STOPPED, checkpoints=(bad,))
    _, newest, advice, *_ = stop_lines(run, ended=True)
    assert newest.startswith("  Newest checkpoint: step 9, NaN weights")
    assert advice == "  There is no checkpoint before the NaN."


@pytest.mark.parametrize("detail", [None, "stopped by SIGTERM; no checkpoint was saved"])
def test_a_stop_says_once_that_there_is_no_checkpoint(detail: str | None) -> None:
    stopped = replace(EMPTY, state=RunState.STOPPED, detail=detail)
    printed = "\n".join(stop_lines(stopped, ended=True))
    assert printed.lower().count("checkpoint") == 1
    assert printed.endswith("t cannot be resumed.")
