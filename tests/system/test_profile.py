"""``ltui profile`` of real runs: the same losses, killed supervisors and ranks, and refusals."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from ltui.app.actions import profile_run
from ltui.training.store.find_run import find_run
from tests.ltui_command import answer
from tests.system.conftest import SCRIPTS, Ltui
from tests.waiting import wait_for

PROGRAM = str(SCRIPTS / "faulty_program.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")

pytestmark = pytest.mark.timeout(600)


def profile(ltui: Ltui, *words: str, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = answer(ltui("profile", "last", *words, "--json", check=code).stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "lightning"])
def test_the_losses_are_the_same_with_and_without_a_profile(ltui: Ltui, kind: str) -> None:
    launcher = TORCHRUN if kind == "ddp" else (sys.executable,)
    ltui("exec", "--detach", "--", *launcher, PROGRAM, kind, "400", "0.05")
    ltui.wait_for_step(8)
    ltui("checkpoint", "last")
    found = profile(ltui, "--ranks", "slowest,0,1", "--memory")
    assert (found["state"], sorted(found["ranks"])) == ("done", [0, 1])
    assert [each["steps"] for each in found["profiles"]] == [5, 5]
    for each in found["profiles"]:
        split = each["split"]
        parts = ("computing_s", "exposed_s", "copies_s", "data_s", "host_s")
        assert sum(split[part] for part in parts) == pytest.approx(split["step_s"])
        assert split["host_s"] > 0.04  # it sleeps
        assert "aten::addmm" in {operator["name"] for operator in each["top"]}
    assert found == answer(ltui("profile", "last", "--show", "--json").stdout)
    assert "Rank 1: operators" in ltui("profile", "last", "--show").stdout
    ltui("stop", "last")
    run = ltui.ended()
    logs = [path.read_text() for path in Path(run["run_dir"], "logs").rglob("*.log")]
    assert not any("ProfilerHandler" in text for text in logs)  # lines of torch's profiler
    ltui("profile", "last", check=2)
    steps = "--from", str(found["first"] - 1), "--to", str(found["last"] + 1)
    assert answer(ltui("rerun", "last", *steps, "--json").stdout)["comparison"]["steps"] == 7


@pytest.mark.slow
def test_a_profile_survives_its_supervisor_and_not_its_ranks(ltui: Ltui) -> None:
    command = (*TORCHRUN, PROGRAM, "ddp", "4000", "0.05")
    ltui("exec", "--detach", "--restarts", "1", "--", *command)
    run = ltui.wait_for_step(8)
    folder = Path(run["run_dir"]) / "profiles"

    def begin(number: int) -> dict[str, Any]:
        assert profile_run.begin(find_run(ltui.home, "last"), steps=40) == number
        return ltui.show()

    def stored(number: int) -> dict[str, Any]:
        path = folder / str(number) / "profile.json"
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return document

    def over(number: int) -> dict[str, Any]:
        return wait_for(
            lambda: stored(number), wanted=lambda p: p["state"] in ("done", "failed"), seconds=120
        )

    os.kill(begin(1)["supervisor_pid"], signal.SIGKILL)
    assert over(1)["state"] == "done"
    refused = ltui("profile", "last", "--ranks", "9", check=2).stderr
    assert "there is no rank '9'" in refused

    snapshot = begin(2)
    assert "profile 2 is running" in ltui("profile", "last", check=2).stderr
    assert "profile 2 is running" in ltui("diagnose", "last", "--sample", check=2).stderr
    os.kill(snapshot["ranks"][1]["pid"], signal.SIGKILL)
    failed = over(2)
    assert failed["state"] == "failed"
    assert failed["profiles"] == []
    ltui.wait(lambda s: s["attempt"] == 2 and s["state"] == "running" and s["global_step"])
    ltui.wait_for_step(8)
    assert profile(ltui)["state"] == "done"
