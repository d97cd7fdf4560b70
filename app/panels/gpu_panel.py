"""The GPU panel: heat strips of many GPUs, one row for each GPU, and the findings about them.

A dialog shows all readings of one GPU. Charts show the last minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np
from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Grid, Horizontal, Vertical, VerticalScroll
from textual.widgets import Static

from ltui.app.live.frame import Frame
from ltui.app.live.gpu_history import HEAT_S, GpuSeries
from ltui.app.panels.panel import LiveText, Panel
from ltui.app.presentation import run_view
from ltui.app.presentation.gpu_view import (
    HEAT_STRIP_MIN_GPUS,
    find_gpu,
    findings_text,
    gpu_blocks,
    gpu_rows,
    gpus_title,
    note_text,
    readings_text,
)
from ltui.app.presentation.rank_grid import gpu_grid, grid_lines, has_gpu_grid
from ltui.app.screens.dialog import Dialog
from ltui.training.state.run_snapshot import GpuSnapshot, RunSnapshot
from ltui.widgets.charts.chart import Chart
from ltui.widgets.line_sheet import LiveLines
from ltui.widgets.make_bindings import bindings
from ltui.widgets.run_tables import BELOW, GpuTable, heat_lines
from ltui.widgets.view_models import ChartSeries, ChartViewModel, GpuRow

GIB = float(1 << 30)


class _Line(NamedTuple):
    name: str
    reading: str
    """One of ``GPU_READINGS``."""
    colour: int
    factor: float = 1.0
    """The reading times this is in the unit of the chart."""


_LINES = {
    "activity": (
        _Line("util", "utilisation_percent", 0),
        _Line("SM", "sm_activity", 1, 100.0),
        _Line("tensor cores", "tensor_activity", 2, 100.0),
        _Line("DRAM", "dram_activity", 3, 100.0),
    ),
    "power": (_Line("power", "power_w", 1),),
    "temperature": (_Line("temperature", "temperature_c", 5),),
    "memory": (_Line("memory", "memory_used_bytes", 4, 1 / GIB),),
}
_UNITS = {"activity": "% of time", "power": "W", "temperature": "°C", "memory": "GiB"}
CHART_NAMES = tuple(_LINES)
"""Names of the charts, in their order on the screen."""
_NO_DATA = "not available on this GPU, or not sampled yet"


def gpu_charts(history: GpuSeries) -> dict[str, ChartViewModel]:
    """Return the charts by name: activity, power, temperature and memory.

    They show the past; the present readings are in the table or the list beside them.
    """
    times = np.array(history.values("t"), dtype=np.float64)
    x = times - times[0] if len(times) else times
    charts = {}
    for name, lines in _LINES.items():
        series = []
        for line in lines:
            y = line.factor * np.array(history.values(line.reading), dtype=np.float64)
            if np.isfinite(y).any():
                series.append(ChartSeries(name=line.name, x=x, y=y, colour=line.colour))
        charts[name] = ChartViewModel(
            title=f"{name}, {_UNITS[name]}",
            series=tuple(series),
            x_label="time",
            x_time=True,
            note=None if series else _NO_DATA,
            is_rate=name != "temperature",
            shows_values=False,
        )
    return charts


TITLE = "GPUs"
MAX_TABLE_LINES = 9
"""Maximum lines of the table if other panels are visible; the user scrolls to the other rows."""
MAX_TABLE_LINES_BELOW_GRID = 5
"""The same for a table below a grid of all GPUs of several machines."""
MAX_HEAT_LINES = 4
"""Maximum lines of heat strips if other panels are visible."""
MANY_GPUS = 16
"""With more GPUs than this, the heat strips get up to half of the panel's height."""
MAX_GRID_LINES = 5
"""Maximum lines of a grid of GPUs with its legend if other panels are visible."""
MAX_FINDINGS = 3
"""Maximum lines of findings if other panels are visible."""
CHART_LINES, CHART_COLUMNS = 7, 38
"""Minimum size of the chart of one GPU, with its border."""
MAX_LINES = 17
"""Maximum lines of the panel if other panels are visible: heat strips, rows and findings."""
MAX_NOTE_LINES = 9
"""Maximum lines of the text that replaces the rows if there are no GPU readings."""


