"""A history that can't be read costs the history, said in a sentence, and nothing else."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ltui.training.lifecycle.resume_run import resume
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.database_schema import LAYOUT
from ltui.training.store.run_directory import RunDir
from tests.chaos.conftest import Command, everywhere, kill_roles, wait_for_more_steps
from tests.chaos.invariants import verify_checkpoints
from tests.store.histories import stored_rows
from tests.supervise.conftest import Runs


def _header(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"x" * 100)


def _middle(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))


def _half(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2 + 100)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _gone(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (_header, "the run's history is damaged (file is not a database)."),
        pytest.param(_middle, "the run's history is damaged", marks=everywhere),
        pytest.param(_half, "the run's history is damaged", marks=everywhere),
        pytest.param(_empty, "the run's history is gone.", marks=everywhere),
        pytest.param(_gone, "the run's history is gone.", marks=everywhere),
    ],
)
def test_the_rest_stays_usable(
    runs: Runs, ltui: Command, saved_run: RunDir, harm: Callable[[Path], None], words: str
) -> None:
    run = saved_run
    stopped = runs.end(run, "stop")
    harm(run.db_path)
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
    wait_for_more_steps(runs, run)
    again = runs.end(run, "stop")
    assert again.state is RunState.STOPPED
    assert again.attempt == 2
    assert "the history until now" in (again.history_note or "")
    begin = (stopped.global_step or 0) + 1
    assert runs.steps(run) == list(range(begin, (again.global_step or 0) + 1))
    if harm in (_header, _middle, _half):
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
    wait_for_more_steps(runs, run, 30)
    kill_roles(run)
    # What the ranks had still to tell is lost as well: as after a power cut.
    for path in (*run.queue_dir(1).glob("*.queue"), run.db_path.with_name("run.db-wal")):
        path.unlink()
    run.db_path.with_name("run.db-shm").unlink(missing_ok=True)
    newest = verify_checkpoints(run).last
    assert newest is not None
    runs.until(run, lambda s: s.state is RunState.LOST)
    resume(run)
    step = wait_for_more_steps(runs, run)
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
    assert locker.stdin is not None
    assert locker.stdout is not None
    try:
        assert locker.stdout.readline() == "locked\n"
        noted = runs.until(run, lambda s: s.history_note is not None)
        assert "database is locked" in (noted.history_note or "")
        assert noted.state is RunState.RUNNING
        wait_for_more_steps(runs, run)
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
