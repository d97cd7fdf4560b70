"""A history that can't be read costs the history, said in a sentence, and nothing else."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from ltui.training.lifecycle.resume_run import resume
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.database_schema import LAYOUT
from ltui.training.store.run_directory import RunDir
from tests.chaos.conftest import Command, everywhere, kill_roles
from tests.chaos.invariants import verify_checkpoints
from tests.required import required
from tests.store.histories import empty_log, stored_rows
from tests.supervise.conftest import Runs


def _damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
        return
    damaged = {
        "header": b"x" * 100 + data[100:],
        "middle": data[:4096] + b"\xff" * (len(data) - 4096),
        "half": data[: len(data) // 2 + 100],
        "empty": b"",
    }
    path.write_bytes(damaged[how])


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("header", "the run's history is damaged (file is not a database)."),
        pytest.param("middle", "the run's history is damaged", marks=everywhere),
        pytest.param("half", "the run's history is damaged", marks=everywhere),
        pytest.param("empty", "the run's history is gone.", marks=everywhere),
        pytest.param("gone", "the run's history is gone.", marks=everywhere),
    ],
)
def test_the_rest_stays_usable(
    runs: Runs, ltui: Command, saved_run: RunDir, how: str, words: str
) -> None:
    run = saved_run
    stopped = runs.end(run, "stop")
    empty_log(run)
    _damage(run.db_path, how)
    shown = ltui.show(run)
    assert (shown["state"], shown["global_step"]) == ("stopped", stopped.global_step)
    assert shown["history_note"].startswith(words)
    assert [c["global_step"] for c in shown["checkpoints"]] == [
        c.global_step for c in stopped.checkpoints
    ]
    assert run.id in ltui("runs")
    assert "engine begins" in ltui("logs", run.id)
    assert "history" in ltui("export", run.id, "-o", "-", code=None)
    resume(run)
    runs.more_steps(run, 10)
    again = runs.end(run, "stop")
    assert again.state is RunState.STOPPED
    assert again.attempt == 2
    assert "the history until now" in (again.history_note or "")
    begin = (stopped.global_step or 0) + 1
    assert runs.steps(run) == list(range(begin, (again.global_step or 0) + 1))
    if how not in ("empty", "gone"):
        assert "run.db.damaged-1" in (again.history_note or "")
        assert run.db_path.with_name("run.db.damaged-1").exists()


@everywhere
def test_a_history_by_a_newer_ltui_is_not_touched(
    runs: Runs, ltui: Command, saved_run: RunDir
) -> None:
    run = saved_run
    runs.end(run, "stop")
    with sqlite3.connect(run.db_path) as connection:
        connection.execute(f"PRAGMA user_version = {LAYOUT + 1}")
    connection.close()
    shown = ltui.show(run)
    assert shown["state"] == "stopped"
    assert "it was written by a newer ltui" in shown["history_note"]
    assert "engine begins" in ltui("logs", run.id)
    assert "Upgrade ltui" in ltui("resume", run.id, "--detach", code=2)
    assert verify_checkpoints(run).complete


@everywhere
def test_a_lost_write_ahead_log_is_a_hole_that_is_shown(runs: Runs, saved_run: RunDir) -> None:
    run = saved_run
    runs.more_steps(run, 30)
    kill_roles(run)
    # What the ranks had still to tell is lost as well: as after a power cut.
    for path in (*run.queue_dir(1).glob("*.queue"), run.db_path.with_name("run.db-wal")):
        path.unlink()
    run.db_path.with_name("run.db-shm").unlink(missing_ok=True)
    newest = required(verify_checkpoints(run).last)
    runs.until(run, lambda s: s.state is RunState.LOST)
    resume(run)
    step = required(runs.more_steps(run, 10).global_step)
    ended = runs.end(run, "kill")
    steps = runs.steps(run)
    assert steps != list(range(1, step + 1))
    assert "missing" in (ended.history_note or "")
    assert set(range(newest["global_step"] + 1, step)) <= set(steps)


LOCKER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=30)
connection.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.readline()
"""


@everywhere
def test_a_history_that_another_process_locks(runs: Runs, ltui: Command, saved_run: RunDir) -> None:
    run = saved_run
    locker = subprocess.Popen(
        [sys.executable, "-c", LOCKER, str(run.db_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert required(locker.stdout).readline() == "locked\n"
        noted = runs.until(run, lambda s: s.history_note is not None)
        assert "database is locked" in (noted.history_note or "")
        assert noted.state is RunState.RUNNING
        runs.more_steps(run, 10)
        runs.order(run, "checkpoint")
        ltui("pause", run.id)
        ltui("continue", run.id)
    finally:
        locker.communicate("over\n", timeout=90)
    runs.until(run, lambda s: s.history_note is None)
    ended = runs.end(run, "stop")
    assert ended.history_note is None
    assert runs.steps(run) == list(range(1, (ended.global_step or 0) + 1))
    assert stored_rows(run, "gaps") == []
