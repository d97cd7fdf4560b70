"""The GPU panels alone, with simulated or recorded GPUs. Every title states that they are.

The simulated GPUs train, with typical problems. Their values are functions of the seconds since the
start. Neither a GPU nor a driver is needed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
from msgspec.structs import replace
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.screen import Screen
from textual.widgets import Static

from ltui.app.keys.footer import KeyFooter, KeyHint
from ltui.app.live.frame import Frame
from ltui.app.live.gpu_history import GpuHistory
from ltui.app.panels.gpu_panel import GpuOverview, GpuScreen
from ltui.app.panels.panel import Panel
from ltui.app.presentation.gpu_view import gpus_title
from ltui.app.screens.dialog import ClosableScreen
from ltui.app.textual_app import LtuiApp
from ltui.training.gpu.findings import verdicts
from ltui.training.gpu.reading import (
    THERMAL,
    GpuProcess,
    GpuReading,
    GpuView,
    RecordedGpus,
    Recording,
    Xid,
)
from ltui.training.gpu.run_gpus import GpuSource, RunGpus
from ltui.training.state.run_snapshot import RankSnapshot, RankState, RunSnapshot, RunState
from ltui.widgets.make_bindings import bindings
from ltui.widgets.run_tables import GpuTable

GPUS = 8
OTHER_PROCESS = GpuProcess(
    pid=31415, memory_bytes=4 * 10**9, user="someone", name="simulated-job", start_ticks=0
)
"""The simulated process of another user."""
XIDS = ((15, 94), (90, 79))
"""Seconds and codes of the XID errors of the last GPU."""
LOST_S = 90
"""Seconds until the last GPU falls off the bus."""


class ScriptedGpus:
    """A source of readings with the interface of ``GpuSampler``."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """``clock``: returns the unix time. The script starts now."""
        self._clock = clock
        self._start_s = clock()
        self._reported_xids = 0

    def latest(self) -> GpuView:
        """Return the readings of the current second."""
        return GpuView(readings=tuple(self._read(index) for index in range(GPUS)))

    def take_xids(self) -> tuple[Xid, ...]:
        """Return the XID errors since the last call."""
        xids = self._past_xids()
        new = xids[self._reported_xids :]
        self._reported_xids = len(xids)
        return new

    def stop(self, wait_s: float = 0.0) -> bool:  # noqa: ARG002 - interface of GpuSampler
        """Do nothing: there is no thread to stop."""
        return True

    def _elapsed_s(self) -> int:
        return math.floor(self._clock() - self._start_s)

    def _past_xids(self) -> tuple[Xid, ...]:
        elapsed_s = self._elapsed_s()
        return tuple(
            Xid(at=self._start_s + at_s, code=code, index=GPUS - 1, uuid=_uuid(GPUS - 1))
            for at_s, code in XIDS
            if at_s <= elapsed_s
        )

    def _read(self, index: int) -> GpuReading:
        elapsed_s = self._elapsed_s()
        reading = replace(reading_at(index, elapsed_s), sampled_at=self._start_s + elapsed_s)
        xids = self._past_xids()
        return replace(reading, last_xid=xids[-1]) if index == GPUS - 1 and xids else reading


def reading_at(index: int, seconds: float) -> GpuReading:
    """Return the reading of a GPU ``seconds`` after the start of the script."""
    if index == GPUS - 1 and seconds >= LOST_S:
        return replace(_fixed_values(index), error="fell off the bus")
    reading = _healthy(index, seconds)
    if index == 1:
        reading = replace(
            reading,
            utilisation_percent=float(round(_wave(88, 9, 7, seconds))),
            sm_activity=_wave(0.61, 0.12, 7, seconds),
            power_w=_wave(545, 70, 7, seconds),
        )
    elif index in (2, 3):
        # They become hot, slow down, and cool again.
        slow = 20 <= seconds < 60
        reading = replace(
            reading,
            temperature_c=round(_line(((0, 64), (20, 88), (60, 88), (75, 66)), seconds)),
            throttle_reasons=(THERMAL,) if slow else (),
            sm_clock_mhz=1395 if slow else 1980,
        )
    elif index == 4:
        # It waits in a collective that does not complete.
        waiting = 25 <= seconds < 80
        reading = replace(
            reading,
            utilisation_percent=100.0 if waiting else 94.0,
            sm_activity=0.09 if waiting else 0.66,
            tensor_activity=0.0 if waiting else 0.41,
            dram_activity=0.02 if waiting else 0.48,
            power_w=74.0 if waiting else 560.0,
        )
    elif index == 5:
        # It runs out of memory.
        used = int(_line(((0, 60e9), (40, 84e9)), seconds))
        reading = replace(reading, memory_used_bytes=used)
    elif index == 6:
        # Another process uses it too, and reading its power is not permitted.
        reading = replace(reading, power_w=None, processes=(OTHER_PROCESS,))
    return reading


def _uuid(index: int) -> str:
    return f"GPU-5eed0000-0000-4000-8000-{index:012}"


def _fixed_values(index: int) -> GpuReading:
    """Return a reading with the values that do not change."""
    return GpuReading(
        index=index,
        label=str(index),
        uuid=_uuid(index),
        name="NVIDIA H100 80GB HBM3",
        sm_clock_max_mhz=1980,
        pcie_generation_max=5,
        pcie_width_max=16,
        slowdown_temperature_c=89.0,
    )


def _healthy(index: int, seconds: float) -> GpuReading:
    """Return the reading of a GPU that trains without problems."""
    return replace(
        _fixed_values(index),
        utilisation_percent=float(round(_wave(92, 7, 11, seconds))),
        memory_utilisation_percent=float(round(_wave(48, 8, 11, seconds))),
        memory_used_bytes=61 * 10**9,
        memory_total_bytes=85_520_809_984,
        power_w=_wave(560, 80, 9, seconds),
        power_limit_w=700.0,
        temperature_c=round(_wave(63, 4, 60, seconds)),
        memory_temperature_c=70,
        sm_clock_mhz=1980,
        memory_clock_mhz=2619,
        throttle_reasons=(),
        performance_state=0,
        pcie_generation=5,
        pcie_width=16,
        pcie_tx_bytes_per_s=210e6,
        pcie_rx_bytes_per_s=1450e6,
        nvlinks=18,
        nvlinks_up=18,
        nvlink_tx_bytes_per_s=42e9,
        nvlink_rx_bytes_per_s=42e9,
        nvlink_errors=0,
        ecc_corrected=0,
        ecc_uncorrected=0,
        remapped_rows=0,
        repair_pending=False,
        repair_failed=False,
        sm_activity=_wave(0.66, 0.14, 9, seconds),
        sm_occupancy=0.31,
        tensor_activity=_wave(0.41, 0.12, 9, seconds),
        dram_activity=_wave(0.48, 0.09, 13, seconds),
        processes=(),
    )


def _wave(mean: float, amplitude: float, period_s: float, seconds: float) -> float:
    return mean + amplitude * math.sin(2 * math.pi * seconds / period_s)


def _line(points: tuple[tuple[float, float], ...], seconds: float) -> float:
    """Interpolate linearly between (seconds, value) points; constant outside."""
    times, values = np.transpose(points)
    return float(np.interp(seconds, times, values))


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
