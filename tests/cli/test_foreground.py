"""A run in the foreground, as a process: what is shown, what Ctrl-C does, what it returns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Ltui
from tests.cli.terminal import Terminal
from tests.ltui_command import LTUI
from tests.waiting import wait_for

KEYS = [
    "id",
    "name",
    "state",
    "attempt",
    "supervisor_pid",
    "world_size",
    "epoch",
    "global_step",
    "max_steps",
    "metrics",
    "throughput",
    "ranks",
    "gpus",
    "verdicts",
    "checkpoints",
]
SLEEPER = "import time\nprint('began', flush=True)\nwhile True: time.sleep(0.1)\n"
LOOP = """\
import torch
from lightning.pytorch import LightningModule, Trainer

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

if __name__ == "__main__":
    data = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4)
    trainer = Trainer(
        max_epochs=100_000, accelerator="cpu", devices=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Model(), data)
"""


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """``terminal("run", "quickstart")`` is the command line on a terminal of its own."""
    opened: list[Terminal] = []

    def open_terminal(*words: str) -> Terminal:
        argv = [*LTUI, *words]
        opened.append(Terminal(argv, tmp_path, os.environ))
        return opened[-1]

    yield open_terminal
    for each in opened:
        each.close()


def show(ltui: Ltui) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(ltui("show", "last", "--json").stdout)
    return document


def test_a_finished_command_is_0_and_plain_into_a_pipe(ltui: Ltui) -> None:
    done = ltui("exec", "--name", "good", "--", "sh", "-c", "echo hello; sleep 1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished" in done.stdout
    assert "\x1b" not in done.stdout
    assert show(ltui)["state"] == "finished"
    assert ltui("logs", "good").stdout == "hello\n"


def test_a_failed_command_is_1_and_says_how_it_ended(ltui: Ltui) -> None:
    done = ltui("exec", "--", sys.executable, "-c", "raise SystemExit('the disk is on fire')")
    assert done.returncode == 1
    assert "the disk is on fire" in done.stdout
    assert "failed" in done.stdout
    assert "ltui logs" in done.stdout
    assert show(ltui)["state"] == "failed"


def test_logs_are_safe_on_a_terminal_and_exact_in_a_pipe(
    ltui: Ltui, terminal: Callable[..., Terminal]
) -> None:
    words = ["printf", r"\033]0;owned\007\033[31mred\033[0m\ntail without end"]
    assert ltui("exec", "--", *words).returncode == 0
    assert ltui("logs", "last").stdout == "\x1b]0;owned\x07\x1b[31mred\x1b[0m\ntail without end\n"
    shown = terminal("logs", "last")
    assert shown.wait() == 0
    assert shown.drawn == "red\r\ntail without end\r\n"


def test_logs_follow_until_the_run_ends(ltui: Ltui) -> None:
    script = "for i in 1 2 3; do echo line $i; sleep 1; done; printf end"
    assert ltui("exec", "--detach", "--", "sh", "-c", script).returncode == 0
    followed = ltui("logs", "last", "--follow")
    assert followed.returncode == 0
    assert followed.stdout == "line 1\nline 2\nline 3\nend\n"
    assert show(ltui)["state"] == "finished"
    for words, said in (
        (["--attempt", "9"], "--attempt 9: there are no logs of this attempt. Known attempts: 1."),
        (["--rank", "4"], "--rank 4: there is no log of this rank."),
    ):
        done = ltui("logs", "last", *words)
        assert done.returncode == 2
        assert said in done.stderr


def test_show_and_runs_print_one_document_each(ltui: Ltui) -> None:
    assert ltui("exec", "--", "true").returncode == 0
    snapshot = show(ltui)
    for key in KEYS:
        assert key in snapshot
    done = ltui("runs", "--json")
    (head,) = json.loads(done.stdout)
    labels = {key: head.pop(key) for key in ("tags", "group", "note", "star")}
    assert labels == {"tags": [], "group": "", "note": "", "star": False}
    assert head.items() <= snapshot.items()
    assert head["state_word"] == "finished"
    assert done.stderr == ""
    assert "finished" in ltui("show", "last").stdout
    assert snapshot["id"] in ltui("runs").stdout


@pytest.mark.usefixtures("ends_its_runs")
def test_the_second_ctrl_c_kills(ltui: Ltui, terminal: Callable[..., Terminal]) -> None:
    shown = terminal("exec", "--plain", "--", sys.executable, "-c", SLEEPER)
    shown.wait_for("starting")
    assert "checkpoint is known once it trains" in shown.drawn
    shown.press("\x03")
    shown.wait_for("Ctrl-C: stopping")
    shown.press("\x03")
    assert shown.wait() == 1
    assert show(ltui)["state"] in ("stopped", "crashed", "failed")


@pytest.mark.usefixtures("ends_its_runs")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_ending_the_watcher_leaves_the_run(ltui: Ltui, tmp_path: Path, number: int) -> None:
    watcher = subprocess.Popen(
        [*LTUI, "exec", "--", sys.executable, "-c", SLEEPER],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert watcher.stdout is not None
        while "starting" not in (line := watcher.stdout.readline()):
            assert line, "it ended too early"
        watcher.send_signal(number)
        rest = watcher.communicate(timeout=200)[0]
        assert "keeps running. To watch it: ltui attach" in rest
        assert watcher.returncode == 128 + number
        assert show(ltui)["state"] in ("starting", "running")
    finally:
        watcher.kill()
        watcher.wait()
        if watcher.stdout:
            watcher.stdout.close()


@pytest.mark.usefixtures("ends_its_runs")
def test_a_closed_terminal_leaves_the_run(ltui: Ltui, terminal: Callable[..., Terminal]) -> None:
    shown = terminal("exec", "--plain", "--", sys.executable, "-c", SLEEPER)
    shown.wait_for("starting")
    shown.hang_up()
    assert shown.wait() != 0
    assert show(ltui)["state"] in ("starting", "running")


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.usefixtures("ends_its_runs")
def test_a_training_from_start_to_resume(
    ltui: Ltui, tmp_path: Path, terminal: Callable[..., Terminal]
) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    shown = terminal("exec", "--plain", "--name", "loop", "--", sys.executable, "train.py")
    shown.wait_for("train/loss")
    assert "already" not in ltui("pause", "loop").stdout
    assert show(ltui)["state"] == "paused"
    refused = ltui("resume", "loop", "--detach")
    assert refused.returncode == 2
    assert "cannot be resumed" in refused.stderr
    assert " continued at step" in ltui("continue", "loop").stdout
    saved = ltui("checkpoint", "loop")
    assert saved.returncode == 0
    assert "saved a checkpoint at step" in saved.stdout
    rows = ("export", "loop", "--metric", "throughput/*")
    wait_for(lambda: len(ltui(*rows).stdout.splitlines()) > 2)  # measured twice
    shown.press("\x03")
    assert shown.wait() == 3, shown.drawn
    assert "Ctrl-C: stopping with a checkpoint" in shown.drawn
    assert "ltui resume loop" in shown.drawn
    stopped = show(ltui)
    assert stopped["state"] == "stopped"
    assert any(
        c["global_step"] == stopped["global_step"] and c["ok"] for c in stopped["checkpoints"]
    )

    written = ltui("export", "last", "--metric", "train/*", "-o", "out.csv")
    assert written.returncode == 0
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert lines[0] == "metric,step,epoch,time,rank,value,first_step,min,max,count"
    assert len(lines) > stopped["global_step"]
    rates = ltui("export", "last", "--metric", "throughput/*").stdout.splitlines()
    assert len(rates) > 2
    assert rates[-1].startswith("throughput/samples_per_s,")
    epochs = dict(line.split(",")[1:3] for line in lines[1:])
    assert all(epochs[step] == epoch for _, step, epoch, *_ in (r.split(",") for r in rates[1:]))
    rows = json.loads(ltui("export", "last", "--format", "json").stdout)
    assert set(rows[0]) == set(lines[0].split(","))
    unknown = ltui("export", "last", "--metric", "train/los")
    assert unknown.returncode == 2
    assert "Did you mean `train/loss`?" in unknown.stderr
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".out.csv")]

    detached = ltui("resume", "last", "--detach")
    assert detached.returncode == 0
    assert f"ltui attach {stopped['id']}" in detached.stdout
    assert show(ltui)["attempt"] == 2
    busy = ltui("delete", "last")
    assert busy.returncode == 2
    assert "Stop it first" in busy.stderr
    assert ltui("stop", "last", "--kill").returncode == 0
    assert ltui("delete", "last").returncode == 0
    assert json.loads(ltui("runs", "--json").stdout) == []