def lines_for(run: RunSnapshot) -> int:
    """Return the lines that the panel takes for the GPUs of a run if other panels are visible."""
    gpus = len(run.gpus)
    heat = MAX_HEAT_LINES + 1 if gpus >= HEAT_STRIP_MIN_GPUS else 0
    return heat + min(gpus + 1, max_table_lines(run)) + MAX_FINDINGS


def max_table_lines(run: RunSnapshot) -> int:
    """Return the maximum lines of the table if other panels are visible."""
    return MAX_TABLE_LINES_BELOW_GRID if has_gpu_grid(run) else MAX_TABLE_LINES


class GpuPanel(Panel):
    """The GPUs of a run, or the reason why they can't be read, with the ranks' processes."""

    def __init__(self, *, id: str) -> None:  # noqa: A002 - Textual's name for it
        super().__init__(3, TITLE, id=id)

    def compose(self) -> ComposeResult:
        yield GpuOverview(id="gpu-overview")
        yield LiveText(id="gpu-note")

    def show(self, frame: Frame, *, alone: bool) -> int:
        """Draw ``frame``; return the lines that the panel takes if other panels are visible.

        With ``alone`` the panel has the whole height of the screen.
        """
        overview, note = self.query_one(GpuOverview), self.query_one("#gpu-note", LiveText)
        has_gpus = bool(frame.snapshot.gpus)
        overview.display = has_gpus
        note.display = not has_gpus
        self.set_titles(TITLE, gpus_title(frame))
        if has_gpus:
            return min(overview.show(frame, alone=alone), MAX_LINES)
        text = run_view.processes_text(frame)
        note.show(text)
        return min(text.plain.count("\n") + 1, MAX_NOTE_LINES)


