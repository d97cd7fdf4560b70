"""The directory and the socket of a run: where they can be, copied, linked, moved or removed."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import threading
from pathlib import Path

import pytest

from ltui.training.lifecycle.delete_runs import delete
from ltui.training.lifecycle.launch_run import launch
from ltui.training.lifecycle.resume_run import resume
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.lifecycle.supervisor_client import AttemptPlan, ControlClient, NotSupervisedError
from ltui.training.problem import ProblemError
from ltui.training.process.identity import lock_holder
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.find_run import deleted_runs
from ltui.training.store.run_directory import RunDir, private_runtime_dir
from ltui.training.supervise.open_attempt import open_attempt
from tests.live_processes import wait_until_gone
from tests.required import required
from tests.supervise.conftest import Runs
from tests.waiting import wait_for


@pytest.fixture
def deep(runs: Runs) -> Path:
    """A home whose path is too long for that of a socket."""
    home = runs.home / ("d" * 60) / ("e" * 60)
    (home / "runs").mkdir(parents=True)
    return home


def test_a_live_run_is_its_users_alone_has_one_supervisor_and_is_not_deleted(runs: Runs) -> None:
    run = runs.training()
    modes = {p: stat.S_IMODE(p.stat().st_mode) for p in (run.path, *run.path.rglob("*"))}
    open_to_others = [str(p) for p, mode in modes.items() if mode & 0o077]
    assert open_to_others == []
    with pytest.raises(ProblemError, match="another supervisor"):
        open_attempt(run, AttemptPlan(recover=True))
    with pytest.raises(ProblemError, match="Stop it first"):
        delete(run)
    runs.end(run, "kill")
    delete(run, now=True)
    assert list(run.path.parent.iterdir()) == []
    assert deleted_runs(runs.home) == []


def test_a_home_that_cannot_hold_a_run(runs: Runs) -> None:
    shutil.rmtree(runs.home / "runs")
    (runs.home / "runs").write_text("a file")
    with pytest.raises(ProblemError, match="cannot be written"):
        launch(runs.spec("true"), runs.home)
    (runs.home / "runs").unlink()
    (runs.home / "runs").mkdir()


def test_a_folder_for_sockets_that_cannot_be_used_leaves_no_run(
    runs: Runs, deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(runs.cwd))
    monkeypatch.setattr("tempfile.tempdir", None)
    (runs.cwd / f"ltui-{os.getuid()}").symlink_to(runs.home)
    with pytest.raises(ProblemError, match="it is a link"):
        launch(runs.spec("sleep", "300"), deep)
    assert not list((deep / "runs").iterdir())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
def test_a_socket_or_folder_of_another_user_is_not_used(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runs.cwd))
    assert private_runtime_dir() == runs.cwd / "ltui"
    os.chown(runs.cwd, 65534, 65534)
    assert private_runtime_dir() != runs.cwd / "ltui"
    run_dir = RunDir(runs.home / "runs" / "brave-owl-0001")
    run_dir.path.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        os.seteuid(65534)
        try:
            listener.bind(f"\0{run_dir.id}")
            listener.listen()
        finally:
            os.seteuid(0)
        monkeypatch.setattr(ControlClient, "_address", lambda _: f"\0{run_dir.id}")
        with pytest.raises(NotSupervisedError, match="belongs to another user"):
            ControlClient(run_dir).request({"cmd": "stop"})
    os.chown(runs.cwd, 0, 0)


def test_the_socket_of_a_run_in_a_deep_home_is_removed_with_the_run_only(
    runs: Runs, deep: Path
) -> None:
    """Not with that of a copied home; and although its supervisor was killed."""
    run = launch(runs.spec("sleep", "300"), deep)
    far = Path(os.readlink(run.socket_path))
    copied_home = deep.parent.with_name("c" * 60) / deep.name
    # The supervisor writes while this copies: a file that is not complete yet may be gone.
    shutil.copytree(deep, copied_home, symlinks=True, ignore=shutil.ignore_patterns(".*"))
    delete(RunDir(copied_home / "runs" / run.id))
    assert ControlClient(run).request({"cmd": "ping"})["ok"]
    runs.kill_everything(run)
    assert far.is_socket()
    runs.until(run, lambda s: s.state is RunState.LOST)
    delete(run)
    assert not far.exists()
    assert not list((deep / "runs").iterdir())


@pytest.mark.parametrize("folder", ["", "d" * 100])
def test_a_copy_of_a_live_run_does_not_reach_its_supervisor(runs: Runs, folder: str) -> None:
    """The lock of a copy names the supervisor of the original, and its socket may link to it."""
    home = runs.home / folder
    (home / "runs").mkdir(parents=True, exist_ok=True)
    run = launch(runs.spec(*runs.fake_command()), home)
    runs.until(run, lambda s: (s.global_step or 0) > 5)
    copy = RunDir(run.path.with_name("copy-0001"))
    linked = run.socket_path.is_symlink()
    # A file that is not complete yet may be gone.
    unlinked = shutil.ignore_patterns(".*", *([] if linked else ["*.sock"]))
    shutil.copytree(run.path, copy.path, symlinks=True, ignore=unlinked)
    if not linked:
        copy.socket_path.symlink_to(run.socket_path)
    assert lock_holder(copy.lock_path) is None
    snapshot = resolve_snapshot(copy)
    assert (snapshot.id, snapshot.state) == (copy.id, RunState.LOST)
    with pytest.raises(NotSupervisedError, match="it has no supervisor"):
        runs.order(copy, "stop")
    delete(copy)
    assert ControlClient(run).request({"cmd": "ping"})["ok"]
    runs.end(run, "kill")
    assert not os.path.lexists(run.socket_path)
    with pytest.raises(NotSupervisedError):
        runs.order(run, "kill")


def test_hard_links_to_a_run_reach_and_change_nothing_of_it(runs: Runs) -> None:
    """``cp -al`` gives a copy the very lock, socket, history and logs of the original."""
    run = runs.training()
    runs.order(run, "checkpoint")
    runs.until(run, lambda s: s.checkpoints)
    copy = _hard_links(run, "copy-0001")
    assert lock_holder(copy.lock_path) is None
    assert resolve_snapshot(copy).state is RunState.LOST
    with pytest.raises(NotSupervisedError, match="it has no supervisor"):
        runs.order(copy, "stop")
    resume(copy)
    runs.until(copy, lambda s: s.attempt == 2 and s.state is RunState.RUNNING)
    stopped = runs.end(run, "stop")
    assert runs.steps(run) == list(range(1, required(stopped.global_step) + 1))
    later = _hard_links(run, "copy-0002")
    files = (run.db_path, run.lock_path, run.supervisor_log_path, run.shim_log_path, run.spec_path)
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in files]
    resume(later)
    runs.until(later, lambda s: s.attempt == 2 and s.state is RunState.RUNNING)
    after = [(path.read_bytes(), path.stat().st_mtime_ns) for path in files]
    assert after == before
    resume(run)
    for resumed in (copy, later, run):
        runs.until(resumed, lambda s: s.attempt == 2 and s.state is RunState.RUNNING)
    for resumed in (copy, later):
        runs.end(resumed, "kill")
        delete(resumed, now=True)
    ended = runs.end(run, "stop")
    assert runs.steps(run) == list(range(1, required(ended.global_step) + 1))


def _hard_links(run: RunDir, run_id: str) -> RunDir:
    copy = run.path.with_name(run_id)
    subprocess.run(("cp", "-al", run.path, copy), check=True)
    return RunDir(copy)


def test_a_run_whose_directory_is_removed_ends(runs: Runs) -> None:
    run = runs.training()
    processes = runs.processes(run)
    assert len(processes) >= 4, "supervisor, shim and ranks"

    def remove() -> bool:
        # Its processes may create a file in it meanwhile.
        shutil.rmtree(run.path, ignore_errors=True)
        return not run.path.exists()

    wait_for(remove, seconds=30)
    wait_until_gone(lambda: [p for p in processes if p.is_running()], 60)
    assert not run.spec_path.exists()


def test_a_run_whose_home_is_moved_is_supervised_there(
    runs: Runs, private_home: Path, tmp_path: Path
) -> None:
    run = runs.training()
    processes = runs.processes(run)
    before = runs.until(run, lambda s: s.supervisor_pid)
    private_home.rename(tmp_path / "moved")
    (run.path / "checkpoints").mkdir(parents=True)  # as a rank does that saves there
    moved = RunDir(tmp_path / "moved" / "runs" / run.id)
    pid = before.supervisor_pid
    runs.until(moved, lambda s: s.supervisor_pid not in (None, pid) and s.detail is None)
    runs.more_steps(moved)
    runs.order(moved, "kill")
    ended = runs.ended(moved, 30)
    assert ended.state is RunState.STOPPED
    assert runs.steps(moved) == list(range(1, len(runs.steps(moved)) + 1))
    wait_until_gone(lambda: [p for p in processes if p.is_running()], 60)


def test_a_client_waits_for_the_link_to_a_socket_with_a_long_path(runs: Runs, deep: Path) -> None:
    """The supervisor makes it some milliseconds after it has the lock."""
    run = launch(runs.spec("sleep", "300"), deep)
    target = os.readlink(run.socket_path)
    run.socket_path.unlink()
    threading.Timer(0.5, os.symlink, (target, run.socket_path)).start()
    assert ControlClient(run).request({"cmd": "ping"}, timeout_s=30)["ok"]
    runs.end(run, "kill")
