"""Supervisor and shim are both killed: the next command finds and ends the remaining processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from ltui.training.json_codec import to_json
from ltui.training.lifecycle.delete_runs import delete
from ltui.training.lifecycle.resume_run import resume
from ltui.training.lifecycle.run_status import recover_run, resolve_snapshot
from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.run_directory import RunDir
from tests.chaos.conftest import Command, everywhere, kill_roles
from tests.chaos.process_tree import live_processes
from tests.required import required
from tests.supervise.conftest import Runs
from tests.supervise.test_gpus import given, steer, uuid, waiting_for

__all__ = ["steer"]


@pytest.mark.parametrize(
    "words",
    [
        ("runs",),
        pytest.param(("show", "last"), marks=everywhere),
        pytest.param(("stop", "last"), marks=everywhere),
        pytest.param(("resume", "last", "--detach"), marks=everywhere),
    ],
)
def test_foreign_ranks_end_with_the_next_command(
    runs: Runs, ltui: Command, saved_run: RunDir, words: tuple[str, ...]
) -> None:
    run = saved_run
    kill_roles(run, "supervisor", "shim")
    alone = runs.until(run, lambda s: "continue without one" in (s.detail or ""))
    assert (alone.state, alone.supervisor_pid) == (RunState.RUNNING, None)
    # The engine dies with the shim, but it may exist for a short time.
    runs.until(run, lambda s: {a.role for a in live_processes(run)} == {"rank 0", "rank 1"})
    with pytest.raises(ProblemError, match="Stop it first"):
        delete(run)
    output = ltui(*words, code=None)
    if words[0] == "resume":
        assert "started" in output
        runs.more_steps(run, 10)
        assert runs.end(run, "kill").attempt == 2
        return
    runs.until_alone(run)
    ended = resolve_snapshot(run)
    assert ended.state is RunState.CRASHED
    assert "its shim process was killed" in (ended.detail or "")
    assert "crashed" in output or "shim process was killed" in output
    assert ended.history_note is None
    assert runs.steps(run) == list(range(1, (ended.ranks[0].global_step or 0) + 1))


def test_a_stop_during_which_all_died_was_not_forced(
    runs: Runs, ltui: Command, saved_run: RunDir
) -> None:
    run = saved_run
    ranks = [a for a in live_processes(run) if a.role.startswith("rank")]
    for rank in ranks:
        os.kill(rank.mark.pid, signal.SIGSTOP)
    runs.order(run, "stop", timeout_s=1.0)
    runs.until(run, lambda s: s.state is RunState.STOPPING)
    kill_roles(run)
    time.sleep(1.5)  # until the time of the stop is over
    before = resolve_snapshot(run)
    assert before.state is RunState.LOST
    shown = ltui.show(run)
    assert shown["state"] == "lost"
    # The checkpoint may have been verified between the two looks.
    assert required(before.detail).rpartition(" ")[0] == shown["detail"].rpartition(" ")[0]


def test_a_resume_is_not_shown_as_the_end_before_it(runs: Runs, saved_run: RunDir) -> None:
    """The engine starts before the supervisor writes the first snapshot of the attempt."""
    run = saved_run
    stopped = runs.end(run, "stop")
    assert stopped.state is RunState.STOPPED
    document = json.dumps(to_json(stopped))
    resume(run)
    runs.more_steps(run, 10)
    kill_roles(run, "supervisor", "shim")
    with sqlite3.connect(run.db_path) as store:
        store.execute("UPDATE snapshot SET document = ?", (document,))
    store.close()
    snapshot = resolve_snapshot(run)
    assert (snapshot.state, snapshot.attempt) == (RunState.RUNNING, 2)
    assert recover_run(run)
    runs.until_alone(run)


def test_a_queued_run_goes_on_waiting(
    runs: Runs, ltui: Command, steer: Callable[[str], None]
) -> None:
    steer(f"gpus 1 h100\nset * mem_used 0\nprocess 0 {os.getpid()} 1e9\n")
    run = waiting_for(runs, "free:1")
    runs.until(run, lambda s: s.state is RunState.QUEUED and "used by pid" in (s.detail or ""))
    kill_roles(run, "supervisor")
    alone = runs.until(run, lambda s: "its supervisor died while it waited" in (s.detail or ""))
    assert (alone.state, alone.supervisor_pid) == (RunState.QUEUED, None)
    shown = ltui.show(run)
    assert shown["state"] == "queued"
    assert shown["supervisor_pid"] in {a.mark.pid for a in live_processes(run)}
    steer("gpus 1 h100\nset * mem_used 0\n")
    assert given(runs, run) == uuid(0)
    runs.end(run, "kill")


def test_nothing_of_a_copied_run_starts(
    runs: Runs, ltui: Command, steer: Callable[[str], None]
) -> None:
    """A run directory that somebody gave away while it waited, put among one's own runs."""
    steer(f"gpus 1 h100\nset * mem_used 0\nprocess 0 {os.getpid()} 1e9\n")
    run = waiting_for(runs, "free:1")
    kill_roles(run, "supervisor")
    copy = RunDir(run.path.with_name("given-run"))
    shutil.copytree(run.path, copy.path, ignore=shutil.ignore_patterns("*.sock"))
    assert RunState.STOPPED.value in ltui("stop", run.id)
    stopped = runs.ended(run)
    assert stopped.detail == "stopped while it waited for GPUs: nothing was trained"
    assert not run.engine_log_path(1).exists()
    steer("gpus 1 h100\nset * mem_used 0\n")
    for words in (("runs",), ("show", copy.id), ("stop", copy.id), ("resume", copy.id)):
        ltui(*words, code=None)
        assert not live_processes(copy), words
    assert resolve_snapshot(copy).state is RunState.LOST
    assert not copy.engine_start_path(1).exists()


@everywhere
def test_two_supervisors_for_one_run(runs: Runs, ltui: Command, saved_run: RunDir) -> None:
    run = saved_run
    pid = resolve_snapshot(run).supervisor_pid
    second = subprocess.run(
        [sys.executable, "-m", "ltui.training.supervise.main", str(run.path), "--adopt"],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert second.returncode == 2
    assert f"another supervisor (pid {pid}) already has this run" in second.stderr
    assert resolve_snapshot(run).supervisor_pid == pid
    runs.more_steps(run, 10)
    runs.end(run, "stop")


@everywhere
def test_two_resumes_at_once(runs: Runs, ltui: Command, saved_run: RunDir) -> None:
    run = saved_run
    runs.end(run, "stop")
    both = [
        subprocess.Popen(
            ltui.argv("resume", run.id, "--detach"), env=ltui.environ, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    output = [process.communicate(timeout=200)[0] for process in both]
    assert sorted(p.returncode for p in both) == [0, 2], output
    runs.more_steps(run, 10)
    assert sorted(a.role for a in live_processes(run)) == [
        "engine", "rank 0", "rank 1", "shim", "supervisor",
    ]  # fmt: skip
    assert runs.end(run, "kill").attempt == 2
