"""Whole runs from the command line to the recorded history."""

from __future__ import annotations

import csv
import io
import os
import shutil
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.system.conftest import SCRIPTS, Ltui

STEPS_AN_EPOCH = 45
"""Of the quickstart preset on two ranks. A validation follows each epoch."""


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_quickstart_learns_and_its_history_is_whole(ltui: Ltui) -> None:
    done = ltui("run", "quickstart", timeout=180)
    snapshot = ltui.show()
    assert snapshot["state"] == "finished", done.stdout
    assert snapshot["world_size"] == 2
    assert snapshot["metrics"]["val/accuracy"]["last"] >= 0.95
    assert snapshot["global_step"] == snapshot["max_steps"]
    for rank in (0, 1):
        assert ltui.steps_on_record(rank) == list(range(1, snapshot["global_step"] + 1))
    table = ltui("export", "last", "--metric", "train/loss", "--format", "csv").stdout
    rows = list(csv.DictReader(io.StringIO(table)))
    assert float(rows[-1]["value"]) < float(rows[0]["value"])
    ltui.wait_until_alone()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["own", "torchrun"])
def test_a_script_of_ones_own_is_watched_unchanged(ltui: Ltui, launcher: str) -> None:
    shutil.copy(SCRIPTS / "train.py", ltui.cwd)
    before = (ltui.cwd / "train.py").read_bytes()
    python = [sys.executable]
    if launcher == "torchrun":
        python += ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    ltui("exec", "--", *python, "train.py")
    snapshot = ltui.show()
    assert snapshot["state"] == "finished"
    assert [rank["rank"] for rank in snapshot["ranks"]] == [0, 1]
    assert [rank["global_step"] for rank in snapshot["ranks"]] == [96, 96]
    assert snapshot["metrics"]["loss"]["last"] < 1.0
    assert "trained to the end" in ltui("logs", "last").stdout
    assert (ltui.cwd / "train.py").read_bytes() == before
    ltui.wait_until_alone()


@pytest.mark.parametrize(("code", "state", "exit_code"), [(0, "finished", 0), (7, "failed", 1)])
def test_a_script_that_is_not_lightning_has_logs_and_a_state(
    ltui: Ltui, code: int, state: str, exit_code: int
) -> None:
    shutil.copy(SCRIPTS / "plain.py", ltui.cwd)
    ltui("exec", "--", sys.executable, "plain.py", "5", str(code), check=exit_code)
    snapshot = ltui.show()
    assert snapshot["state"] == state
    assert snapshot["exit_code"] == code
    assert "line 4" in ltui("logs", "last").stdout
    ltui.wait_until_alone()


def stops(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    """Verdicts about a stopped process."""
    return [v for v in snapshot["verdicts"] if v["kind"] == "stopped"]


def _a_stopped_rank_is_named_and_the_verdict_ends(ltui: Ltui, pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        # On a crowded machine others may come before and after it.
        stalled = ltui.wait(lambda s: stops(s) and s["ranks"][0]["state"] == "waiting")
    finally:
        os.kill(pid, signal.SIGCONT)
    (verdict,) = stops(stalled)
    assert (verdict["level"], verdict["culprits"], verdict["waiting"]) == ("stalled", [1], [0])
    assert "rank 1 is stopped" in verdict["cause"]
    assert [rank["state"] for rank in stalled["ranks"]] == ["waiting", "stalled"]
    ltui.wait_for_step(stalled["global_step"] + 5)
    ltui.wait(lambda s: not stops(s))


@pytest.mark.timeout(500)
def test_a_stall_a_stop_and_a_resume_make_one_curve(ltui: Ltui, slow_quickstart: list[str]) -> None:
    """One training for three subjects, because each start of two real ranks takes seconds."""
    ltui(*slow_quickstart)
    running = ltui.wait_for_step(STEPS_AN_EPOCH + 5)
    _a_stopped_rank_is_named_and_the_verdict_ends(ltui, running["ranks"][1]["pid"])

    ltui("stop", "last")
    stopped = ltui.show()
    assert stopped["state"] == "stopped"
    step = stopped["global_step"]
    assert any(c["ok"] and c["global_step"] == step for c in stopped["checkpoints"])
    ltui.wait_until_alone()

    ltui("resume", "last", "--detach")
    resumed = ltui.wait_for_step(step + 10)
    assert resumed["attempt"] == 2
    ltui("stop", "last")
    assert ltui.steps_on_record() == list(range(1, ltui.show()["global_step"] + 1))
    validated = ltui.steps_on_record(metric="val/loss")
    assert validated
    assert not [s for s in validated if s % STEPS_AN_EPOCH], "sent again by the resumed attempt"
    ltui.wait_until_alone()


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_script_with_workers_of_a_fork_server_is_stopped_and_resumed_exactly(ltui: Ltui) -> None:
    shutil.copy(SCRIPTS / "train.py", ltui.cwd)
    command = (sys.executable, "train.py", "60", "1", "forkserver")
    alone = subprocess.run(
        command, cwd=ltui.cwd, env=ltui.environment, capture_output=True, text=True, check=True
    )
    ltui("exec", "--detach", "--", *command)
    ltui.wait_for_step(1)
    ltui("stop", "last", "--at-step", "1000")  # in the middle of an epoch
    stopped = ltui.wait(lambda s: s["state"] == "stopped")
    assert stopped["detail"] == "stopped at step 1000, checkpoint verified"
    ltui.wait_until_alone()
    ltui("resume", "last", "--detach")
    finished = ltui.wait(lambda s: s["state"] == "finished")
    assert finished["detail"] == "finished at step 1920"
    assert (finished["cautions"], finished["verdicts"]) == ([], [])
    (trained, *_) = (line for line in alone.stdout.splitlines() if "to the end" in line)
    assert trained in ltui("logs", "last").stdout
    ltui.wait_until_alone()


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_script_that_its_workers_run_again_is_named(ltui: Ltui, method: str) -> None:
    guarded = (SCRIPTS / "train.py").read_text()
    (ltui.cwd / "train.py").write_text(guarded.replace('if __name__ == "__main__":', "if True:"))
    ltui("exec", "--", sys.executable, "train.py", "3", "1", method, check=1)
    failed = ltui.show()
    reason = (
        'train.py has no `if __name__ == "__main__":`, so each worker runs the whole script again'
        f" (start method {method})"
    )
    assert f"{reason}." in [caution["what"] for caution in failed["cautions"]]
    assert f"exited unexpectedly: {reason}" in failed["detail"]
    verdict = next(v for v in failed["verdicts"] if v["kind"] == "worker_died")
    assert reason in verdict["cause"]
    assert verdict["remedy"].startswith("Put what trains below such a line")
    ltui.wait_until_alone()
