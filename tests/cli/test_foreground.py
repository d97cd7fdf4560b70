"""A run in the foreground, as a process: what is shown, what Ctrl-C does, what it returns; and the
dashboard that it opens on a terminal."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ltui.app.foreground.run_in_dashboard import ForegroundApp
from ltui.app.interrupt_signals import ReceivedSignals
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.history_writer import StoreWriter
from ltui.training.store.run_directory import RunDir
from tests.cli.conftest import Ltui, OpenTerminal
from tests.ltui_command import LTUI, answer
from tests.store.histories import begin, run_dir, snapshot
from tests.waiting import wait_for

KEYS = """id name state attempt supervisor_pid world_size epoch global_step max_steps metrics
throughput ranks gpus verdicts checkpoints""".split()  # noqa: SIM905 - a list of words reads better so
SLEEPER = "import time\nprint('began', flush=True)\nwhile True: time.sleep(0.1)\n"
ALTERNATE_SCREEN = "\x1b[?1049h"
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


def show(ltui: Ltui) -> dict[str, Any]:
    document: dict[str, Any] = answer(ltui("show", "last", "--json").stdout)
    return document


def test_a_finished_command_is_0_and_plain_into_a_pipe(ltui: Ltui) -> None:
    done = ltui("exec", "--name", "good", "--", "sh", "-c", "echo hello; sleep 0.5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished" in done.stdout
    assert "\x1b" not in done.stdout
    assert ltui("logs", "good").stdout == "hello\n"
    assert "finished" in ltui("show", "last").stdout
    assert "good" in ltui("runs").stdout
    # `show` and `runs` print one document each.
    document = show(ltui)
    assert set(KEYS) <= document.keys()
    done = ltui("runs", "--json")
    (head,) = answer(done.stdout)
    labels = {key: head.pop(key) for key in ("tags", "group", "note", "star")}
    assert labels == {"tags": [], "group": "", "note": "", "star": False}
    assert head.items() <= document.items()
    assert head["state"] == head["state_word"] == "finished"
    assert done.stderr == ""


def test_a_failed_command_is_1_and_says_how_it_ended(ltui: Ltui, command: Ltui) -> None:
    done = ltui("exec", "--", "sh", "-c", "echo the disk is on fire >&2; exit 1")
    assert done.returncode == 1
    assert "the disk is on fire" in done.stdout
    assert "failed" in done.stdout
    assert "ltui logs" in done.stdout
    assert show(command)["state"] == "failed"


def test_logs_are_safe_on_a_terminal_and_exact_in_a_pipe(
    ltui: Ltui, terminal: OpenTerminal
) -> None:
    words = ["printf", r"\033]0;owned\007\033[31mred\033[0m\ntail without end"]
    assert ltui("exec", "--", *words).returncode == 0
    assert ltui("logs", "last").stdout == "\x1b]0;owned\x07\x1b[31mred\x1b[0m\ntail without end\n"
    shown = terminal("logs", "last")
    assert shown.wait() == 0
    assert shown.drawn == "red\r\ntail without end\r\n"


def test_logs_follow_until_the_run_ends(ltui: Ltui, command: Ltui) -> None:
    script = "for i in 1 2 3; do echo line $i; sleep 1; done; printf end"
    assert ltui("exec", "--detach", "--", "sh", "-c", script).returncode == 0
    followed = ltui("logs", "last", "--follow")
    assert followed.returncode == 0
    assert followed.stdout == "line 1\nline 2\nline 3\nend\n"
    assert show(command)["state"] == "finished"
    for words, said in (
        (["--attempt", "9"], "--attempt 9: there are no logs of this attempt. Known attempts: 1."),
        (["--rank", "4"], "--rank 4: there is no log of this rank."),
    ):
        done = command("logs", "last", *words)
        assert done.returncode == 2
        assert said in done.stderr


@pytest.mark.usefixtures("ends_its_runs")
def test_plain_prints_lines_on_a_terminal_and_the_second_ctrl_c_kills(
    command: Ltui, terminal: OpenTerminal
) -> None:
    shown = terminal("exec", "--plain", "--", sys.executable, "-c", SLEEPER)
    shown.wait_for("starting")
    assert "started. To watch it: ltui attach" in shown.drawn
    assert "checkpoint is known once it trains" in shown.drawn
    shown.press("\x03")
    shown.wait_for("Ctrl-C: stopping")
    shown.press("\x03")
    assert shown.wait() == 1
    assert ALTERNATE_SCREEN not in shown.drawn
    assert show(command)["state"] in ("stopped", "crashed", "failed")


@pytest.mark.usefixtures("ends_its_runs")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_ending_the_watcher_leaves_the_run(command: Ltui, tmp_path: Path, number: int) -> None:
    with subprocess.Popen(
        [*LTUI, "exec", "--", sys.executable, "-c", SLEEPER],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as watcher:
        try:
            assert watcher.stdout is not None
            while "starting" not in (line := watcher.stdout.readline()):
                assert line, "it ended too early"
            watcher.send_signal(number)
            rest = watcher.communicate(timeout=200)[0]
        finally:
            watcher.kill()
    assert "keeps running. To watch it: ltui attach" in rest
    assert watcher.returncode == 128 + number
    assert show(command)["state"] in ("starting", "running")


@pytest.mark.usefixtures("ends_its_runs")
def test_a_closed_terminal_leaves_the_run(command: Ltui, terminal: OpenTerminal) -> None:
    shown = terminal("exec", "--plain", "--", sys.executable, "-c", SLEEPER)
    shown.wait_for("starting")
    shown.hang_up()
    assert shown.wait() != 0
    assert show(command)["state"] in ("starting", "running")


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.usefixtures("ends_its_runs")
def test_a_training_from_start_to_resume(
    ltui: Ltui, tmp_path: Path, terminal: OpenTerminal
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
    assert answer(ltui("runs", "--json").stdout) == []


def ended_run(folder: Path) -> RunDir:
    found = run_dir(folder)
    store = StoreWriter(found.db_path)
    begin(store)
    store.write_snapshot(snapshot(state=RunState.FINISHED, detail="finished at step 3"))
    store.close()
    return found


class Opened:
    """The application over a run that has ended, with the requests that it sent."""

    def __init__(self, folder: Path, close_after_s: float = 1000) -> None:
        self.requests: list[dict[str, Any]] = []
        self.signals = ReceivedSignals()
        self.app = ForegroundApp(
            ended_run(folder),
            self.signals,
            request=lambda _, request: self.requests.append(request),
            close_after_s=close_after_s,
        )

    async def until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not happened():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)

    async def until_closed(self) -> None:
        await self.until(lambda: not self.app.is_running)


async def test_a_signal_of_a_launcher_stops_and_a_persons_signal_does_not(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    async with opened.app.run_test():
        opened.signals._interrupt()
        await opened.until(lambda: opened.signals.interrupts == 0)
        # The run has ended, so there is nothing to ask.
        await opened.until_closed()
        assert opened.requests == []
    opened = Opened(tmp_path / "launched")
    async with opened.app.run_test():
        opened.signals._stop()
        await opened.until(lambda: bool(opened.requests))
        assert opened.requests[0]["cmd"] == "stop"
        opened.signals.leave = signal.SIGTERM
        await opened.until_closed()


async def test_it_closes_when_the_run_has_ended(tmp_path: Path) -> None:
    opened = Opened(tmp_path, close_after_s=0.5)
    async with opened.app.run_test():
        await opened.until_closed()


async def test_a_key_keeps_it_open_after_the_end(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    async with opened.app.run_test() as pilot:
        await opened.until(lambda: opened.app._closes_at is not None)
        await pilot.press("x")
        await opened.until(lambda: opened.app._closes_at == float("inf"))
        await pilot.press("q")
        await opened.until_closed()


@pytest.mark.usefixtures("ends_its_runs")
def test_a_run_on_a_terminal_opens_the_dashboard_and_leaving_it_leaves_the_run(
    command: Ltui, terminal: OpenTerminal
) -> None:
    shown = terminal("exec", "--", "sleep", "600")
    shown.wait_for(ALTERNATE_SCREEN)
    assert "started. To watch it: ltui attach" in shown.drawn.split(ALTERNATE_SCREEN)[0]
    shown.wait_for("sleep 600")
    shown.press("q")
    assert shown.wait() == 0
    assert "keeps running. To watch it: ltui attach" in shown.drawn
    assert show(command)["state"] in ("running", "starting")


@pytest.mark.usefixtures("ends_its_runs")
def test_ctrl_c_in_the_dashboard_asks_before_it_stops_the_run(terminal: OpenTerminal) -> None:
    shown = terminal("exec", "--", "sleep", "600")
    shown.wait_for(ALTERNATE_SCREEN)
    shown.wait_for("sleep 600")
    shown.press("\x03")
    shown.wait_for("close, training continues")
    shown.press("\x03")
    time.sleep(1.0)  # a question accepts no answer in its first half second
    shown.press("y")
    shown.wait_for("The run has ended")
    shown.press("q")  # by itself it closes after ten seconds
    assert shown.wait() == 1
    assert "ltui logs" in shown.drawn or "stopped" in shown.drawn
