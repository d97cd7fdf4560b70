"""What agents leave on their machines: removed when the head has it, kept when it is evidence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ltui.training.lifecycle.delete_runs import (
    AGENT_KEEP_S,
    agent_directory,
    mark_delivered,
    remove_after_end,
    remove_agents_of,
    remove_unneeded_agents,
)
from ltui.training.process.identity import write_lock_text
from ltui.training.store.run_directory import RunDir


def _ended(home: Path, *, code: int = 0, delivered: bool = True, node: int = 1) -> RunDir:
    """Return the directory of an agent whose engine ended with ``code``."""
    run_dir = agent_directory(home, "brave-owl-0002", node)
    for name in ("engine", "checkpoints", "logs"):
        (run_dir.path / name).mkdir(parents=True)
    run_dir.lock_path.touch()
    run_dir.engine_start_path(1).write_text("{}")
    run_dir.engine_exit_path(1).write_text(json.dumps({"exit_code": code, "ended_at": 1.0}))
    if delivered:
        mark_delivered(run_dir)
    return run_dir


def _make_old(run_dir: RunDir) -> None:
    old = time.time() - AGENT_KEEP_S - 60
    for path in (*run_dir.path.rglob("*"), run_dir.path):
        os.utime(path, (old, old))


def test_what_the_head_has_is_removed(tmp_path: Path) -> None:
    run_dir = _ended(tmp_path)
    (run_dir.checkpoints_dir / ".step-5.node-00001.part").mkdir()
    (run_dir.checkpoints_dir / "received-00001").mkdir()
    assert remove_after_end(run_dir)
    assert not run_dir.path.exists()


@pytest.mark.parametrize("reason", ["failed", "not delivered", "checkpoint", "never ended"])
def test_evidence_is_kept_for_a_time(tmp_path: Path, reason: str) -> None:
    run_dir = _ended(tmp_path, code=reason == "failed", delivered=reason != "not delivered")
    if reason == "checkpoint":
        (run_dir.checkpoints_dir / "step-5.ckpt").touch()
    elif reason == "never ended":
        run_dir.engine_exit_path(1).unlink()
    assert not remove_after_end(run_dir)
    remove_unneeded_agents(tmp_path)
    assert run_dir.path.exists()
    _make_old(run_dir)
    remove_unneeded_agents(tmp_path)
    assert not run_dir.path.exists()


def test_an_old_directory_in_which_something_changed_is_kept(tmp_path: Path) -> None:
    run_dir = _ended(tmp_path, code=1)
    _make_old(run_dir)
    run_dir.engine_log_path(1).parent.mkdir()
    run_dir.engine_log_path(1).write_text("still there")
    remove_unneeded_agents(tmp_path)
    assert run_dir.path.exists()


def test_a_live_agent_keeps_its_directory(tmp_path: Path) -> None:
    run_dir = _ended(tmp_path)
    with run_dir.lock_path.open("r+b") as lock:
        write_lock_text(lock.fileno(), run_dir.lock_path)
    _make_old(run_dir)
    remove_unneeded_agents(tmp_path)
    remove_agents_of(RunDir(tmp_path / "runs" / "brave-owl-0002"))
    assert run_dir.path.exists()


def test_deleting_a_run_removes_what_its_agents_left_in_the_same_home(tmp_path: Path) -> None:
    own = [_ended(tmp_path, code=1, node=node) for node in (1, 12)]
    other = agent_directory(tmp_path, "brave-owl-00023", 1)
    other.path.mkdir()
    remove_agents_of(RunDir(tmp_path / "runs" / "brave-owl-0002"))
    assert [run_dir.path.exists() for run_dir in own] == [False, False]
    assert other.path.exists()


def test_doctor_counts_what_is_left(tmp_path: Path, private_home: Path) -> None:
    _ended(private_home, code=1)
    argv = [sys.executable, "-m", "ltui.app.cli", "doctor"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(argv, check=True, capture_output=True, text=True, env=environ)
    assert "1 folders of nodes, 0 histories" in done.stdout