class GpuCharts(Grid):
    """The readings of one GPU over the last minutes: activity, power, temperature and memory."""

    DEFAULT_CSS = """
    GpuCharts { height: 1fr; }
    """

    def compose(self) -> ComposeResult:
        for name in CHART_NAMES:
            with Panel(None, name, id=f"gpu-{name}"):
                yield Chart(id=f"gpu-{name}-chart")

    def on_mount(self) -> None:
        for chart in self.query(Chart):
            chart.can_focus = False

    def show(self, frame: Frame, gpu: GpuSnapshot, *, prefix: str = "") -> None:
        """Draw the readings. ``prefix`` is the beginning of every title."""
        series = frame.gpu_series.get(gpu.number, GpuSeries())
        for name, view_model in gpu_charts(series).items():
            panel = self.query_one(f"#gpu-{name}", Panel)
            if panel.display:
                panel.query_one(Chart).view_model = view_model
                panel.set_titles(f"{prefix}{view_model.title}")

    def fit(self, width: int, height: int) -> bool:
        """Show as many charts as these cells have room for; return whether there is one."""
        columns = min(len(CHART_NAMES), 2, width // CHART_COLUMNS)
        lines = min(len(CHART_NAMES) // 2, height // CHART_LINES)
        for number, panel in enumerate(self.query(Panel)):
            panel.display = number < columns * lines
        self.styles.grid_size_columns = max(1, columns)
        return columns * lines > 0


class GpuOverview(Vertical):
    """Heat strips, table, findings and charts of the selected GPU, drawn from frames."""

    DEFAULT_CSS = """
    GpuOverview { height: 1fr; }
    GpuOverview GpuCharts { display: none; }
    GpuOverview #gpu-findings { height: auto; text-wrap: nowrap; text-overflow: ellipsis; }
    """
    MORE: ClassVar[str] = ": d diagnose"
    """The key that shows the findings that do not fit."""

    _frame: Frame | None = None

    def compose(self) -> ComposeResult:
        yield LiveLines(id="gpu-heat")
        yield GpuTable(id="gpu-table")
        findings = LiveText(id="gpu-findings")
        # Hidden here and not in on_mount: if a screen is closed while it opens, on_mount is called
        # without children.
        findings.display = False
        yield findings
        yield GpuCharts(id="gpu-history")

    def show(self, frame: Frame, *, alone: bool) -> int:
        """Draw ``frame``; return the lines that it takes if other panels are visible.

        With ``alone`` the overview has the whole height of the screen.
        """
        rows = gpu_rows(frame)
        max_findings = self._max_findings(alone=alone)
        heat_lines = self._show_heat(frame, rows, alone=alone)
        findings = findings_text(frame, max_findings, more=self.MORE)
        if alone and len(rows) <= MANY_GPUS:
            blocks = gpu_blocks(frame, rows)
            if heat_lines + len(blocks) + 2 <= self.size.height:
                rows, findings = blocks, note_text(frame)
        self.query_one(GpuTable).set_rows(rows)
        below = self.query_one("#gpu-findings", LiveText)
        below.display = bool(findings)
        below.styles.max_height = max_findings
        below.show(findings)
        finding_lines = findings.plain.count("\n") + 1 if findings else 0
        room = self.size.height - heat_lines - finding_lines - len(rows) - 1
        self._show_charts(frame, room if alone else 0)
        return heat_lines + min(len(rows) + 1, max_table_lines(frame.snapshot)) + finding_lines

    def _show_charts(self, frame: Frame, available: int) -> None:
        """Draw the charts of the selected GPU in the lines that the rows leave."""
        charts, table = self.query_one(GpuCharts), self.query_one(GpuTable)
        name = (table.cursor_key or "").partition(BELOW)[0]
        gpu = find_gpu(frame, name)
        self._frame = frame
        charts.display = charts.fit(self.size.width, available) and gpu is not None
        table.styles.height = len(table.rows) + 1 if charts.display else "1fr"
        if charts.display and gpu is not None:
            charts.show(frame, gpu, prefix=f"GPU {name} ")

    @on(GpuTable.RowHighlighted)
    def _select(self) -> None:
        charts = self.query_one(GpuCharts)
        if charts.display and self._frame is not None:
            self._show_charts(self._frame, charts.size.height)

    def _max_findings(self, *, alone: bool) -> int:
        """Return the maximum lines of findings, which leaves enough lines for the rows."""
        return min(2 * MAX_FINDINGS, max(2, self.size.height // 4)) if alone else MAX_FINDINGS

    def _show_heat(self, frame: Frame, rows: Sequence[GpuRow], *, alone: bool) -> int:
        """Draw the heat strips in the lines that rows and findings leave; return their lines.

        For the GPUs of many machines draw a grid with one cell for each GPU instead.
        """
        heat = self.query_one("#gpu-heat", LiveLines)
        available = MAX_HEAT_LINES
        has_grid = has_gpu_grid(frame.snapshot)
        if alone:
            available = self.size.height - (len(rows) + 1) - self._max_findings(alone=True) - 1
            # The table of a hundred GPUs is scrolled, but the strips show all of them.
            available = max(available, self.size.height // 2 if len(rows) > MANY_GPUS else 0)
        if has_grid:
            below = MAX_TABLE_LINES_BELOW_GRID + self._max_findings(alone=True)
            available = self.size.height - below if alone else MAX_GRID_LINES
        heat.display = len(rows) >= HEAT_STRIP_MIN_GPUS and available > 0
        if not heat.display:
            return 0
        if has_grid:
            heat.show(partial(grid_lines, gpu_grid(frame), available))
        else:
            heat.show(partial(heat_lines, rows, min(available, len(rows)), HEAT_S))
        return len(heat.lines_for(max(1, heat.size.width or self.size.width)))


REFRESH_S = 1.0
"""Seconds between two updates of the screen."""
CHARTS_FROM = 100
"""Minimum cells of width to show charts next to the readings."""


class GpuScreen(Dialog[None]):
    """A dialog that follows the newest frame. ``[`` and ``]`` go to the previous and next GPU."""

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
