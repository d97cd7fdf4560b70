"""A run as text: nothing invented where a value is missing, nothing hostile let through."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from ltui.app.foreground import exit_code
from ltui.app.progress import PLAIN_EVERY_S, PlainLines, display_for, panel_lines, plain_line
from ltui.app.summary import columns, ending_lines, runs_lines, show_lines
from ltui.training.run.snapshot import (
    CheckpointInfo,
    MetricValue,
    RankSnapshot,
    RankState,
    RunSnapshot,
    RunState,
    Throughput,
    Verdict,
)

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
SOUND = CheckpointInfo(path="/c/a.ckpt", global_step=1204, ok=True, reason="stop")
HOSTILE = "\x1b]0;owned\x07\x1b[2J[bold]x[/bold]\nsecond"


def test_what_is_not_known_is_not_shown_as_a_number() -> None:
    text = "\n".join([*show_lines(EMPTY, 0.0), *runs_lines([EMPTY], 0.0), plain_line(EMPTY)])
    assert "0" not in text.replace("brave-owl-3f2a", "")
    assert "None" not in text
    assert "n/a" in text


def test_a_busy_run_in_one_line() -> None:
    line = plain_line(BUSY).replace("\u2009", " ")
    for part in (
        "running",
        "epoch 3/30",
        "step 1 204/2 930",
        "train/loss 0.8421",
        "val/acc 0.9510",
        "31.4 k samples/s",
        "4 % waiting for data",
        "1 ok, 1 stalled",
    ):
        assert part in line
    assert "lr-Adam" not in line


def test_a_stall_is_said_until_it_ends() -> None:
    stalled = Verdict(kind="stall", level="stalled", cause="rank 1 waits", remedy="Look at it.")
    run = replace(BUSY, verdicts=(stalled,))
    assert "STALLED: rank 1 waits  Look at it." in plain_line(run)
    assert "STALLED" in "\n".join(line for line, _ in panel_lines(run, "", 100))
    assert "STALLED" not in plain_line(replace(BUSY, verdicts=(replace(stalled, ended=5.0),)))


def test_the_panel_names_every_rank_up_to_eight_and_counts_the_rest() -> None:
    ranks = tuple(RankSnapshot(rank=n, state=RankState.OK) for n in range(12))
    lines = [line for line, _ in panel_lines(replace(BUSY, ranks=ranks), "hint", 100)]
    assert sum(line.startswith("r") for line in lines) == 8
    assert "and 4 ranks ok" in lines
    assert lines[-1] == "hint"


def test_nothing_that_a_run_wrote_reaches_the_terminal_as_a_command() -> None:
    run = replace(
        BUSY,
        name=HOSTILE,
        preset=HOSTILE,
        detail=HOSTILE,
        history_note=HOSTILE,
        gpu_note=HOSTILE,
        metrics={
            HOSTILE: MetricValue(last=1.0, step=1),
            f"val{HOSTILE}": MetricValue(last=1.0, step=1),
        },
        ranks=(RankSnapshot(rank=0, note=HOSTILE, phase="x"),),
        verdicts=(Verdict(kind="k", level="stalled", cause=HOSTILE, remedy=HOSTILE),),
        checkpoints=(replace(SOUND, path=HOSTILE),),
        state=RunState.STOPPED,
    )
    lines = [
        *show_lines(run, 0.0),
        *ending_lines(run),
        *runs_lines([run], 0.0),
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
    assert exit_code(replace(BUSY, state=state, checkpoints=checkpoints)) == code


def test_an_ending_says_what_to_do_next() -> None:
    stopped = replace(BUSY, state=RunState.STOPPED, checkpoints=(SOUND,), log_dir="/r/logs/1")
    text = "\n".join(ending_lines(stopped)).replace("\u2009", " ")
    assert "step 1 204, verified, stop: /c/a.ckpt" in text
    assert "ltui resume brave-owl-3f2a" in text
    assert "/r/logs/1" in text
    damaged = replace(stopped, checkpoints=(replace(SOUND, ok=False),))
    assert "ltui resume" not in "\n".join(ending_lines(damaged))


def test_plain_lines_come_at_changes_and_every_few_seconds() -> None:
    stream = io.StringIO()
    lines = PlainLines(stream)
    lines.show(BUSY, 0.0, "")
    lines.show(replace(BUSY, global_step=1205), 1.0, "")
    assert stream.getvalue().count("\n") == 1
    lines.show(replace(BUSY, epoch=3), 1.5, "")
    assert stream.getvalue().count("\n") == 2
    lines.show(replace(BUSY, epoch=3, global_step=1300), 1.5 + PLAIN_EVERY_S, "")
    assert stream.getvalue().count("\n") == 3
    lines.show(replace(BUSY, epoch=3, global_step=1300), 1.5 + 3 * PLAIN_EVERY_S, "")
    assert stream.getvalue().count("\n") == 3, "the same line again says nothing"


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
