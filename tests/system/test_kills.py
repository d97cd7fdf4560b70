"""SIGKILL to each process of a run: the state shown is true, nothing is orphaned or lost."""

from __future__ import annotations

import os
import pty
import signal
import subprocess

import psutil
import pytest

from tests.system.conftest import Ltui

pytestmark = pytest.mark.timeout(500)


@pytest.mark.slow
def test_the_dashboard(ltui: Ltui, slow_quickstart: list[str]) -> None:
    ltui(*slow_quickstart)
    before = ltui.wait_for_step(5)
    master, slave = pty.openpty()
    dashboard = subprocess.Popen(
        ltui.argv("attach", "last"),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**ltui.environment, "TERM": "xterm-256color"},
        start_new_session=True,
    )
    os.close(slave)
    try:
        assert os.read(master, 1000), "the dashboard painted nothing"
        dashboard.kill()
        dashboard.wait()
        after = ltui.wait_for_step(before["global_step"] + 20)
        assert after["state"] == "running"
        assert [r["pid"] for r in after["ranks"]] == [r["pid"] for r in before["ranks"]]
    finally:
        dashboard.kill()
        dashboard.wait()
        os.close(master)
    ltui("stop", "last", "--kill")
    ltui.wait_until_alone()


@pytest.mark.slow
def test_the_supervisor(ltui: Ltui, slow_quickstart: list[str]) -> None:
    ltui(*slow_quickstart)
    before = ltui.wait_for_step(5)
    os.kill(before["supervisor_pid"], signal.SIGKILL)
    assert ltui.show()["state"] == "running"
    after = ltui.wait(lambda s: s["supervisor_pid"] not in (None, before["supervisor_pid"]))
    assert after["state"] == "running"
    assert [r["pid"] for r in after["ranks"]] == [r["pid"] for r in before["ranks"]]
    ltui.wait_for_step(after["global_step"] + 20)
    ltui("stop", "last")
    stopped = ltui.show()
    assert stopped["state"] == "stopped"
    assert stopped["history_note"] is None
    assert ltui.steps_on_record() == list(range(1, stopped["global_step"] + 1))
    ltui.wait_until_alone()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank(ltui: Ltui, slow_quickstart: list[str], rank: int) -> None:
    ltui(*slow_quickstart)
    before = ltui.wait_for_step(5)
    os.kill(before["ranks"][rank]["pid"], signal.SIGKILL)
    ltui.wait(lambda s: s["ranks"][rank]["state"] == "dead")
    ended = ltui.ended()
    assert ended["state"] == "crashed"
    assert f"rank {rank}" in ended["detail"]
    assert "SIGKILL" in ended["detail"]
    assert ltui.steps_on_record() == list(range(1, ended["global_step"] + 1))


@pytest.mark.slow
def test_a_loader_worker_of_a_paused_rank(ltui: Ltui, slow_quickstart: list[str]) -> None:
    """torch raises its error within ltui's pause. The rank ends with it, and leaves no other."""
    ltui(*slow_quickstart, "--set", "data.init_args.workers=1")
    rank = ltui.wait_for_step(5)["ranks"][1]["pid"]
    ltui("pause", "last")
    ltui.wait(lambda s: s["state"] == "paused")
    workers = psutil.Process(rank).children()
    assert workers
    for worker in workers:
        worker.kill()
    ended = ltui.ended()
    assert ended["state"] == "failed"
    assert "rank 1 raised RuntimeError: DataLoader worker" in ended["detail"]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["ltui.training.rank.torchrun", "supervise/shim.py"])
def test_the_engine_and_the_shim(ltui: Ltui, slow_quickstart: list[str], command: str) -> None:
    ltui(*slow_quickstart)
    ltui.wait_for_step(5)
    (process,) = [p for p in ltui.processes() if command in " ".join(p.cmdline())]
    process.kill()
    assert ltui.ended()["state"] == "crashed"


@pytest.mark.slow
def test_everything_at_once_as_in_a_power_cut(ltui: Ltui, slow_quickstart: list[str]) -> None:
    ltui(*slow_quickstart)
    ltui.wait_for_step(5)
    for process in ltui.processes():
        process.suspend()
    for process in ltui.processes():
        process.kill()
    ltui.wait_until_alone()
    # A dead process whose threads still end holds its locks a moment longer.
    assert ltui.ended()["state"] in ("lost", "crashed")
    ltui("resume", "last", "--detach", check=None)
    ltui("stop", "last", "--kill", check=None)
    ltui.wait_until_alone()
