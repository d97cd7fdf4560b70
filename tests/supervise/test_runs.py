"""A run from launch to end, with ranks that only pretend to train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ltui.app.cli import main
from ltui.app.command_output import EXIT_BAD_INPUT
from ltui.training.lifecycle.delete_runs import delete
from ltui.training.lifecycle.launch_run import check_start, launch
from ltui.training.lifecycle.resume_run import (
    find_start_checkpoint,
    resume,
    wait_for_supervisor_exit,
)
from ltui.training.lifecycle.run_processes import engine_identity
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.lifecycle.supervisor_client import AttemptPlan
from ltui.training.problem import Problem, ProblemError
from ltui.training.process.identity import lock_holder
from ltui.training.state.run_snapshot import RankState, RunState
from ltui.training.store.code_record import read_record
from ltui.training.supervise import supervisor as supervisor_module
from ltui.training.supervise.open_attempt import open_attempt
from tests.ltui_command import answer
from tests.required import required
from tests.store.histories import empty_log, stored_rows
from tests.supervise.conftest import ENGINE, Runs, stored_events
from tests.waiting import wait_for


def test_ranks_are_seen_and_the_run_finishes(runs: Runs) -> None:
    gate = runs.cwd / "gate"
    options = ("--steps", "150", "--save-every", "50", "--gate", str(gate), "--gate-at", "140")
    run = runs.training(*options)
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
    # More restarts are no reason to train on.
    assert main(["resume", run.id, "--restarts", "1", "--detach"]) == EXIT_BAD_INPUT
    assert resolve_snapshot(run).supervisor_pid is None
    assert ended.history_note is None
    assert runs.has_all_steps(run, 150)
    assert run.engine_log_path(1).read_text() == "engine begins\n"

    # Without its history, the ranks have ended all the same.
    wait_for_supervisor_exit(run)  # until then it answers
    empty_log(run)
    run.db_path.write_bytes(b"no database" * 1000)
    seen = resolve_snapshot(run)
    assert "damaged" in required(seen.history_note)
    assert [r.state for r in seen.ranks] == [RankState.ENDED, RankState.ENDED]


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


def test_pause_holds_the_ranks_and_continue_frees_them(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs.training()
    with pytest.raises(ProblemError, match="not paused"):
        runs.order(run, "continue")
    runs.order(run, "pause")
    paused = runs.until(run, lambda s: s.state is RunState.PAUSED)
    assert paused.verdicts == ()
    assert main(["continue", run.id]) == 0
    assert capsys.readouterr().out == f"{run.id} continued at step {paused.global_step}.\n"
    runs.more_steps(run, 10)
    ended = runs.end(run, "stop")
    states = [change["state"] for change in stored_rows(run, "states")]
    assert states[-1] == ended.state.value == "stopped"
    assert [s for s in states if s in ("paused", "running")] == ["running", "paused", "running"]


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


def test_an_interpreter_without_torch_is_named_unless_it_was_checked_before(runs: Runs) -> None:
    bare = runs.cwd / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    spec = runs.spec().with_changes(command=None, python=str(bare), config={})
    check_start(spec, interpreter_checked=True)
    with pytest.raises(ProblemError, match="lacks torch and lightning"):
        launch(spec, runs.home)
    assert list((runs.home / "runs").iterdir()) == []


HEAVY = ("numpy", "torch", "textual", "rich", "ltui.training.supervise.supervisor")


def test_nothing_heavy_is_imported_before_the_engine_is_started() -> None:
    code = (
        "import sys, ltui.app.cli, ltui.app.commands.launch, ltui.training.lifecycle.launch_run;"
        "import ltui.training.supervise.main, ltui.training.supervise.open_attempt;"
        f"print([m for m in {HEAVY} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_an_engine_without_a_supervisor_is_ended(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs.start("sh", "-c", "test $LTUI_ATTEMPT = 1 || sleep 600")
    assert runs.ended(run).state is RunState.FINISHED

    def break_once_the_engine_runs(*_: object, **__: object) -> Any:
        engines.append(wait_for(lambda: engine_identity(run, 2)))
        raise ProblemError(Problem(where=run.id, what="no supervisor."))

    engines: list[Any] = []
    monkeypatch.setattr(supervisor_module, "Supervisor", break_once_the_engine_runs)
    with pytest.raises(ProblemError, match="no supervisor"):
        open_attempt(run, AttemptPlan())
    runs.until_alone(run)
    assert engines
    assert not engines[0].alive()
    monkeypatch.undo()
    supervisor = open_attempt(run, AttemptPlan())
    assert supervisor.live.number == 3
    supervisor.request_stop(15)
    assert supervisor.run() is None
    assert runs.ended(run).state is RunState.STOPPED


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
    step = required(runs.end(first, "stop").global_step)
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


def test_a_resume_says_what_it_passed_over_and_what_changed_and_records_its_code(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs.training("--save-every", "5")
    wait_for(lambda: read_record(run, 1))
    stopped = runs.end(run, "stop")
    newest = Path(stopped.checkpoints[-1].path)
    newest.write_bytes(b"x" + newest.read_bytes()[1:])
    spec = run.read_spec()
    resume(run, spec=spec.with_changes(overrides=("trainer.max_epochs=7",)))
    again = runs.until(run, lambda s: s.attempt == 2)
    assert again.changes == ("trainer.max_epochs=7",)
    _, began = stored_events(run, "attempt")
    assert began.data["changes"] == ["trainer.max_epochs=7"]
    assert began.data["skipped"] == [f"{newest.name} has a different checksum than its manifest"]
    assert began.text.endswith(f"skipped: {began.data['skipped'][0]}.")
    record = required(wait_for(lambda: read_record(run, 2)))
    assert record.command[0] == sys.executable
    assert record.packages["python"]
    assert main(["show", run.id, "--code"]) == 0
    assert f"  {record.user} on {record.host}\n" in capsys.readouterr().out
    assert main(["show", run.id, "--code", "--json"]) == 0
    assert [entry["attempt"] for entry in answer(capsys.readouterr().out)] == [1, 2]
    runs.end(run, "kill")
