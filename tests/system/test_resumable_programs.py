"""``ltui exec`` of programs that have told ltui how to save: stop, resume, and what goes wrong."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.system.conftest import SCRIPTS, Ltui
from tests.waiting import wait_for

PROGRAM = str(SCRIPTS / "resumable_program.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
STEPS = 120

pytestmark = pytest.mark.timeout(400)


def start(ltui: Ltui, kind: str, *, ranks: int = 2) -> None:
    launcher = TORCHRUN if ranks == 2 else (sys.executable,)
    ltui("exec", "--detach", "--", *launcher, PROGRAM, kind, "0.03")


def losses(folder: Path, rank: int) -> list[str]:
    return (folder / f"losses-{rank}.txt").read_text(encoding="utf-8").splitlines()


def without_ltui(ltui: Ltui, tmp_path: Path, kind: str) -> Path:
    """Run the program alone, with its lines of ``ltui_rank``. Return the folder of its losses."""
    folder = tmp_path / "alone"
    folder.mkdir()
    subprocess.run(
        [*TORCHRUN, PROGRAM, kind, "0"],
        cwd=folder,
        env=ltui.environment,
        capture_output=True,
        check=True,
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["epochs", "forkserver", "range", "iterable"])
def test_a_resumed_program_repeats_no_step_and_loses_none(
    ltui: Ltui, tmp_path: Path, kind: str
) -> None:
    alone = without_ltui(ltui, tmp_path, kind)
    start(ltui, kind)
    for step in (10, 60):
        ltui.wait_for_step(step)
        ltui("stop", "last")
        stopped = ltui.ended()
        assert stopped["state"] == "stopped"
        assert stopped["detail"].endswith("checkpoint verified")
        assert stopped["program"] == "PyTorch DDP"
        ltui("resume", "--detach", "last")
    finished = ltui.ended()
    assert finished["detail"] == f"finished at step {STEPS}"
    for rank in (0, 1):
        assert len(losses(ltui.cwd, rank)) == STEPS
        assert losses(ltui.cwd, rank) == losses(alone, rank)
        assert ltui.steps_on_record(rank) == list(range(1, STEPS + 1)), "a logged loss is missing"
    assert finished["script_checkpoints"] == [], "the program's own part of a checkpoint"


def test_a_signal_and_a_request_save_a_program_in_one_process(ltui: Ltui) -> None:
    start(ltui, "epochs", ranks=1)
    ltui.wait_for_step(5)
    saved = ltui("checkpoint", "last")
    assert "saved a checkpoint at step" in saved.stdout
    rank = psutil.Process(ltui.wait_for_step(15)["ranks"][0]["pid"])
    # As SLURM does, which signals the workers of the loader, too.
    workers = wait_for(rank.children, wanted=bool)
    for process in (*workers, rank):
        process.send_signal(signal.SIGTERM)
    stopped = ltui.ended()
    assert (stopped["state"], stopped["ranks"][0]["state"]) == ("stopped", "ended")
    assert [c["reason"] for c in stopped["checkpoints"]] == ["request", "stop"]
    assert stopped["checkpoints"][1]["global_step"] == stopped["global_step"]
    ltui("resume", "--detach", "last")
    assert ltui.ended()["detail"] == f"finished at step {2 * STEPS}"
    assert len(losses(ltui.cwd, 0)) == 2 * STEPS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("refuses", "OSError: this program cannot save today"),
        ("writes-nothing", "the program's save function wrote no file"),
    ],
)
def test_a_program_that_cannot_save_trains_on(ltui: Ltui, kind: str, reason: str) -> None:
    start(ltui, kind)
    step = ltui.wait_for_step(5)["global_step"]
    failed = ltui("stop", "last", check=None)
    assert failed.returncode != 0
    assert reason in failed.stdout + failed.stderr
    ltui.wait_for_step(step + 10)
    finished = ltui.ended()
    assert finished["detail"] == f"finished at step {STEPS}"
    assert finished["checkpoints"] == []
    assert not list(Path(finished["run_dir"], "checkpoints").iterdir()), "a failed save left files"


@pytest.mark.slow
def test_a_load_that_raises_ends_the_resume_and_keeps_the_checkpoint(ltui: Ltui) -> None:
    program = ltui.cwd / "program.py"
    text = Path(PROGRAM).read_text(encoding="utf-8")
    program.write_text(text, encoding="utf-8")
    ltui("exec", "--detach", "--", *TORCHRUN, str(program), "range", "0.03")
    ltui.wait_for_step(5)
    ltui("stop", "last")
    step = ltui.ended()["global_step"]
    program.write_text(text.replace('self.kind == "bad-load"', "True"), encoding="utf-8")
    ltui("resume", "--detach", "last")
    failed = ltui.ended()
    assert failed["state"] == "failed"
    assert "ValueError: the model has another shape" in failed["detail"]
    program.write_text(
        text.replace("ltui.on_checkpoint(training.save, training.load)", "False"), encoding="utf-8"
    )
    ltui("resume", "--detach", "last")
    begun = ltui.ended()
    assert begun["state"] == "finished"
    texts = [caution["what"] for caution in begun["cautions"]]
    assert f"The program does not load step-{step:08d}-stop.ckpt: it starts anew." in texts
    assert [c["global_step"] for c in begun["checkpoints"]] == [step]


@pytest.mark.slow
def test_a_trainer_of_hugging_face_is_stopped_and_resumed_unchanged(
    ltui: Ltui, tmp_path: Path
) -> None:
    ltui.environment["PYTHONPATH"] = str(SCRIPTS / "stand_in")
    script = str(SCRIPTS / "hugging_face.py")
    alone = subprocess.run(
        [*TORCHRUN, script, "12", "0"],
        cwd=tmp_path,
        env=ltui.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    ltui("exec", "--detach", "--", *TORCHRUN, script, "12", "0.05")
    ltui.wait_for_step(3)
    # The last step of an epoch ends after the hooks of the epoch's end.
    ltui("stop", "last", "--at-step", "40")
    assert ltui.ended()["detail"] == "stopped at step 40, checkpoint verified"
    ltui("resume", "--detach", "last")
    ltui.wait_for_step(45)
    ltui("stop", "last")
    stopped = ltui.ended()
    assert stopped["program"] == "Hugging Face Trainer DDP"
    assert (stopped["max_steps"], stopped["max_epochs"]) == (120, 12)
    assert stopped["epoch"] == stopped["global_step"] // 10
    ltui("resume", "--detach", "last")
    finished = ltui.ended()
    assert finished["detail"] == "finished at step 120"
    # Not by lines: both ranks write to one pipe, a text and its end of line separately.
    weights = set(re.findall(r"step 120, weights [-+.\de]+", alone.stdout))
    assert len(weights) == 1
    assert weights.pop() in ltui("logs", "last").stdout
    for rank in (0, 1):
        calls = f"calls-{rank}.txt"
        assert (ltui.cwd / calls).read_text() == (tmp_path / calls).read_text()


@pytest.mark.slow
def test_a_program_is_restarted_after_a_crash_from_its_checkpoint(ltui: Ltui) -> None:
    """torchrun ends the other rank by SIGTERM, which is no request to stop."""
    command = (*TORCHRUN, PROGRAM, "epochs", "0.05")
    ltui("exec", "--detach", "--restarts", "1", "--", *command)
    ltui.wait_for_step(5)
    ltui("checkpoint", "last")
    (saved,) = ltui.show()["checkpoints"]
    os.kill(ltui.wait_for_step(saved["global_step"] + 3)["ranks"][1]["pid"], signal.SIGKILL)
    restarted = ltui.wait(lambda s: s["attempt"] == 2 and (s["global_step"] or 0) > 0)
    assert "was killed by SIGKILL" in restarted["restarted_because"]
    finished = ltui.ended()
    assert finished["detail"] == f"finished at step {STEPS}"
    for rank in (0, 1):
        written = [int(line.split()[0]) for line in losses(ltui.cwd, rank)]
        again = written.index(saved["global_step"] + 1, saved["global_step"] + 1)
        assert written[again:] == list(range(saved["global_step"] + 1, STEPS + 1))
        # The same steps have the same losses in both attempts.
        assert len(set(losses(ltui.cwd, rank))) == STEPS
