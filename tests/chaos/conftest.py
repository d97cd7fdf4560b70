"""Named cases on runs of fake ranks; ``everywhere`` marks what only ``make chaos`` runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ltui.training.store.run_directory import RunDir
from tests.chaos.process_tree import kill_together, live_processes
from tests.ltui_command import LTUI, answer, run_ltui
from tests.supervise.conftest import Runs, runs, small_disk

__all__ = ["runs", "small_disk"]

everywhere = pytest.mark.skipif(
    not os.environ.get("LTUI_CHAOS"), reason="takes long: make chaos runs it"
)


class Command:
    """``ltui`` as a process, in the home of the test."""

    def __init__(self, home: Path, cwd: Path) -> None:
        self.environ = {**os.environ, "LTUI_HOME": str(home)}
        self.cwd = cwd

    def argv(self, *words: str) -> list[str]:
        return [*LTUI, *words]

    def __call__(self, *words: str, code: int | None = 0) -> str:
        """Both outputs together; asserts the exit code."""
        done = run_ltui(*words, cwd=self.cwd, environment=self.environ, code=code)
        return done.stdout + done.stderr

    def show(self, run: RunDir) -> dict[str, Any]:
        document: dict[str, Any] = answer(self("show", run.id, "--json"))
        return document


@pytest.fixture
def ltui(private_home: Path, tmp_path: Path) -> Command:
    return Command(private_home, tmp_path)


@pytest.fixture
def saved_run(runs: Runs) -> RunDir:
    """A run in training with a checkpoint or two."""
    return runs.training("--save-every", "5", step=12)


def kill_roles(run: RunDir, *roles: str) -> None:
    """SIGKILL to everything of the run at once, or to these."""
    while remaining := [a for a in live_processes(run) if not roles or a.role in roles]:
        kill_together(remaining)
        if roles:
            return
