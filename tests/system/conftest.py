"""The program as a person runs it: ``ltui`` as a process, real ranks, real signals."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ltui.training.json_codec import to_json
from ltui.training.lifecycle.run_status import current_snapshot
from ltui.training.state import run_snapshot
from ltui.training.store.find_run import find_run
from tests.live_processes import processes_with, wait_until_gone
from tests.ltui_command import LTUI, answer, run_ltui
from tests.waiting import wait_for

SCRIPTS = Path(__file__).parent / "scripts"
LIVE = {state.value for state in run_snapshot.LIVE}


class Ltui:
    """Runs the command in one home and remembers what it started."""

    def __init__(self, home: Path, cwd: Path) -> None:
        self.home = home
        self.cwd = cwd
        self.environment = {**os.environ, "LTUI_HOME": str(home)}

    def argv(self, *arguments: str) -> list[str]:
        return [*LTUI, *arguments]

    def __call__(
        self, *arguments: str, check: int | None = 0, timeout: float = 240
    ) -> subprocess.CompletedProcess[str]:
        return run_ltui(
            *arguments, cwd=self.cwd, environment=self.environment, code=check, timeout=timeout
        )

    def json(self, *arguments: str) -> Any:
        return answer(self(*arguments, "--json").stdout)

    def steps_on_record(self, rank: int = 0, metric: str = "train/loss") -> list[int]:
        """Steps of which the history holds that rank's value of a metric."""
        document = self("export", "last", "--metric", metric, "--format", "json").stdout
        return [row["step"] for row in json.loads(document) if row["rank"] == rank]

    def show(self, run: str = "last") -> dict[str, Any]:
        document: dict[str, Any] = self.json("show", run)
        return document

    def wait(
        self, wanted: Callable[[dict[str, Any]], object], seconds: float = 180, run: str = "last"
    ) -> dict[str, Any]:
        """The first snapshot of which ``wanted`` holds, as ``ltui show`` reads it.

        It is read in this process: a command for every look takes a core from the ranks.
        """

        def read() -> dict[str, Any]:
            document = to_json(current_snapshot(find_run(self.home, run)))
            snapshot: dict[str, Any] = json.loads(json.dumps(document))
            return snapshot

        return wait_for(read, wanted=wanted, seconds=seconds, period_s=0.2)

    def wait_for_step(self, step: int, seconds: float = 180) -> dict[str, Any]:
        return self.wait(
            lambda s: (
                s["world_size"]
                and len(s["ranks"]) == s["world_size"]
                and all((r["global_step"] or 0) >= step for r in s["ranks"])
            ),
            seconds,
        )

    def ended(self) -> dict[str, Any]:
        """The snapshot of the last run once it has ended and left no process."""
        snapshot = self.wait(lambda s: s["state"] not in LIVE)
        self.wait_until_alone()
        return snapshot

    def processes(self) -> list[psutil.Process]:
        """Everything that lives in this home, whoever its parent is."""
        return processes_with("LTUI_HOME", self.home)

    def wait_until_alone(self, seconds: float = 90) -> None:
        wait_until_gone(self.processes, seconds)


@pytest.fixture
def ltui(private_home: Path, tmp_path: Path) -> Iterator[Ltui]:
    project = tmp_path / "project"
    project.mkdir()
    command = Ltui(private_home, project)
    yield command
    for process in command.processes():
        try:
            process.kill()
        except psutil.Error:
            continue


@pytest.fixture
def slow_quickstart() -> list[str]:
    """``quickstart`` stretched so that a test has time to act on it."""
    settings = ("trainer.max_epochs=2000", "data.init_args.loader=torch")
    return ["run", "quickstart", "--detach", *(w for s in settings for w in ("--set", s))]
