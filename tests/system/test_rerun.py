"""``ltui rerun``: steps of real runs executed again, with real ranks, checkpoints and faults."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ltui.training.store.history_reader import RunStore
from ltui.training.store.run_directory import RunDir
from tests.ltui_command import answer
from tests.nodes.addresses import free_port_pair
from tests.system.conftest import SCRIPTS, Ltui
from tests.waiting import wait_for

PROGRAM = str(SCRIPTS / "faulty_program.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")

pytestmark = pytest.mark.timeout(600)


def content(folder: Path) -> dict[str, str]:
    """The digest of each file in a folder. SQLite makes files for those that read a history."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if not path.name.startswith("run.db-")
    }


def trained(ltui: Ltui, *command: str) -> dict[str, Any]:
    """A run that has saved a checkpoint on the way and has finished."""
    ltui("exec", "--detach", "--", *command)
    ltui.wait_for_step(8)
    ltui("checkpoint", "last")
    run = ltui.ended()
    assert run["state"] == "finished"
    return run


def rerun(ltui: Ltui, *words: str, code: int) -> dict[str, Any]:
    done = ltui("rerun", "last", *words, "--json", check=code, timeout=400)
    result: dict[str, Any] = answer(done.stdout)
    assert result["is_complete"], result["detail"]
    result |= result.pop("start")
    ltui.wait_until_alone()
    return result


def fault(ltui: Ltui, text: str) -> None:
    (ltui.cwd / "fault").write_text(text, encoding="utf-8")


@pytest.mark.parametrize("kind", ["ddp", pytest.param("lightning", marks=pytest.mark.slow)])
def test_equal_steps_differences_and_nans_are_told_apart(ltui: Ltui, kind: str) -> None:
    """The run and the files of the program stay as they are, byte for byte."""
    launcher = TORCHRUN if kind == "ddp" else (sys.executable,)
    run = trained(ltui, *launcher, PROGRAM, kind, "60", "0.05")
    saved = run["checkpoints"][0]["global_step"]
    first, last = saved + 2, saved + 6
    folder, project = content(Path(run["run_dir"])), content(ltui.cwd)
    steps = "--from", str(first), "--to", str(last)

    equal = rerun(ltui, *steps, code=0)
    assert equal["started_after"] == saved
    assert (equal["comparison"]["steps"], equal["comparison"]["first"]) == (5, None)
    assert content(ltui.cwd) == project

    fault(ltui, f"differs {first + 2} 1")
    different = rerun(ltui, *steps, code=1)["comparison"]
    assert different["first"]["step"] == first + 2
    assert different["first"]["rank"] == 1

    fault(ltui, f"nan {first + 1} 1")
    found = rerun(ltui, *steps, "--with", "nan", code=1)["nan"][0]
    module = "1" if kind == "ddp" else "head"
    assert (found["at_step"], found["rank"], found["module"]) == (first + 1, 1, module)
    assert (found["module_class"], found["tensor"]) == ("Head", "output 0")

    assert content(Path(run["run_dir"])) == folder
    assert [line["id"] for line in ltui.json("runs")] == [run["id"]]
    shadows = ltui.home / "reruns" / "runs"
    assert not list(shadows.glob("*/checkpoints/*"))


@pytest.mark.slow
def test_hugging_face_repeats_its_losses(ltui: Ltui) -> None:
    ltui.environment["PYTHONPATH"] = str(SCRIPTS / "stand_in")
    run = trained(ltui, *TORCHRUN, str(SCRIPTS / "hugging_face.py"), "4", "0.05")
    saved = run["checkpoints"][0]["global_step"]
    result = rerun(ltui, "--from", str(saved + 1), "--to", str(saved + 5), code=0)
    assert (result["started_after"], result["comparison"]["steps"]) == (saved, 5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "lightning", "hugging_face"])
