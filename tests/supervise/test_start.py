"""The way from a command to its engine: short, and nothing is left where it breaks off."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from ltui.training.lifecycle.launch_run import check_start
from ltui.training.lifecycle.run_processes import engine_identity
from ltui.training.lifecycle.supervisor_client import AttemptPlan
from ltui.training.problem import Problem, ProblemError
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.code_record import read_record
from ltui.training.supervise import supervisor as supervisor_module
from ltui.training.supervise.open_attempt import open_attempt
from tests.ltui_command import run_ltui
from tests.waiting import wait_for

from .conftest import Runs

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


def test_an_interpreter_that_was_checked_is_not_asked_again(runs: Runs) -> None:
    spec = runs.spec("true").with_changes(command=None, python="/no/such/python")
    check_start(spec, interpreter_checked=True)
    with pytest.raises(ProblemError, match="cannot be started"):
        check_start(spec)


def test_the_code_of_each_attempt_is_recorded(runs: Runs) -> None:
    run = runs.training()
    record = wait_for(lambda: read_record(run, 1), wanted=lambda r: r is not None, seconds=60)
    assert record is not None
    assert record.command[0] == sys.executable
    assert record.packages["python"]
    done = run_ltui("show", run.id, "--code", code=0)
    assert f"  {record.user} on {record.host}\n" in done.stdout
    document = json.loads(run_ltui("show", run.id, "--code", "--json", code=0).stdout)
    assert [entry["attempt"] for entry in document] == [1]
    runs.end(run, "kill")
