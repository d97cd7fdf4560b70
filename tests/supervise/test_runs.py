"""A run from launch to end, with ranks that only pretend to train."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ltui.app.cli import main
from ltui.training.lifecycle.delete_runs import delete
from ltui.training.lifecycle.launch_run import launch
from ltui.training.lifecycle.resume_run import (
    find_start_checkpoint,
    resume,
    wait_for_supervisor_exit,
)
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.lifecycle.supervisor_client import AttemptPlan, ControlClient, NotSupervisedError
from ltui.training.problem import ProblemError
from ltui.training.process.identity import lock_holder
from ltui.training.state.run_snapshot import RankState, RunState
from ltui.training.store.find_run import deleted_runs
from ltui.training.store.history_reader import RunStore
from ltui.training.store.run_directory import RunDir, private_runtime_dir
from ltui.training.supervise.open_attempt import open_attempt
from tests.required import required
from tests.store.histories import stored_rows
from tests.supervise.conftest import ENGINE, Runs


def test_ranks_are_seen_and_the_run_finishes(runs: Runs) -> None:
    gate = runs.cwd / "gate"
    run = runs.training("--steps", "150", "--gate", str(gate), "--gate-at", "140")
    live = resolve_snapshot(run)
    assert live.supervisor_pid == required(lock_holder(run.lock_path)).pid
    assert [r.state for r in live.ranks] == [RankState.OK, RankState.OK]
    assert (live.world_size, live.max_steps) == (2, 150)
    measured = runs.until(run, lambda s: s.ranks[0].cpu_percent is not None)
    assert required(measured.ranks[0].rss_bytes) > 1_000_000
    gate.touch()
    ended = runs.ended(run)
    assert (ended.state, ended.exit_code) == (RunState.FINISHED, 0)
    assert ended.detail == "finished at step 150"
    with pytest.raises(ProblemError, match="the run is finished") as refused:
        resume(run)
    remedy = str(refused.value.problems[0].remedy)
    assert "ltui exec" in remedy
    assert "--set" not in remedy
    assert resolve_snapshot(run).supervisor_pid is None
    assert ended.history_note is None
    assert runs.has_all_steps(run, 150)
    assert run.engine_log_path(1).read_text() == "engine begins\n"


def test_ranks_of_a_finished_run_without_a_history_have_ended(runs: Runs) -> None:
    run = runs.fake("--steps", "20")
    assert runs.ended(run).state is RunState.FINISHED
    wait_for_supervisor_exit(run)  # until then it answers
    run.db_path.write_bytes(b"no database" * 1000)
    seen = resolve_snapshot(run)
    assert "damaged" in required(seen.history_note)
    assert [r.state for r in seen.ranks] == [RankState.ENDED, RankState.ENDED]


def test_files_of_a_run_are_the_users_alone(runs: Runs) -> None:
    run = runs.training()
    modes = {p: stat.S_IMODE(p.stat().st_mode) for p in (run.path, *run.path.rglob("*"))}
    open_to_others = [str(p) for p, mode in modes.items() if mode & 0o077]
    assert open_to_others == []
    runs.end(run, "kill")


def test_stop_leaves_a_checkpoint_and_resume_goes_on(runs: Runs) -> None:
    run = runs.training()
    stopped = runs.end(run, "stop")
    assert stopped.state is RunState.STOPPED
    assert stopped.detail == f"stopped at step {stopped.global_step}, checkpoint verified"
    (checkpoint,) = stopped.checkpoints
    assert checkpoint.ok
    resume(run)
    again = runs.until(run, lambda s: (s.global_step or 0) > required(stopped.global_step) + 5)
    assert again.attempt == 2
    with pytest.raises(ProblemError, match="so it cannot be resumed"):
        resume(run)
    twice = runs.end(run, "stop")
    assert runs.steps(run) == list(range(1, required(twice.global_step) + 1))


def test_steps_that_were_redone_replace_the_earlier_ones(runs: Runs) -> None:
    run = runs.training()
    runs.order(run, "checkpoint")
    saved = runs.until(run, lambda s: s.checkpoints).checkpoints[0]
    runs.until(run, lambda s: (s.global_step or 0) > saved.global_step + 20)
    killed = runs.end(run, "kill")
    assert killed.state is RunState.STOPPED
    assert "killed on request" in required(killed.detail)
    assert f"the last checkpoint is of step {saved.global_step}" in required(killed.detail)
    resume(run)
    runs.until(run, lambda s: s.attempt == 2 and (s.global_step or 0) > saved.global_step + 5)
    ended = runs.end(run, "stop")
    assert ended.state is RunState.STOPPED
    assert runs.steps(run) == list(range(1, required(ended.global_step) + 1))


def test_pause_holds_the_ranks_and_continue_frees_them(runs: Runs) -> None:
    run = runs.training()
    with pytest.raises(ProblemError, match="not paused"):
        runs.order(run, "continue")
    runs.order(run, "pause")
    paused = runs.until(run, lambda s: s.state is RunState.PAUSED)
    assert paused.verdicts == ()
    runs.order(run, "continue")
    runs.until(
        run,
        lambda s: (
            s.state is RunState.RUNNING and (s.global_step or 0) > required(paused.global_step) + 10
        ),
    )
    ended = runs.end(run, "stop")
    states = [change["state"] for change in stored_rows(run, "states")]
    assert states[-1] == ended.state.value == "stopped"
    assert [s for s in states if s in ("paused", "running")] == ["running", "paused", "running"]


def test_continue_names_the_step_of_the_pause(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs.training()
    runs.order(run, "pause")
    paused = runs.until(run, lambda s: s.state is RunState.PAUSED)
    assert main(["continue", run.id]) == 0
    assert capsys.readouterr().out == f"{run.id} continued at step {paused.global_step}.\n"
    runs.end(run, "kill")


def test_a_failed_rank_is_named_with_its_exception(runs: Runs) -> None:
    run = runs.fake("--fail-at", "20", "--fail-rank", "1")
    ended = runs.ended(run)
    assert ended.state is RunState.FAILED
    assert ended.detail == "rank 1 raised RuntimeError: boom at last at step 20"
    assert ended.ranks[1].state is RankState.DEAD
    with pytest.raises(ProblemError, match="nothing to resume from"):
        resume(run)


def test_a_script_that_is_not_lightning(runs: Runs) -> None:
    go = runs.cwd / "go"
    wait = f"until [ -e {go} ]; do sleep 0.1; done"
    run = runs.start("bash", "-c", f"echo plainly; sleep 300 & {wait}; exit 3")
    seen = runs.until(run, lambda s: s.ranks and s.ranks[0].rss_bytes)
    assert seen.ranks[0].pid
    with pytest.raises(ProblemError, match=r"ranks have not begun|sends no telemetry"):
        runs.order(run, "pause")  # which of both depends on how long it has run
    go.touch()
    ended = runs.ended(run)
    assert (ended.state, ended.exit_code) == (RunState.FAILED, 3)
    assert ended.detail == "the command exited with code 3: plainly"
    assert run.engine_log_path(1).read_text() == "plainly\n"


def test_ranks_without_telemetry_are_found_by_their_environment(runs: Runs) -> None:
    run = runs.start("bash", "-c", "RANK=0 sleep 300 & RANK=1 sleep 300 & wait")
    seen = runs.until(run, lambda s: len(s.ranks) == 2)
    assert [r.rank for r in seen.ranks] == [0, 1]
    assert runs.end(run, "stop", timeout_s=5).state is RunState.STOPPED


def test_a_rank_that_fails_before_its_telemetry_is_named(runs: Runs) -> None:
    summary = (
        "echo one gives up; "
        "echo 'E1121 05:21 7 torch/distributed/elastic/multiprocessing/api.py:1] failed'; "
        "echo 'ChildFailedError: '; echo 'train.py FAILED'; "
        "echo 'Root Cause (first observed failure):'; "
        "echo '  rank      : 1 (local_rank: 1)'; echo '  exitcode  : 4 (pid: 7)'; exit 1"
    )
    run = runs.start("bash", "-c", f"RANK=0 sleep 2 & wait; {summary}")
    ended = runs.ended(run)
    assert ended.detail == "rank 1 exited with code 4: one gives up"
    late = next(r for r in ended.ranks if r.rank == 1)
    assert (late.state, late.exit_code, late.pid) == (RankState.DEAD, 4, None)


def test_a_second_supervisor_refuses(runs: Runs) -> None:
    run = runs.training()
    with pytest.raises(ProblemError, match="another supervisor"):
        open_attempt(run, AttemptPlan(recover=True))
    with pytest.raises(ProblemError, match="Stop it first"):
        delete(run)
    runs.end(run, "kill")
    delete(run, now=True)
    assert list(run.path.parent.iterdir()) == []
    assert deleted_runs(runs.home) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"command": ("no-such-command",)}, "there is no such command"),
        ({"command": None, "python": "/no/such/python"}, "cannot be started"),
        ({"cwd": "/no/such/folder"}, "does not exist"),
    ],
)
def test_what_cannot_start_leaves_no_run(runs: Runs, change: dict[str, object], words: str) -> None:
    with pytest.raises(ProblemError, match=words):
        launch(runs.spec("true").with_changes(**change), runs.home)
    assert list((runs.home / "runs").iterdir()) == []


def test_an_interpreter_without_torch_is_named(runs: Runs) -> None:
    bare = runs.cwd / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    spec = runs.spec().with_changes(command=None, python=str(bare), config={})
    with pytest.raises(ProblemError, match="lacks torch and lightning"):
        launch(spec, runs.home)
    assert list((runs.home / "runs").iterdir()) == []


def test_a_home_that_cannot_hold_a_run(runs: Runs) -> None:
    shutil.rmtree(runs.home / "runs")
    (runs.home / "runs").write_text("a file")
    with pytest.raises(ProblemError, match="cannot be written"):
        launch(runs.spec("true"), runs.home)
    (runs.home / "runs").unlink()
    (runs.home / "runs").mkdir()


def test_a_home_too_deep_for_a_socket(runs: Runs) -> None:
    deep = runs.home / ("d" * 60) / ("e" * 60)
    (deep / "runs").mkdir(parents=True)
    run = launch(runs.spec("sleep", "300"), deep)
    assert run.socket_path.is_symlink()
    assert ControlClient(run).request({"cmd": "ping"})["ok"]
    runs.end(run, "kill")
    assert not os.path.lexists(run.socket_path)
    with pytest.raises(NotSupervisedError):
        runs.order(run, "kill")


def test_a_folder_for_sockets_that_cannot_be_used_leaves_no_run(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = runs.home / ("d" * 60) / ("e" * 60)
    (deep / "runs").mkdir(parents=True)
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


def test_a_deleted_run_leaves_no_socket(runs: Runs) -> None:
    """The socket of a killed supervisor is removed, also outside the run directory."""
    deep = runs.home / ("d" * 60) / ("e" * 60)
    (deep / "runs").mkdir(parents=True)
    run = launch(runs.spec("sleep", "300"), deep)
    far = Path(os.readlink(run.socket_path))
    assert far.is_socket()
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


def test_a_run_of_a_copied_home_leaves_the_socket_of_the_original(runs: Runs) -> None:
    home, copied_home = (runs.home / f"{letter * 60}" / ("e" * 60) for letter in "dc")
    (home / "runs").mkdir(parents=True)
    run = launch(runs.spec("sleep", "300"), home)
    assert run.socket_path.is_symlink()
    # The supervisor writes while this copies: a file that is not complete yet may be gone.
    unfinished = shutil.ignore_patterns(".*")
    shutil.copytree(home, copied_home, symlinks=True, ignore=unfinished)
    delete(RunDir(copied_home / "runs" / run.id))
    assert ControlClient(run).request({"cmd": "ping"})["ok"]
    runs.end(run, "kill")


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


def test_the_engine_gets_the_users_environment_and_ours(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = runs.cwd / "environment.json"
    code = f"import json, os; json.dump(dict(os.environ), open({str(out)!r}, 'w'))"
    with monkeypatch.context() as environment:
        environment.setenv("PYTHONPATH", "/mine")
        run = runs.start(sys.executable, "-c", code)
    runs.ended(run)
    given = json.loads(out.read_text())
    folder, mine = given["PYTHONPATH"].split(os.pathsep)
    assert mine == "/mine"
    assert (Path(folder) / "ltui/training/rank/callback_factory.py").exists()
    assert given["LTUI_RUN_DIR"] == str(run.path)
    assert given["LTUI_ATTEMPT"] == "1"
    assert "LTUI_RESUME_FROM" not in given
    assert given["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_a_run_begins_with_another_runs_checkpoint(runs: Runs) -> None:
    first = runs.training()
    step = runs.end(first, "stop").global_step
    assert step
    with pytest.raises(ProblemError, match=f"There are checkpoints of steps {step}"):
        find_start_checkpoint(runs.home, f"{first.id}:1")
    source, info = find_start_checkpoint(runs.home, f"{first.id}:{step}")
    assert (source, info.global_step) == (first, step)
    # Fake ranks refuse weights other than those of the step.
    spec = runs.spec(sys.executable, str(ENGINE), "2")
    second = launch(spec, runs.home, find_start_checkpoint(runs.home, first.id)[1])
    delete(first, now=True)
    runs.until(second, lambda s: (s.global_step or 0) > step + 5)
    ended = runs.end(second, "stop")
    assert ended.state is RunState.STOPPED
    assert runs.steps(second)[0] == step + 1
    assert [c.reason for c in ended.checkpoints] == ["from", "stop"]
    assert [c.ok for c in ended.checkpoints] == [True, True]


def test_a_resume_says_what_it_passed_over_and_what_changed(runs: Runs) -> None:
    run = runs.training("--save-every", "5")
    stopped = runs.end(run, "stop")
    newest = Path(stopped.checkpoints[-1].path)
    newest.write_bytes(b"x" + newest.read_bytes()[1:])
    spec = run.read_spec()
    resume(run, spec=spec.with_changes(overrides=("trainer.max_epochs=7",)))
    again = runs.until(run, lambda s: s.attempt == 2)
    assert again.changes == ("trainer.max_epochs=7",)
    with RunStore(run) as store:
        (_, began) = [e for e in store.events() if e.kind == "attempt"]
    assert began.data["changes"] == ["trainer.max_epochs=7"]
    assert began.data["skipped"] == [f"{newest.name} has a different checksum than its manifest"]
    assert began.text.endswith(f"skipped: {began.data['skipped'][0]}.")
    runs.end(run, "kill")
