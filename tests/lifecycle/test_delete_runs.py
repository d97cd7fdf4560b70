"""Deleted runs and what agents leave.

Runs are deleted into the bin, restored whole, and removed for ever after a week. What agents leave
on their machines is removed when the head has it, and kept when it is evidence.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from ltui.app.runs.run_list import RunList
from ltui.training.lifecycle.delete_runs import (
    AGENT_KEEP_S,
    agent_directory,
    delete,
    empty_bin,
    mark_delivered,
    remove,
    remove_after_end,
    remove_agents_of,
    remove_unneeded_agents,
)
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.problem import ProblemError
from ltui.training.process.identity import write_lock_text
from ltui.training.store.find_run import KEEP_S, deleted_runs, find_deleted, move_to_bin, restore
from ltui.training.store.labels_file import change_labels, read_labels
from ltui.training.store.run_directory import RunDir, list_runs
from tests.stored_runs import stored_run

FOX, OWL = "calm-fox-1a2b", "kept-owl-5e6f"


@pytest.fixture
def run(private_home: Path) -> RunDir:
    stored_run(private_home, OWL)
    return stored_run(private_home, FOX, metrics={"val/loss": 0.5})


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith("run.db-")
    }


def listed(home: Path) -> list[str]:
    run_list = RunList(home, resolve_snapshot)
    try:
        return sorted(entry.id for entry in run_list.poll() if entry.problem is None)
    finally:
        run_list.close()


def grow_old(home: Path) -> None:
    """Let the runs in the bin have been there for more than a week."""
    for deleted in deleted_runs(home):
        deleted.path.rename(deleted.path.with_name(f"{int(time.time() - KEEP_S) - 9}-{deleted.id}"))


def test_a_restored_run_is_the_same_with_its_labels_node_directories_and_place(
    run: RunDir, private_home: Path
) -> None:
    change_labels(run, lambda labels: replace(labels, note="keep", star=True))
    node = agent_directory(private_home, run.id, 1)
    node.path.mkdir(parents=True)
    before = files(run.path)
    order = [each.id for each in list_runs(private_home)]
    deleted = delete(run)
    assert listed(private_home) == [OWL]
    with pytest.raises(ProblemError, match="it is not in the bin"):
        find_deleted(private_home, "no-such-run")
    assert find_deleted(private_home, "calm") == find_deleted(private_home, "last") == deleted
    assert restore(deleted) == run
    assert files(run.path) == before
    assert listed(private_home) == sorted([FOX, OWL])
    assert [each.id for each in list_runs(private_home)] == order
    assert read_labels(run).note == "keep"
    assert node.path.exists()
    remove(delete(run))
    assert not node.path.exists()
    assert deleted_runs(private_home) == []


def test_a_run_whose_id_is_taken_again_stays_in_the_bin(run: RunDir, private_home: Path) -> None:
    first = delete(run)
    again = stored_run(private_home, FOX)
    with pytest.raises(ProblemError, match="there is a run with this id again"):
        restore(first)
    second = delete(again)
    assert {first.path, second.path} == {each.path for each in deleted_runs(private_home)}
    assert find_deleted(private_home, FOX).deleted_at == max(first.deleted_at, second.deleted_at)


def test_the_bin_is_emptied_after_a_week_as_far_as_the_time_is_enough(
    run: RunDir, private_home: Path
) -> None:
    (run.checkpoints_dir / "deep").mkdir(parents=True, exist_ok=True)
    for number in range(5):
        (run.checkpoints_dir / "deep" / str(number)).write_text("x")
    (run.path / "elsewhere").symlink_to(private_home / "runs" / OWL)
    delete(run)
    empty_bin(private_home)
    assert [each.id for each in deleted_runs(private_home)] == [FOX]
    grow_old(private_home)
    empty_bin(private_home, limit_s=0.0)
    assert [each.id for each in deleted_runs(private_home)] == [FOX]
    (old,) = deleted_runs(private_home)
    assert not remove(old, limit_s=0.0)
    # A part of it is gone, so it can't be restored, and the next call removes the rest.
    assert deleted_runs(private_home) == []
    assert list((private_home / "bin").iterdir())
    empty_bin(private_home)
    assert not list((private_home / "bin").iterdir())
    assert listed(private_home) == [OWL]


def test_what_is_no_run_in_the_bin_keeps_nothing_waiting(run: RunDir, private_home: Path) -> None:
    delete(run)
    folder = private_home / "bin"
    for name in ("1795620001-fifo-0001", ".removing-1795620001-fifo-0002"):
        os.mkfifo(folder / name)
    (folder / f"{'9' * 22}-late-0001").mkdir()
    assert [each.id for each in deleted_runs(private_home)] == [FOX]
    grow_old(private_home)
    empty_bin(private_home)
    assert sorted(p.name for p in folder.iterdir()) == [
        "1795620001-fifo-0001",
        f"{'9' * 22}-late-0001",
    ]


@pytest.mark.parametrize("relative", [True, False])
def test_a_linked_run_directory_loses_nothing(
    run: RunDir, private_home: Path, tmp_path: Path, relative: bool
) -> None:
    (run.path / "engine").mkdir(exist_ok=True)
    target = tmp_path / "disk" / "fox"
    target.parent.mkdir()
    run.path.rename(target)
    run.path.symlink_to(os.path.relpath(target, run.path.parent) if relative else target)
    before = files(target)
    deleted = delete(run)
    assert files(target) == before
    assert listed(private_home) == [OWL]
    restore(deleted)
    assert listed(private_home) == sorted([FOX, OWL])
    assert files(run.path) == before
    target.rename(target.with_name("unmounted"))
    gone = move_to_bin(run)
    with pytest.raises(ProblemError, match="its disk may not be mounted"):
        remove(gone)
    target.with_name("unmounted").rename(target)
    restore(gone)
    delete(run, now=True)
    assert not target.exists()
    assert not run.path.is_symlink()


def test_a_link_to_something_else_removes_nothing(
    run: RunDir, private_home: Path, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "spec.yaml").write_bytes(run.spec_path.read_bytes())
    (project / "thesis.tex").write_text("years")
    link = private_home / "runs" / "link-1234"
    link.symlink_to(project)
    with pytest.raises(ProblemError, match="which is no directory of a run"):
        delete(RunDir(link), now=True)
    assert link.is_symlink()
    other = private_home / "runs" / "alias-1234"
    other.symlink_to(run.path)
    delete(RunDir(other), now=True)
    assert not other.is_symlink()
    assert listed(private_home)[:1] == [FOX]
    assert (project / "thesis.tex").exists()


def test_runs_on_another_file_system_have_a_bin_there(
    run: RunDir, private_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if target.parent == private_home / "bin":
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    deleted = delete(run)
    assert deleted.path.parent == private_home / "runs" / ".bin"
    assert listed(private_home) == [OWL]
    assert restore(find_deleted(private_home, FOX)) == run


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


def test_a_live_agent_or_one_in_whose_directory_something_changed_keeps_it(tmp_path: Path) -> None:
    changed, live = _ended(tmp_path, code=1), _ended(tmp_path, node=2)
    with live.lock_path.open("r+b") as lock:
        write_lock_text(lock.fileno(), live.lock_path)
    for run_dir in (changed, live):
        _make_old(run_dir)
    changed.engine_log_path(1).parent.mkdir()
    changed.engine_log_path(1).write_text("still there")
    remove_unneeded_agents(tmp_path)
    assert changed.path.exists()
    remove_agents_of(RunDir(tmp_path / "runs" / "brave-owl-0002"))
    assert live.path.exists()


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
