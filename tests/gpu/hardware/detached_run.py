"""A run that a section starts, watches and ends, and presets that it trains so."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from ltui.training.lifecycle.run_status import current_snapshot
from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import LIVE, GpuSnapshot, RankSnapshot, RunSnapshot
from ltui.training.store.database_schema import StoreError
from ltui.training.store.find_run import find_run
from ltui.training.store.run_directory import RunDir
from tests.gpu.hardware.check import Conditions
from tests.system.conftest import Ltui
from tests.waiting import wait_for

_POLL_S = 0.1
FAILURES = (AssertionError, OSError, ProblemError, subprocess.SubprocessError)
"""What a command that fails, a run that does not start and a wait that takes too long raise."""

Settings = Mapping[str, Any]
"""Values by key, for ``--set``."""


class DetachedRun:
    """A run in the background, and its snapshots."""

    def __init__(self, ltui: Ltui, command: str, name: str, *words: str) -> None:
        """Start ``ltui COMMAND --detach --name NAME WORDS``."""
        self.ltui, self.name = ltui, name
        ltui(command, "--detach", "--name", name, *words, timeout=120)
        self.run_dir: RunDir = find_run(ltui.home, name)

    def until(self, condition: Callable[[RunSnapshot], object], seconds: float) -> RunSnapshot:
        """Return the first snapshot for which ``condition`` is true.

        Raise ``AssertionError`` with the state of the run after ``seconds``.
        """

        def is_wanted(snapshot: RunSnapshot | None) -> object:
            return snapshot is not None and condition(snapshot)

        try:
            found = wait_for(self._read, wanted=is_wanted, seconds=seconds, period_s=_POLL_S)
        except AssertionError as error:
            last = self._read()
            state = "without a state" if last is None else f"{last.state.value}: {last.detail}"
            raise AssertionError(f"{self.name} is {state} after {seconds:.0f} s") from error
        assert found is not None
        return found

    def ended(self, seconds: float = 150) -> RunSnapshot:
        """Wait for the end."""
        return self.until(lambda snapshot: snapshot.state not in LIVE, seconds)

    def watch(self, seconds: float, period_s: float = 1.0) -> list[RunSnapshot]:
        """Return a snapshot every ``period_s``, the first one at once, until the run ends."""
        snapshots, ends = [self.until(bool, 10)], time.monotonic() + seconds
        while time.monotonic() < ends and snapshots[-1].state in LIVE:
            time.sleep(period_s)
            snapshots.append(self.until(bool, 10))
        return snapshots

    def kill(self) -> None:
        """Kill the run if it still runs, and wait until it has ended."""
        with contextlib.suppress(AssertionError, subprocess.SubprocessError):
            if self.until(bool, 10).state in LIVE:
                self.ltui("stop", self.name, "--kill", timeout=60)
                self.ended(60)

    def _read(self) -> RunSnapshot | None:
        """Return the current snapshot; None while it cannot be read."""
        with contextlib.suppress(StoreError, ProblemError, OSError):
            return current_snapshot(self.run_dir)
        return None


def words(settings: Settings) -> list[str]:
    """Return the arguments ``--set KEY=VALUE``."""
    return [word for key, value in settings.items() for word in ("--set", f"{key}={_yaml(value)}")]


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value)


def one_device(conditions: Conditions) -> Settings:
    """Return the settings of every run: one GPU, or one rank on the CPU in a rehearsal."""
    accelerator = "cpu" if conditions.rehearsal else "gpu"
    return {"trainer.accelerator": accelerator, "trainer.devices": 1}


def open_ltui(conditions: Conditions) -> Ltui:
    """Return the command in the section's home, with a folder in which runs start."""
    folder = conditions.home / "project"
    folder.mkdir(exist_ok=True)
    return Ltui(conditions.home, folder)


def start_preset(ltui: Ltui, preset: str, settings: Settings, name: str) -> DetachedRun:
    """Start a preset in the interpreter of this process."""
    return DetachedRun(ltui, "run", name, preset, "--python", sys.executable, *words(settings))


def has_reached(step: int) -> Callable[[RunSnapshot], bool]:
    """Return the condition that rank 0 is at ``step`` or the run has ended."""
    return lambda snapshot: snapshot.state not in LIVE or step_of(snapshot) >= step


def rank_0(snapshot: RunSnapshot) -> RankSnapshot | None:
    """Return rank 0; None before it has reported."""
    return next((rank for rank in snapshot.ranks if rank.rank == 0), None)


def step_of(snapshot: RunSnapshot) -> int:
    """Return the global step of rank 0."""
    rank = rank_0(snapshot)
    return (rank.global_step or 0) if rank is not None else 0


def gpu_of(snapshot: RunSnapshot) -> GpuSnapshot | None:
    """Return the GPU that is mapped to rank 0; None if there is none."""
    return next((gpu for gpu in snapshot.gpus if 0 in gpu.ranks), None)


def mean_of(snapshots: Sequence[RunSnapshot], reading: str) -> float | None:
    """Return the mean of a reading of rank 0's GPU; None if it is unknown in every snapshot."""
    gpus = [gpu for snapshot in snapshots if (gpu := gpu_of(snapshot)) is not None]
    values = [value for gpu in gpus if (value := getattr(gpu, reading)) is not None]
    return fmean(values) if values else None


def why_ended(snapshot: RunSnapshot) -> str:
    """Describe how the run ended, for the report."""
    return f"{snapshot.state.value}: {snapshot.detail or 'no reason given'}"
