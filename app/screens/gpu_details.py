"""The screen of one GPU: its readings, charts of the last minutes, and its processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Static

from ltui.app.live.frame import Frame
from ltui.app.panels.gpu_panel import GpuCharts
from ltui.app.panels.panel import LiveText
from ltui.app.presentation.gpu_view import find_gpu, gpu_rows, readings_text
from ltui.app.screens.dialog import Dialog
from ltui.widgets.make_bindings import bindings

REFRESH_S = 1.0
"""Seconds between two updates of the screen."""
CHARTS_FROM = 100
"""Minimum cells of width to show charts next to the readings."""


class GpuScreen(Dialog[None]):
    """A dialog that follows the newest frame. ``[`` and ``]`` go to the previous and next GPU."""

    SCOPE = "gpu"
    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "gpu",
        """
        escape,q,enter | dismiss  | close    | Close
        [,left         | other(-1) | previous | Previous GPU
        ],right        | other(1)  | next     | Next GPU
        """,
    )

    def __init__(
        self, frame_of: Callable[[], Frame | None], name: str, *, label: str = "GPU"
    ) -> None:
        super().__init__()
        self._frame_of, self.gpu, self._label = frame_of, name, label

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -wide"):
            with Horizontal(id="one-gpu"):
                with VerticalScroll(id="readings-scroll"):
                    yield LiveText(id="readings", wraps=True)
                yield GpuCharts(id="gpu-charts")
            yield Static(Text("Esc: close   [ ]: previous, next GPU   ↑↓: scroll"), id="answers")

    def on_mount(self) -> None:
        self.query_one("#readings-scroll").focus()
        self._fit_width(self.app.size.width)
        self._update()
        self.set_interval(REFRESH_S, self._update)

    def on_resize(self, event: events.Resize) -> None:
        self._fit_width(event.size.width)

    def _fit_width(self, width: int) -> None:
        self.query_one("#gpu-charts").display = width >= CHARTS_FROM

    def _update(self) -> None:
        frame = self._frame_of()
        gpu = find_gpu(frame, self.gpu) if frame is not None else None
        self.query_one(".dialog").border_title = f"{self._label} {self.gpu}"
        readings = self.query_one("#readings", LiveText)
        if frame is None or gpu is None:
            readings.show(Text("no readings of this GPU at present"))
            return
        readings.show(readings_text(gpu, frame))
        self.query_one(GpuCharts).show(frame, gpu)

    def action_other(self, by: int) -> None:
        frame = self._frame_of()
        names = [row.index for row in gpu_rows(frame)] if frame is not None else []
        if self.gpu in names:
            self.gpu = names[(names.index(self.gpu) + by) % len(names)]
            self._update()
