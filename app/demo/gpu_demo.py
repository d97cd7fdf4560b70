"""The GPU panels alone, with simulated or recorded GPUs. Every title states that they are."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.screen import Screen
from textual.widgets import Static

from ltui.app.demo.scripted_gpus import ScriptedGpus
from ltui.app.keys.footer import KeyFooter, KeyHint
from ltui.app.live.frame import Frame
from ltui.app.live.gpu_history import GpuHistory
from ltui.app.panels.gpu_panel import GpuOverview, GpuScreen
from ltui.app.panels.panel import Panel
from ltui.app.presentation.gpu_view import gpus_title
from ltui.app.screens.dialog import ClosableScreen
from ltui.app.textual_app import LtuiApp
from ltui.training.gpu.findings import verdicts
from ltui.training.gpu.recording import RecordedGpus, Recording
from ltui.training.gpu.run_gpus import GpuSource, RunGpus
from ltui.training.state.run_snapshot import RankSnapshot, RankState, RunSnapshot, RunState
from ltui.widgets.gpu_table import GpuTable
from ltui.widgets.make_bindings import bindings

SIMULATED = "simulated"
POLL_INTERVAL_S = 0.5
"""Seconds between two samples of the simulated GPUs."""
HINTS = (
    KeyHint("⏎", "one GPU", "screen.open"),
    KeyHint("?", "help", "app.help", keep=True),
    KeyHint("q", "quit", "screen.leave", keep=True),
    KeyHint("t", "theme", "app.choose_theme"),
)


class SimulatedGpus:
    """Samples simulated GPUs like a supervisor samples the driver, with one rank per GPU."""

    def __init__(self, source: GpuSource | None = None) -> None:
        """``source``: source of the readings, by default ``ScriptedGpus``."""
        self._gpus = RunGpus(None, source=source or ScriptedGpus())
        self._gpu_history = GpuHistory()
        self._ranks: tuple[RankSnapshot, ...] = ()

    def poll(self) -> Frame:
        """Sample the simulated GPUs and return a frame."""
        now = time.time()
        view = self._gpus.sample(self._ranks, now)
        if len(self._ranks) < len(view.gpus):
            self._ranks = tuple(
                RankSnapshot(
                    rank=number, device=f"cuda:{number}", gpu_uuid=gpu.uuid, state=RankState.STALLED
                )
                for number, gpu in enumerate(view.gpus)
            )
        self._gpu_history.add(view.gpus)
        snapshot = RunSnapshot(
            id="simulated",
            name="simulated",
            state=RunState.RUNNING,
            gpus=view.gpus,
            gpu_note=view.note,
            ranks=self._ranks,
            verdicts=verdicts(view.findings),
        )
        return Frame(
            snapshot=snapshot,
            now=now,
            supervisor_answers=True,
            snapshot_at=now,
            gpu_series=self._gpu_history.series(),
        )

    def stop(self) -> None:
        self._gpus.stop()


class DemoBoard(GpuOverview):
    """The GPU board without a hint at a diagnosis, which the demo does not have."""

    MORE: ClassVar[str] = ": ⏎ one GPU"


class DemoScreen(ClosableScreen[None]):
    """Heat strip, rows and findings on the whole screen."""

    SCOPE = "demo"
    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "demo",
        """
        q | leave | quit | Quit the demo
        """,
    )

    def __init__(self, make: Callable[[], SimulatedGpus], kind: str) -> None:
        """``kind``: what the GPUs are, such as ``simulated``."""
        super().__init__()
        self._make = make
        self._kind, self._label = kind, f"{kind} GPUs and ranks, not those of this machine"
        self.ABOUT = f"This screen shows {self._label}."
        self._gpus: SimulatedGpus | None = None
        self.frame: Frame | None = None

    def compose(self) -> ComposeResult:
        yield Static(
            Text.assemble((" ltui demo", "bold"), f"   {self._label}"), id="title", markup=False
        )
        with Panel(None, self._label, id="gpus"):
            yield DemoBoard(id="gpu-overview")
        yield KeyFooter(HINTS, id="keys")

    def on_mount(self) -> None:
        self._gpus = self._make()
        self._refresh_gpus()
        self.set_interval(POLL_INTERVAL_S, self._refresh_gpus)
        self.query_one(GpuTable).focus()

    def on_unmount(self) -> None:
        if self._gpus is not None:
            self._gpus.stop()

    def _refresh_gpus(self) -> None:
        if self._gpus is None:
            return
        self.frame = self._gpus.poll()
        if self.is_current:
            self.query_one(GpuOverview).show(self.frame, alone=True)
            title = gpus_title(self.frame)
            self.query_one("#gpus", Panel).set_titles(
                self._label, f"{self._kind}: {title}" if title else ""
            )

    @on(GpuTable.RowSelected)
    def _open(self, message: GpuTable.RowSelected) -> None:
        message.stop()
        self.app.push_screen(GpuScreen(lambda: self.frame, message.key, label=f"{self._kind} GPU"))

    def action_open(self) -> None:
        self.query_one(GpuTable).action_select()

    def action_leave(self) -> None:
        self.app.exit()


class DemoApp(LtuiApp):
    """The dashboard's themes and keys around the demo."""

    def __init__(
        self, make: Callable[[], SimulatedGpus] = SimulatedGpus, kind: str = SIMULATED
    ) -> None:
        """``kind``: what the GPUs are, such as ``simulated``."""
        super().__init__(Path("/nonexistent"))
        self._make, self._kind = make, kind

    def get_default_screen(self) -> Screen[None]:
        return DemoScreen(self._make, self._kind)


def recorded_demo(recording: Recording) -> DemoApp:
    """Return the demo that plays a recording again and again."""
    kind = SIMULATED if recording.simulated else "recorded"
    return DemoApp(lambda: SimulatedGpus(RecordedGpus(recording.rounds)), kind)
