"""Runs of fake ranks: real supervisors, shims, sockets and signals, without torch."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ltui.training.config.run_spec import RunSpec
from ltui.training.diagnosis.evidence import Diagnosis
from ltui.training.lifecycle.launch_run import launch
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.lifecycle.supervisor_client import ControlClient
from ltui.training.state.run_snapshot import LIVE, RunSnapshot, RunState
from ltui.training.store.history_reader import RunStore, StoredEvent
from ltui.training.store.run_directory import RunDir, ltui_home, new_run_id
from ltui.training.supervise.health_monitor import evidence_dir
from tests.live_processes import processes_with, wait_until_gone
from tests.required import required
from tests.small_disk import mount_small_disk, unmount
from tests.waiting import wait_for

ENGINE = Path(__file__).with_name("fake_engine.py")


class Runs:
    """Starts runs in one home and waits for what they become."""

    def __init__(self, home: Path, cwd: Path) -> None:
        self.home = home
        self.cwd = cwd

    def spec(self, *command: str) -> RunSpec:
        run_id, name = new_run_id(self.home, None)
        return RunSpec(
            id=run_id, name=name, created_at=time.time(), cwd=str(self.cwd),
            python=sys.executable, command=command, nproc=0,
        )  # fmt: skip

    def start(self, *command: str) -> RunDir:
        return launch(self.spec(*command), self.home)

    def fake(self, *options: str, ranks: int = 2) -> RunDir:
        return self.start(*self.fake_command(*options, ranks=ranks))

    def fake_command(self, *options: str, ranks: int = 2) -> tuple[str, ...]:
        return (sys.executable, str(ENGINE), str(ranks), *options)

    def training(self, *options: str, ranks: int = 2, step: int = 5) -> RunDir:
        """A running run of fake ranks that all have passed ``step``."""
        run = self.fake(*options, ranks=ranks)
        self.until(
            run,
            # Under load, the state follows the steps of the ranks a tick later.
            lambda s: (
                s.state is RunState.RUNNING
                and len(s.ranks) == ranks
                and all((r.global_step or 0) >= step for r in s.ranks)
            ),
        )
        return run

    def until(
        self, run: RunDir, wanted: Callable[[RunSnapshot], object], seconds: float = 120
    ) -> RunSnapshot:
        return wait_for(
            lambda: resolve_snapshot(run), wanted=wanted, seconds=seconds, period_s=0.05
        )

    def ended(self, run: RunDir, seconds: float = 120) -> RunSnapshot:
        snapshot = self.until(run, lambda s: s.state not in LIVE, seconds)
        self.until_alone(run)
        return snapshot

    def order(self, run: RunDir, command: str, **fields: object) -> None:
        ControlClient(run).request({"cmd": command, **fields})

    def end(self, run: RunDir, command: str, **fields: object) -> RunSnapshot:
        """Stop or kill a run. Return its end."""
        self.order(run, command, **fields)
        return self.ended(run)

    def processes(self, run: RunDir) -> list[psutil.Process]:
        """Everything of the run: supervisor, shim, engine, ranks and what they started."""
        return processes_with("LTUI_RUN_DIR", run.path, word=str(run.path))

    def kill_everything(self, run: RunDir) -> None:
        """At once, as a power cut does: nobody sees another end."""
        processes = self.processes(run)
        for process in processes:
            process.suspend()
        for process in processes:
            process.kill()
        self.until_alone(run)

    def until_alone(self, run: RunDir, seconds: float = 90) -> None:
        wait_until_gone(lambda: self.processes(run), seconds)

    def replace_supervisor(self, run: RunDir) -> RunSnapshot:
        """Kill the supervisor. Return a snapshot of the one that the shim starts, or of the end."""
        killed = required(self.until(run, lambda s: s.supervisor_pid).supervisor_pid)
        os.kill(killed, signal.SIGKILL)
        return self.until(
            run, lambda s: s.supervisor_pid not in (None, killed) or s.state not in LIVE
        )

    def more_steps(self, run: RunDir, steps: int = 20) -> RunSnapshot:
        """Wait until a running run has trained ``steps`` more."""
        begin = self.until(run, lambda s: s.global_step is not None and s.state is RunState.RUNNING)
        goal = required(begin.global_step) + steps
        return self.until(run, lambda s: (s.global_step or 0) > goal)

    def has_all_steps(self, run: RunDir, last: int | None) -> bool:
        """Return True if the history has each step of both ranks once, up to the last."""
        return self.steps(run, 0) == self.steps(run, 1) == list(range(1, required(last) + 1))

    def steps(self, run: RunDir, rank: int = 0) -> list[int]:
        with RunStore(run) as store:
            return [row.step for row in store.export(["train/loss"]) if row.rank == rank]


def stored_events(run: RunDir, *kinds: str) -> list[StoredEvent]:
    """Return the events of these kinds, the oldest first."""
    with RunStore(run) as store:
        return [event for event in store.events() if event.kind in kinds]


def read_diagnoses(run: RunDir, attempt: int) -> list[Diagnosis]:
    """Return the stored diagnoses of an attempt, the oldest first."""
    paths = sorted(evidence_dir(run, attempt).glob("[0-9]*.json"))
    return [Diagnosis.from_document(json.loads(path.read_bytes())) for path in paths]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """``small_disk(40)`` mounts an empty disk of 40 MB with a folder for runs."""
    disk = tmp_path / "disk"

    def mounted(size_mb: int, **limits: int) -> Path:
        mount_small_disk(disk, size_mb, **limits)
        (disk / "runs").mkdir()
        return disk

    yield mounted
    if disk.is_mount():
        unmount(disk)  # lazily: when the last process has left it


@pytest.fixture
def runs(private_home: Path, tmp_path: Path) -> Iterator[Runs]:
    started = Runs(ltui_home(), tmp_path)
    yield started
    for path in (private_home / "runs").iterdir():
        for process in started.processes(RunDir(path)):
            if process.pid != os.getpid():
                process.kill()
