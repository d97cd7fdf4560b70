"""An attempt in a directory that somebody else gave never writes through its symbolic links."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ltui.app.cli import main
from ltui.app.command_output import EXIT_DONE
from ltui.training.lifecycle.supervisor_client import AttemptPlan, start_supervisor
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.run_directory import RunDir
from tests.supervise.conftest import Runs

ORIGINAL = b"the file of somebody else\n"


@pytest.fixture
def ended(runs: Runs) -> RunDir:
    run = runs.start("sh", "-c", "echo done")
    assert runs.ended(run).state is RunState.FINISHED
    return run


@pytest.mark.parametrize(
    "name", ["run.db", "supervisor.lock", "logs/supervisor.log", "logs/2/engine.log"]
)
@pytest.mark.parametrize("target", ["decoy", "history", "nothing"])
def test_the_next_attempt_replaces_links(
    runs: Runs, ended: RunDir, tmp_path: Path, name: str, target: str
) -> None:
    decoy = tmp_path / "decoy"
    if target == "history":
        decoy.write_bytes(ended.db_path.read_bytes())
    elif target == "decoy":
        decoy.write_bytes(ORIGINAL)
    before = decoy.read_bytes() if decoy.exists() else None
    path = ended.path / name
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(decoy)
    start_supervisor(ended, AttemptPlan())
    assert runs.ended(ended).state is RunState.FINISHED
    assert not path.is_symlink()
    assert (decoy.read_bytes() if decoy.exists() else None) == before
    assert ended.engine_log_path(2).read_text() == "done\n"


def test_labels_are_not_locked_through_a_link(ended: RunDir, tmp_path: Path) -> None:
    lock = ended.labels_path.with_suffix(".lock")
    lock.unlink(missing_ok=True)
    os.symlink(tmp_path / "elsewhere", lock)
    assert main(["tag", ended.id, "--add", "base"]) == EXIT_DONE
    assert not (tmp_path / "elsewhere").exists()
