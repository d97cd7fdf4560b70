"""The run screen with simulated machines. The header states that they are simulated."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
from textual.screen import Screen

from ltui.app.live.frame import Frame, ResolvedVerdict
from ltui.app.live.gpu_history import GpuHistory
from ltui.app.screens.run import RunScreen
from ltui.app.scripted_machines import (
    LABEL,
    SAMPLES_PER_STEP,
    STEP_S,
    Cluster,
    loss_at,
    snapshot_at,
)
from ltui.app.textual_app import LtuiApp
from ltui.training.state.run_snapshot import RankState, RunSnapshot, Verdict
from ltui.training.store.curve_reader import Curve
from ltui.training.store.run_directory import RunDir
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import LogLine

NOWHERE = Path("/nonexistent")
CURVE_POINTS = 2000
"""Maximum number of points of a curve: the last steps."""
LOG_LINES = 2000
"""Maximum number of log lines that are kept."""
LOG_EVERY_S = 1.0
"""Seconds between two log lines of the simulated ranks."""
REFUSED = frozenset(
    {"stop", "stop_when", "pause", "checkpoint", "kill", "diagnose", "profile", "resume", "rerun"}
)


class SimulatedMachines:
    """A source of frames of a simulated run."""

    def __init__(
        self,
        cluster: Cluster,
        clock: Callable[[], float] = time.time,
        *,
        starts_at_s: float = 0.0,
    ) -> None:
        """``clock``: returns the unix time. The script starts at its second ``starts_at_s``."""
        self._cluster = cluster
        self._started_at = clock() - starts_at_s
        self._gpu_history = GpuHistory()
        self._log: deque[LogLine] = deque(maxlen=LOG_LINES)
        self._log_count = 0
        self._logged_at = -math.inf
        self._verdicts: dict[str, Verdict] = {}
        self._resolved: deque[ResolvedVerdict] = deque(maxlen=4)

    def poll(self, now: float, now_ns: int) -> Frame:  # noqa: ARG002 - interface of a poller
        """Return the frame of the simulated run at ``now``."""
        seconds = max(0.0, now - self._started_at)
        snapshot = snapshot_at(self._cluster, seconds, self._started_at)
        self._gpu_history.add(snapshot.gpus)
        self._add_log_lines(snapshot, seconds, now)
        self._resolve_verdicts(snapshot, now)
        curves, rates = _curves(snapshot, self._started_at)
        return Frame(
            snapshot=snapshot,
            now=now,
            supervisor_answers=True,
            snapshot_at=now,
            last_record_at=now,
            curves=curves,
            curve_names=tuple(curves),
            rates=rates,
            curves_version=snapshot.global_step or 0,
            gpu_series=self._gpu_history.series(),
            resolved_verdicts=tuple(self._resolved),
            events=((self._started_at, "The demo began."),),
            log=tuple(self._log),
            log_count=self._log_count,
        )

    def close(self) -> None:
        """Do nothing: there is neither a file nor a connection to close."""

    def _add_log_lines(self, snapshot: RunSnapshot, seconds: float, now: float) -> None:
        """Let a few ranks write a line every second, and the stalled one a warning."""
        if seconds - self._logged_at < LOG_EVERY_S:
            return
        self._logged_at = seconds
        step = snapshot.global_step or 0
        second = math.floor(seconds)
        for number in range(3):
            rank = snapshot.ranks[(second * 3 + number) * 5 % len(snapshot.ranks)]
            if rank.state is not RankState.OK or rank.global_step != snapshot.global_step:
                continue  # It makes no steps, or its machine cannot be reached.
            text = f"step {step}: loss {loss_at(step):.3f}"
            self._write(LogLine(rank=rank.rank, text=text, seen_at=now))
        for rank in snapshot.ranks:
            if rank.state is RankState.STALLED:
                text = f"WARNING: no batch from the DataLoader for {math.floor(rank.age_s or 0)} s"
                self._write(LogLine(rank=rank.rank, text=text, tone=Tone.WARN, seen_at=now))

    def _write(self, line: LogLine) -> None:
        self._log.append(line)
        self._log_count += 1

    def _resolve_verdicts(self, snapshot: RunSnapshot, now: float) -> None:
        """Remember verdicts that are over, for the banner that reports it."""
        active = {str(verdict.kind): verdict for verdict in snapshot.verdicts}
        for kind, verdict in self._verdicts.items():
            if kind not in active:
                lasted_s = now - (verdict.began or now)
                self._resolved.append(ResolvedVerdict(verdict=verdict, lasted_s=lasted_s, at=now))
        self._verdicts = active


def _curves(
    snapshot: RunSnapshot, started_at: float
) -> tuple[dict[str, Curve], dict[int | None, Curve]]:
    """Return the loss and the throughput of the last steps."""
    last = snapshot.global_step or 0
    steps = np.arange(max(1, last - CURVE_POINTS), last + 1, dtype=np.float64)
    rate = (snapshot.world_size or 1) * SAMPLES_PER_STEP / STEP_S
    values = np.array([loss_at(step) for step in steps.tolist()], dtype=np.float64)
    rates = rate * (1 + 0.02 * np.sin(steps / 15))
    return (
        {"train/loss": _curve(steps, values, started_at)},
        {None: _curve(steps, rates, started_at)},
    )


def _curve(
    steps: np.ndarray[tuple[int], np.dtype[np.float64]],
    values: np.ndarray[tuple[int], np.dtype[np.float64]],
    started_at: float,
) -> Curve:
    return Curve(
        steps=steps,
        epochs=np.floor(steps / 1000),
        times=started_at + steps * STEP_S,
        mean=values,
        low=values,
        high=values,
        count=np.ones(len(steps)),
    )


class MachinesDemoScreen(RunScreen):
    """The screen of the simulated run. It controls nothing."""

    ABOUT = f"This screen shows {LABEL}."

    def __init__(self, cluster: Cluster, *, starts_at_s: float) -> None:
        super().__init__(
            RunDir(NOWHERE / "runs" / "simulated"),
            alone=True,
            make_poller=lambda: SimulatedMachines(cluster, starts_at_s=starts_at_s),
        )

    def refusal_of(self, action: str) -> str | None:
        """Refuse every command: there is no run."""
        return "The machines are simulated: there is no run" if action in REFUSED else None

    def action_diagnose(self) -> None:
        self.notify("The machines are simulated: there is nothing to diagnose", timeout=3)

    def farewell(self) -> str:
        return "The demo has ended."


class MachinesDemoApp(LtuiApp):
    """The dashboard's themes and keys around the demo."""

    def __init__(self, cluster: Cluster, *, starts_at_s: float = 0.0) -> None:
        """``starts_at_s``: the second at which the script starts."""
        super().__init__(NOWHERE)
        self._cluster, self._starts_at_s = cluster, starts_at_s

    def get_default_screen(self) -> Screen[None]:
        return MachinesDemoScreen(self._cluster, starts_at_s=self._starts_at_s)
