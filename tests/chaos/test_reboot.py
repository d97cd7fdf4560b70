"""All processes gone at once, and what their files name is somebody else's now."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from ltui.training.lifecycle.delete_runs import delete
from ltui.training.lifecycle.resume_run import resume
from ltui.training.lifecycle.run_status import recover_run
from ltui.training.process.identity import boot_id, start_ticks
from ltui.training.state.run_snapshot import LIVE, RunState
from ltui.training.store.run_directory import RunDir, list_runs
from tests.chaos.conftest import Command, everywhere, kill_roles
from tests.required import required
from tests.supervise.conftest import Runs

EARLIER_BOOT = "00000000-0000-4000-8000-000000000000"


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with any run, and must live on."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield process
    assert process.poll() is None, "a process that is not ours was ended"
    process.kill()
    process.wait()


def _reuse(run: RunDir, bystander: subprocess.Popen[bytes], *, ticks_off: int, boot: str) -> None:
    """The bystander got the pid of every process that the run's files name."""
    ticks = (start_ticks(bystander.pid) or 0) + ticks_off
    inode = run.lock_path.stat().st_ino
    run.lock_path.write_text(f"{bystander.pid}\n{ticks}\n{boot}\n{inode}\n")
    shim: dict[str, Any] = json.loads(run.shim_path.read_text())
    shim |= {
        "pid": bystander.pid, "start_ticks": ticks, "engine_pid": bystander.pid,
        "engine_start_ticks": ticks, "boot_id": boot,
    }  # fmt: skip
    run.shim_path.write_text(json.dumps(shim))


@pytest.mark.parametrize(
    ("ticks_off", "boot", "words"),
    [
        (0, EARLIER_BOOT, "the machine was restarted"),
        pytest.param(7, boot_id(), "how it ended is unknown", marks=everywhere),
    ],
)
def test_pids_used_by_others(
    runs: Runs, ltui: Command, saved_run: RunDir, bystander: subprocess.Popen[bytes],
    ticks_off: int, boot: str, words: str,
) -> None:  # fmt: skip
    run = saved_run
    kill_roles(run)
    assert run.socket_path.exists(), "the socket is stale and lies there"
    _reuse(run, bystander, ticks_off=ticks_off, boot=boot)
    before = runs.until(run, lambda s: s.state not in LIVE)
    assert (before.state, before.supervisor_pid) == (RunState.LOST, None)
    assert words in (before.detail or "")
    shown = ltui.show(run)
    assert (shown["state"], shown["supervisor_pid"]) == ("lost", None)
    assert words in shown["detail"]
    assert all(rank["state"] == "dead" for rank in shown["ranks"])
    assert not run.socket_path.exists()
    assert shown["ended_at"] <= required(before.taken_at) + 1, "it ended when it was last seen"
    resume(run)
    runs.more_steps(run, 10)
    ended = runs.end(run, "stop")
    assert ended.history_note is None
    assert runs.steps(run) == list(range(1, (ended.global_step or 0) + 1))
    delete(run)


@everywhere
def test_nothing_is_taken_up_that_was_left_in_order(runs: Runs, saved_run: RunDir) -> None:
    assert not any(recover_run(r) for r in list_runs(runs.home))
    runs.end(saved_run, "stop")
    assert not any(recover_run(r) for r in list_runs(runs.home))
