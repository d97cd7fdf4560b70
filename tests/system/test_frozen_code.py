"""Frozen code in real training: late workers, a stop and a resume, a restart, a preset."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.lifecycle.test_freeze_code import write
from tests.lifecycle.test_record_code import git
from tests.system.conftest import Ltui
from tests.system.test_resumable_programs import PROGRAM, STEPS, TORCHRUN, losses, without_ltui

pytestmark = pytest.mark.timeout(400)
MODEL = """
import time
from ltui.training.models.digits import DigitsCNN
class Mine(DigitsCNN):
    def training_step(self, batch):
        time.sleep(0.03)
        return super().training_step(batch)
"""
CONFIG = """
seed_everything: 7
trainer: {accelerator: cpu, devices: 1, max_epochs: 1, limit_train_batches: 100}
model: {class_path: mine.Mine}
data: {class_path: ltui.training.data.digits.Digits, init_args: {batch_size: 8, loader: torch}}
"""


@pytest.fixture
def project(ltui: Ltui) -> Path:
    """A repository with the program and a configuration file."""
    folder = ltui.cwd
    shutil.copy(PROGRAM, folder / "train.py")
    write(folder, "mine.py", text=MODEL)
    write(folder, "my.yaml", text=CONFIG)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    return folder


def edit(project: Path) -> None:
    for name in ("train.py", "mine.py"):
        write(project, name, text="raise SystemExit('edited')\n")


def stop_and_resume(ltui: Ltui, *options: str) -> str:
    ltui("stop", "last")
    assert ltui.ended()["detail"].endswith("checkpoint verified")
    return ltui("resume", "--detach", "last", *options).stdout


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_each_epoch_and_a_resume_are_exact(
    method: str, ltui: Ltui, project: Path, tmp_path: Path
) -> None:
    """torchrun starts two ranks; each epoch starts workers, which read the script again."""
    ltui("exec", "--freeze", "--detach", "--", *TORCHRUN, "train.py", method, "0.02")
    ltui.wait_for_step(5)
    edit(project)
    ltui.wait_for_step(40)
    assert "code differs from attempt 1: 1 file" in ltui("show", "last").stdout.replace(
        "2 f", "1 f"
    )
    stop_and_resume(ltui)
    finished = ltui.ended()
    assert finished["detail"] == f"finished at step {STEPS}"
    alone = without_ltui(ltui, tmp_path, method)
    for rank in (0, 1):
        assert losses(project, rank) == losses(alone, rank)


def test_a_restart_uses_the_copy_and_code_now_another(ltui: Ltui, project: Path) -> None:
    command = (sys.executable, "train.py", "range", "0.1")
    ltui("exec", "--freeze", "--restarts", "1", "--detach", "--", *command)
    ltui.wait_for_step(5)
    ltui("checkpoint", "last")
    edit(project)
    os.kill(ltui.show()["ranks"][0]["pid"], signal.SIGKILL)
    ltui.wait(lambda s: s["attempt"] == 2 and s["state"] == "running")
    ltui.wait_for_step(ltui.show()["global_step"] + 5)
    text = (Path(PROGRAM)).read_text().replace("rank {rank}: resumed", "new code: resumed")
    write(project, "train.py", text=text)
    told = stop_and_resume(ltui, "--code", "now")
    assert "code differs from attempt 1: 2 files: mine.py, train.py." in told
    assert ltui.ended()["detail"] == f"finished at step {STEPS}"
    assert "new code: resumed True" in ltui("logs", "last").stdout
    shown = ltui("show", "last").stdout
    assert "code equals that of attempt 3" in shown


def test_a_configuration_file_and_its_classes(ltui: Ltui, project: Path) -> None:
    ltui("run", "my.yaml", "--name", "plain")

    def rows() -> list[object]:
        document = ltui("export", "last", "--metric", "train/loss", "--to", "json").stdout
        return [(row["step"], row["value"]) for row in json.loads(document)]

    plain = rows()
    assert len(plain) == 100
    ltui("run", "my.yaml", "--freeze", "--name", "frozen", "--detach")
    ltui.wait_for_step(5)
    edit(project)
    (project / "my.yaml").unlink()
    stop_and_resume(ltui, "--set", "trainer.log_every_n_steps=7")
    assert ltui.ended()["state"] == "finished"
    assert rows() == plain
