"""A preset under ``ltui run``, watched by its snapshots while it trains."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import LIVE, GpuSnapshot, RankSnapshot, RunSnapshot
from tests.gpu.hardware.conditions import Conditions
from tests.gpu.hardware.detached_run import DetachedRun
from tests.system.conftest import Ltui

FAILURES = (AssertionError, OSError, ProblemError, subprocess.SubprocessError)
"""What a command that fails, a run that does not start and a wait that takes too long raise."""

Settings = Mapping[str, Any]
"""Values by key, for ``--set``."""


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