def test_steps_of_several_batches_repeat_their_losses(ltui: Ltui, kind: str) -> None:
    launcher = (sys.executable,) if kind == "lightning" else TORCHRUN
    words: tuple[str, ...] = PROGRAM, kind, "30", "0.05", "3"
    if kind == "hugging_face":
        ltui.environment["PYTHONPATH"] = str(SCRIPTS / "stand_in")
        words = str(SCRIPTS / "hugging_face.py"), "3", "0.05", "3"
    saved = trained(ltui, *launcher, *words)["checkpoints"][0]["global_step"]
    result = rerun(ltui, "--from", str(saved + 1), "--to", str(saved + 4), code=0)
    assert (result["started_after"], result["comparison"]["steps"]) == (saved, 4)


@pytest.mark.slow
def test_a_program_without_checkpoints_begins_at_the_beginning_with_frozen_code(ltui: Ltui) -> None:
    script = ltui.cwd / "train.py"
    text = Path(PROGRAM).read_text(encoding="utf-8")
    script.write_text(text, encoding="utf-8")
    ltui("exec", "--detach", "--freeze", "--", sys.executable, "train.py", "untracked", "12", "0.0")
    assert ltui.ended()["state"] == "finished"
    script.write_text("raise SystemExit('other code')\n", encoding="utf-8")
    result = rerun(ltui, "--from", "1", "--to", "3", code=0)
    assert (result["started_after"], result["comparison"]["steps"]) == (0, 3)
    assert "frozen code of attempt 1 (since then changed: train.py)" in result["code"]
    script.unlink()
    memory = rerun(ltui, "--from", "2", "--to", "3", "--with", "memory", code=0)["profiles"][0]
    assert memory["operators"][0]["amount"] > 0
    assert json.loads(Path(memory["path"]).read_text(encoding="utf-8"))["traceEvents"]
    profile = rerun(ltui, "--from", "1", "--to", "2", "--with", "profile", code=0)["profiles"][0]
    assert profile["peak_bytes"] > 0
    done = subprocess.run(
        ltui.argv("rerun", "last", "--from", "1", "--to", "2", "--with", "pdb"),
        cwd=ltui.cwd,
        env=ltui.environment,
        input="p batch.shape\nn\np f'{loss.item():.0f} is the loss'\nc\n",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch.Size([4, 8])" in done.stdout
    assert "0 is the loss" in done.stdout


@pytest.mark.slow
def test_ranks_that_a_program_forks_are_observed_and_end(ltui: Ltui) -> None:
    ltui.environment["MASTER_PORT"] = str(free_port_pair())
    ltui.environment["ONLY_THEN"] = "1"
    forked = sys.executable, str(SCRIPTS / "forked_ranks.py"), PROGRAM
    ltui("exec", "--detach", "--", *forked, "untracked", "30", "0.05")
    assert ltui.ended()["state"] == "finished"
    fault(ltui, "nan 3 1")
    ltui.environment.pop("ONLY_THEN")
    result = rerun(ltui, "--from", "2", "--to", "4", "--with", "nan", code=1)
    assert (result["nan"][0]["at_step"], result["nan"][0]["rank"]) == (3, 1)
    assert "set again as then: ONLY_THEN." in result["code"]
    refused = ltui(
        "rerun", "last", "--from", "2", "--to", "4", "--with", "pdb", "--rank", "2", check=2
    )
    assert "--rank 2: the run has ranks 0 to 1." in refused.stderr
    with RunStore(RunDir(next(ltui.home.glob("reruns/runs/*")))) as store:
        assert store.last_step() == 5  # The program could have logged values of step 4 until then.


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_the_command_leaves_no_process(ltui: Ltui, number: int) -> None:
    trained(ltui, *TORCHRUN, PROGRAM, "ddp", "60", "0.05")
    process = subprocess.Popen(
        ltui.argv("rerun", "last", "--from", "50", "--to", "60"),
        cwd=ltui.cwd,
        env=ltui.environment,
        stdout=subprocess.DEVNULL,
    )
    wait_for(lambda: list(ltui.home.glob("reruns/runs/*/queue/1/*.queue")), wanted=bool)
    process.send_signal(number)
    assert process.wait(60) == (130 if number == signal.SIGINT else -number)
    ltui.wait_until_alone()
    shadow = RunDir(next(ltui.home.glob("reruns/runs/*")))
    with RunStore(shadow) as store:
        told = "Killed, because `ltui rerun` has ended." in [event.text for event in store.events()]
    assert told == (number == signal.SIGKILL)
