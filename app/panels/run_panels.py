"""The panels of a run screen, and which of them are visible at which height.

The panels draw themselves from a frame. ``PanelLayout`` decides which panels a terminal of this
size shows; this container applies its decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace
from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.message import Message
from textual.widgets import Static

from ltui.app.live.curve_arithmetic import LatestCurveRequest
from ltui.app.live.frame import NOT_RECORDED, Frame
from ltui.app.panels import gpu_panel, ranks_panel
from ltui.app.panels.gpu_panel import GpuPanel
from ltui.app.panels.log_panel import LogPanel
from ltui.app.panels.movable_borders import (
    DETAILS,
    FRAME_LINES,
    PANELS,
    UPPER,
    LayoutMode,
    MovableBorders,
    PanelLayout,
    TableLines,
)
from ltui.app.panels.panel import LiveText, Panel, SettingChosen, TabBar, focus_in, panel_around
from ltui.app.panels.ranks_panel import RanksPanel
from ltui.app.panels.run_charts import RunCharts
from ltui.app.presentation import run_details
from ltui.app.presentation.rank_grid import MIN_RANKS
from ltui.app.settings import settings_of
from ltui.training.state.run_snapshot import RunSnapshot
from ltui.widgets.formats import LOADING
from ltui.widgets.run_tables import RankTable

TWO_COLUMNS_FROM = 100
"""Minimum cells of width for the two parts to be placed side by side."""


class DetailsView(VerticalScroll):
    """Metrics and configuration, then checkpoints, events and other facts."""

    DEFAULT_CSS = """
    DetailsView { height: 1fr; width: 1fr; scrollbar-size: 0 1; }
    DetailsView Static { width: 1fr; height: auto; }
    DetailsView #detail-facts { margin-top: 1; }
    DetailsView.-wide #detail-facts { margin-top: 0; }
    DetailsView.-wide { layout: horizontal; }
    DetailsView.-wide #detail-figures { margin-right: 3; }
    """

    def compose(self) -> ComposeResult:
        yield LiveText(id="detail-figures", wraps=True)
        yield LiveText(id="detail-facts", wraps=True)

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.width >= TWO_COLUMNS_FROM, "-wide")

    def show(self, frame: Frame) -> None:
        """Draw the details of ``frame``; unchanged parts are not repainted."""
        figures, facts = self.query(LiveText)
        if frame.is_unknown:
            figures.show(Text(NOT_RECORDED, "dim"))
            facts.show(Text())
            return
        figures.show(run_details.metrics_and_configuration(frame))
        facts.show(run_details.checkpoints_and_events(frame))


TITLES = {
    "loss": "metrics",
    "throughput": "throughput",
    "gpus": gpu_panel.TITLE,
    "ranks": ranks_panel.TITLE,
    "log": "log",
    "details": "details",
}
"""Titles of the tabs by panel name."""


class RunPanels(MovableBorders):
    """Charts, GPUs, ranks, log and details of a run, or the tabs to switch between them."""

    class LaidOut(Message):
        """Other panels are visible, or panels have another size."""

    def __init__(self, home: Path, requests: LatestCurveRequest, *, id: str) -> None:  # noqa: A002 - Textual's
        super().__init__(id=id)
        self.panel_layout = PanelLayout()
        self._home, self._requests = home, requests
        self._frame: Frame | None = None
        self._set_heights: dict[str, int | str] = {}
        """The heights that were set, by panel name."""

    def compose(self) -> ComposeResult:
        yield TabBar(id="tabs")
        yield Static(LOADING, id="loading")
        with Horizontal(id="columns"):
            with Vertical(id="body"):
                yield RunCharts(self._home, self._requests, id="charts")
                yield GpuPanel(id="gpus")
                yield RanksPanel(id="ranks")
                yield LogPanel(id="log")
            with Panel(6, TITLES["details"], id="details"):
                yield DetailsView(id="details-view")
        yield Static(
            "ltui needs a little more room: 60 columns and 12 lines.", id="tiny", markup=False
        )

    @property
    def charts(self) -> RunCharts:
        return self.query_one(RunCharts)

    @property
    def ranks_panel(self) -> RanksPanel:
        return self.query_one(RanksPanel)

    @property
    def log_panel(self) -> LogPanel:
        return self.query_one(LogPanel)

    @property
    def zoomed(self) -> bool:
        """True if one panel is maximised."""
        return self.panel_layout.zoomed

    # -- layout ------------------------------------------------------------------------------------

    def on_mount(self) -> None:
        self.read_sizes()
        details = settings_of(self.app).value("layout.details")
        if details is not None or self.has_sizes:
            self.panel_layout = replace(self.panel_layout, details=details)
            self.call_later(self.relayout)

    def relayout(self) -> None:
        self._apply_layout(self.panel_layout)

    def fit_terminal(self, width: int, height: int) -> None:
        """Adapt the layout to a terminal of ``width`` columns and ``height`` lines."""
        self._use_layout(replace(self.panel_layout, width=width, height=height))

    def _use_layout(self, layout: PanelLayout) -> None:
        """Replace the layout; apply it only if it changes what is visible."""
        before, self.panel_layout = self.panel_layout, layout
        visible = (layout.mode, layout.visible(), layout.fits_rows())
        # The first frame says how high the tables are: only then is there anything to lay out.
        if self._frame is not None and visible != (
            before.mode, before.visible(), before.fits_rows(),
        ):  # fmt: skip
            self._apply_layout(layout)

    def _apply_layout(self, layout: PanelLayout) -> None:
        if not self.is_mounted or not self.query("#loss"):
            return  # It is not shown yet, or not any more.
        self.panel_layout = layout
        visible = layout.visible()
        for name in PANELS:
            self.query_one(f"#{name}").display = name in visible
        self.query_one("#charts").display = bool(visible & UPPER)
        self.query_one("#loading").display = False
        self.query_one("#columns").display = bool(visible)
        self.query_one("#body").display = bool(visible - {DETAILS})
        self.query_one("#tiny").display = not visible
        below = DETAILS in visible and not layout.shows_side_details()
        self.set_class(below, "-details-below", update=False)
        self.set_class(layout.fits_rows(), "-stacked", update=False)
        self.set_class(layout.zoomed, "-zoomed", update=False)
        for mode in LayoutMode:
            self.set_class(mode is layout.mode, f"-{mode.value}", update=False)
        self.app.update_styles(self)
        self._show_tabs(layout)
        # A panel that was hidden has missed frames. The log panel counts its lines itself.
        self._set_heights.clear()
        self._give_sizes()
        self.charts.invalidate()
        if self._frame is not None:
            self.show(self._frame)
        self.post_message(self.LaidOut())

    def _give_sizes(self) -> None:
        self.apply_sizes()
        if self.panel_layout.flexible() == "log":
            self._fit_height("log", None)

    def _show_tabs(self, layout: PanelLayout) -> None:
        tabs = [(PANELS.index(name) + 1, name, TITLES[name]) for name in layout.tabs()]
        tab_bar = self.query_one(TabBar)
        tab_bar.display = bool(tabs)
        below_charts = layout.mode is LayoutMode.HALF and not layout.zoomed
        tab_bar.show(tabs, layout.lower if below_charts else layout.chosen)

    def _fit_height(self, name: str, lines: int | None) -> None:
        """Make a panel as high as its rows if other panels are visible below the charts.

        Without ``lines`` it has the height that they leave.
        """
        frame_lines = 0 if self.panel_layout.mode is LayoutMode.TABS else FRAME_LINES
        height: int | str = self.lower_height() or "1fr"
        if lines is not None and self.panel_layout.fits_rows():
            height = max(lines, 2) + frame_lines
        if self._set_heights.get(name) != height:
            self._set_heights[name] = height
            self.query_one(f"#{name}").styles.height = height

    # -- drawing -----------------------------------------------------------------------------------

    def use_frame(self, frame: Frame) -> None:
        """Store the newest frame, and adapt the layout if its tables have another height."""
        first, self._frame = self._frame is None, frame
        needs = table_lines(frame.snapshot)
        if first:
            self._apply_layout(replace(self.panel_layout, needs=needs))
        elif needs != self.panel_layout.needs:
            self._use_layout(replace(self.panel_layout, needs=needs))

    def show(self, frame: Frame) -> None:
        """Draw the visible panels."""
        visible = self.panel_layout.visible()
        self.charts.show(frame, visible)
        if "gpus" in visible:
            alone = not self.panel_layout.fits_rows()
            self._fit_height("gpus", self.query_one(GpuPanel).show(frame, alone=alone))
        if "ranks" in visible:
            alone = not self.panel_layout.fits_rows()
            self._fit_height("ranks", self.ranks_panel.show(frame, alone=alone))
        if "log" in visible:
            self.log_panel.show(frame)
        if DETAILS in visible:
            self.query_one(DetailsView).show(frame)

    # -- choosing a panel --------------------------------------------------------------------------

    def tabs(self) -> tuple[Sequence[str], str]:
        """Return the names of the tabs and the one that is shown, if there is one at a time."""
        names = self.panel_layout.tabs()
        shown = [name for name in names if self.query_one(f"#{name}").display]
        # A short table leaves room for the log below it.
        return (names, shown[0]) if names == PANELS else ((), "")

    def choose(self, name: str) -> None:
        """Show a panel and move the focus into it."""
        self._apply_layout(self.panel_layout.choose(name))
        focus_in(self.query_one(f"#{name}"))

    def toggle_zoom(self) -> None:
        """Maximise the panel with the focus, or restore all panels."""
        layout, focused = self.panel_layout, self.screen.focused
        name = None if layout.zoomed else panel_around(focused, PANELS)
        layout = layout if name is None else layout.choose(name)
        self._apply_layout(replace(layout, zoomed=not layout.zoomed))

    def toggle_details(self) -> None:
        """Show or hide the details."""
        layout = self.panel_layout.toggle_details()
        if layout.has_side_room():
            self.post_message(SettingChosen("layout.details", layout.shows_side_details()))
        if layout.chosen == DETAILS:
            self.choose(DETAILS)
        else:
            self._apply_layout(layout)

    def reset(self) -> None:
        """Restore the default layout and the default view of the charts."""
        self.charts.reset()
        self.forget_sizes()
        if self.panel_layout.details is not None:
            self.post_message(SettingChosen("layout.details", None))
        now = self.panel_layout
        self._apply_layout(PanelLayout(width=now.width, height=now.height, needs=now.needs))

    @on(events.DescendantFocus)
    def _focus_moved(self, event: events.DescendantFocus) -> None:
        name = panel_around(event.widget, PANELS)
        if name is None or self.panel_layout.zoomed:
            return
        layout = self.panel_layout.choose(name)
        # The log below a table is not chosen, because the table would no longer be drawn.
        if layout.visible() == self.panel_layout.visible():
            self.panel_layout = layout

    @on(RankTable.RowSelected)
    def _open_rank_log(self, message: RankTable.RowSelected) -> None:
        """Show the log of the rank that was opened in the table."""
        # Tables share one message class: the rows of GPUs are opened by the screen.
        if isinstance(message.table, RankTable):
            message.stop()
            self.log_panel.source = int(message.key.removeprefix("r"))
            self.choose("log")
            if self._frame is not None:
                self.log_panel.show(self._frame)


def table_lines(snapshot: RunSnapshot) -> TableLines:
    """Return the lines that the tables of a run need, independent of its verdicts."""
    ranks = max(len(snapshot.ranks), snapshot.world_size or 1)
    lines = 0
    if snapshot.gpus:
        lines = gpu_panel.lines_for(snapshot)
    elif any((rank.device or "").startswith("cuda") for rank in snapshot.ranks):
        # If the GPUs can't be read, the panel shows the reason and the processes of the ranks.
        lines = ranks + 1
    return TableLines(
        gpus=min(lines, gpu_panel.MAX_LINES),
        ranks=ranks_panel.lines_for(snapshot, ranks),
        has_grids=bool(snapshot.nodes) and ranks >= MIN_RANKS,
    )
