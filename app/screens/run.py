"""The screen of one run: receives frames, draws them, and handles the keys of its panels.

``RunPanels`` lays out the panels, ``RunCommandScreen`` sends the commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from msgspec.structs import replace
from rich.cells import cell_len
from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.message import Message
from textual.reactive import var
from textual.widgets import Input

from ltui.app.keys.footer import KeyFooter
from ltui.app.keys.run_keys import KEYS, past_hints, run_hints
from ltui.app.live.curve_arithmetic import LatestCurveRequest
from ltui.app.live.frame import Frame
from ltui.app.live.run_poller import Poller, PollerThread, RunPoller
from ltui.app.panels.gpu_panel import GpuScreen
from ltui.app.panels.log_panel import log_sources
from ltui.app.panels.panel import LiveText
from ltui.app.panels.run_charts import RunCharts
from ltui.app.panels.run_panels import RunPanels
from ltui.app.presentation import run_view
from ltui.app.presentation.notifications import (
    Severity,
    farewell,
    resume_hint,
    still_live,
    toasts_for,
)
from ltui.app.screens.panel_screen import ChartKeysScreen, TabbedScreen
from ltui.app.screens.past_moments import PastMomentScreen
from ltui.training.state.run_snapshot import LIVE
from ltui.training.store.run_directory import RunDir
from ltui.widgets.header import RunHeader
from ltui.widgets.log_view import LogView
from ltui.widgets.make_bindings import bindings
from ltui.widgets.run_tables import GpuTable
from ltui.widgets.sanitise import clean_name


@dataclass
class FrameArrived(Message):
    """A new frame of the run. Only the latest of several waiting frames is handled."""

    frame: Frame

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, FrameArrived)


class RunScreen(PastMomentScreen, ChartKeysScreen, TabbedScreen):
    """The screen of one run."""

    ABOUT = "Closing this screen never stops the run: training continues."
    BINDINGS: ClassVar[list[BindingType]] = bindings("run", KEYS)

    @dataclass
    class Happened(Message):
        """An event of the run that a person may want to notice."""

        sentence: str
        severity: Severity

    frame: var[Frame | None] = var(None, init=False)
    """The frame that is shown; screens above this one watch it."""

    def __init__(
        self,
        run_dir: RunDir,
        *,
        readonly: bool = False,
        alone: bool = False,
        at: str | None = None,
        make_poller: Callable[[], Poller] | None = None,
    ) -> None:
        """``alone`` means that the app was started with this run: closing the screen quits it.

        ``at``: the moment of the past that is shown first, as a person writes it.
        """
        super().__init__(run_dir, LatestCurveRequest(), readonly=readonly, asked=at)
        self.alone = alone
        self._make_poller = make_poller or (lambda: RunPoller(run_dir, self._requests))
        self._poller_thread: PollerThread | None = None
        self._hidden_ending: int | None = None
        """The attempt of which the lines about the end are hidden."""
        self._header_lines: tuple[bool, int] | None = None
        """Last drawn state of the header: True without a banner, and the number of notes."""

    def compose(self) -> ComposeResult:
        yield RunHeader(id="header")
        yield LiveText(id="ending")
        yield RunPanels(self.run_dir.home, self._requests, id="panels")
        yield KeyFooter(id="keys")

    @property
    def panels(self) -> RunPanels:
        return self.query_one(RunPanels)

    # -- frames ------------------------------------------------------------------------------------

    def on_mount(self) -> None:
        self._poller_thread = PollerThread(
            self._make_poller, self._post_frame, run_id=self.run_dir.id
        )
        self._requests.on_change = self._curves_requested
        self._poller_thread.start()
        self.panels.fit_terminal(*self.app.size)

    def on_unmount(self) -> None:
        if self._poller_thread is not None:
            self._poller_thread.stop()

    def _curves_requested(self) -> None:
        if self._poller_thread is not None:
            self._poller_thread.wake()
        self.read_again()

    def on_resize(self, event: events.Resize) -> None:
        self.panels.fit_terminal(event.size.width, event.size.height)

    def _post_frame(self, frame: Frame) -> None:
        # Called in the poller's thread, in which only posting a message is safe.
        self.post_message(FrameArrived(frame))

    @on(FrameArrived)
    def _frame_arrived(self, message: FrameArrived) -> None:
        message.stop()
        if not self.query("#loss"):
            return  # The screen is being removed.
        before = self.snapshot
        self.use_present(message.frame)
        for sentence, severity in toasts_for(before, message.frame.snapshot):
            self.post_message(self.Happened(sentence, severity))
        if self.frame is not None and self.frame.moment is not None:
            # Its age grows.
            moment = replace(self.frame.moment, newest=self.newest)
            self.frame = replace(self.frame, moment=moment)
            self._draw_header(self.frame)

    def show_frame(self, frame: Frame) -> None:
        before, self.frame = self.frame, frame
        self.set_class(frame.moment is not None, "-past")
        if (before and before.moment) != frame.moment and not self.plays:
            # Charts would wait for another frame before they are drawn again.
            self.panels.charts.invalidate()
        self.panels.use_frame(frame)
        if self.is_due(frame):
            self._draw(frame)

    def speed_changed(self, speed: int) -> None:
        if self.frame is not None and self.frame.moment is not None:
            moment = replace(self.frame.moment, speed=speed)
            self.frame = replace(self.frame, moment=moment)
            self._draw_top_and_bottom(self.frame)

    def on_screen_resume(self) -> None:
        if self.frame is not None:
            self._draw(self.frame)

    # -- drawing -----------------------------------------------------------------------------------

    def _draw(self, frame: Frame) -> None:
        self._draw_top_and_bottom(frame)
        self.panels.show(frame)

    def _draw_top_and_bottom(self, frame: Frame) -> None:
        self._draw_header(frame)
        self._draw_ending(frame)
        self._draw_keys()

    @on(RunPanels.LaidOut)
    def _panels_laid_out(self, message: RunPanels.LaidOut) -> None:
        message.stop()
        self._header_lines = None
        if self.frame is not None:
            self._draw_top_and_bottom(self.frame)

    def _draw_header(self, frame: Frame) -> None:
        header = self.query_one(RunHeader)
        view_model = header.view_model = run_view.header(frame)
        header_lines = (view_model.banner is None, len(view_model.notes))
        if self._header_lines != header_lines:
            self._header_lines = header_lines
            # Lay out the header once more after the present layout. If two changes are combined in
            # one layout, Textual keeps the old height, and the banner would stay hidden.
            self.call_after_refresh(header.refresh, layout=True)

    def _draw_ending(self, frame: Frame) -> None:
        lines = run_view.end_cells(frame)
        ending = self.query_one("#ending", LiveText)
        ending.display = bool(lines) and self._hidden_ending != frame.snapshot.attempt
        if lines:
            hint = resume_hint(frame.snapshot, readonly=self.readonly)
            text = run_view.cells_text(lines, f"{hint}   esc hide".strip())
            if self.in_past:
                text = run_view.cells_text(lines)
            # The key is in the help too: it takes no line of its own.
            if cell_len(text.plain.rpartition("\n")[2]) > self.size.width - 2:
                text = run_view.cells_text(lines, hint)
            ending.show(text)

    def _draw_keys(self) -> None:
        if self.snapshot is not None:
            hints = run_hints(self.snapshot, readonly=self.readonly, focused=self.focused)
            if self.in_past and not isinstance(self.focused, Input):
                hints = past_hints(plays=self.plays)
            self.query_one(KeyFooter).show(hints)

    @on(events.DescendantFocus)
    def _focus_moved(self) -> None:
        self._draw_keys()

    # -- panels ------------------------------------------------------------------------------------

    def action_panel(self, name: str) -> None:
        self.panels.choose(name)

    def tabs(self) -> tuple[Sequence[str], str]:
        return self.panels.tabs()

    def action_zoom(self) -> None:
        self.panels.toggle_zoom()

    def action_reset(self) -> None:
        self.panels.reset()

    def action_details(self) -> None:
        self.panels.toggle_details()

    def action_border(self, dx: int, dy: int) -> None:
        self.panels.move_border(dx, dy)

    # -- charts ------------------------------------------------------------------------------------

    @property
    def charts(self) -> RunCharts:
        return self.panels.charts

    @property
    def chart_source(self) -> str:
        """The name of the run, for the title of a saved chart."""
        return clean_name(self.snapshot.name if self.snapshot is not None else self.run_dir.id)

    def action_all_metrics(self) -> None:
        # Imported here: the first frame does not need it.
        from ltui.app.screens.metrics import MetricsScreen

        self.app.push_screen(MetricsScreen(self, self._requests))

    def action_smooth(self, by: int) -> None:
        if not self.change_speed(by):
            super().action_smooth(by)

    def action_choose_metrics(self) -> None:
        self.charts.choose_metrics()

    def palette_entries(self) -> Iterator[tuple[str, str, Callable[[], object]]]:
        """Yield title, help and function of each entry that the palette offers for this run."""
        for name in self.frame.curve_names if self.frame is not None else ():
            show = partial(self._show_metric, name)
            yield f"Show metric {clean_name(name)}", "Add this metric to the charts", show

    def _show_metric(self, name: str) -> None:
        self.charts.show_metric(name)
        self.action_panel("loss")

    # -- log ---------------------------------------------------------------------------------------

    def action_next_log(self) -> None:
        if self.snapshot is None or not self.snapshot.nodes:
            self.panels.log_panel.next_source(self.frame)
            return
        # Imported here: only runs on several machines have so many logs.
        from ltui.app.screens.choosers import LogChooser

        log = self.panels.log_panel
        sources = log_sources(self.frame)
        self.app.push_screen(LogChooser(sources, log.source), self._show_log)

    def _show_log(self, source: int | None) -> None:
        if source is not None:
            self.panels.log_panel.choose(source, self.frame)

    def action_search(self) -> None:
        ranks = self.panels.ranks_panel
        if self.snapshot is not None and self.snapshot.nodes and ranks.has_focus_within:
            ranks.open_filter()
            return
        self.action_panel("log")
        self.query_one(LogView).action_find()

    # -- other screens -----------------------------------------------------------------------------

    @on(GpuTable.RowSelected)
    def _open_gpu(self, message: GpuTable.RowSelected) -> None:
        # Tables share one message class, so the table decides what was opened.
        if isinstance(message.table, GpuTable):
            message.stop()
            self.app.push_screen(GpuScreen(lambda: self.frame, message.key))

    def action_diagnose(self) -> None:
        if self.is_refused("diagnose"):
            return
        # Imported here: what requests a diagnosis is not needed for the first frame.
        from ltui.app.screens.diagnosis import DiagnoseScreen

        self.app.push_screen(DiagnoseScreen(self.run_dir, lambda: self.frame))

    def action_profile(self) -> None:
        if self.in_past and self.is_refused("profile"):
            return
        # Imported here: few people profile a run.
        from ltui.app.screens.profile import ProfileScreen

        reason = self.refusal_of("profile")
        self.app.push_screen(ProfileScreen(self.run_dir, refusal=reason))

    def action_resume(self) -> None:
        if not self.is_refused("resume"):
            self._run_again(new_run=False)

    def action_rerun(self) -> None:
        if not self.is_refused("rerun"):
            self._run_again(new_run=True)

    def _run_again(self, *, new_run: bool) -> None:
        # Imported here: what starts runs is not needed for the first frame.
        from ltui.app.screens.resume_or_run_again import RunAgainScreen

        def started(run_dir: RunDir | None) -> None:
            if run_dir is not None and run_dir != self.run_dir:
                # In place of this screen, so that closing the new one leads to where this one did.
                self.replace_by(RunScreen(run_dir, readonly=self.readonly, alone=self.alone))

        self.app.push_screen(
            RunAgainScreen(self.run_dir, self.chart_source, new_run=new_run), started
        )

    # -- leaving -----------------------------------------------------------------------------------

    def farewell(self) -> str:
        """Return the message to print when the dashboard is closed."""
        if self.snapshot is None:
            return f"To watch it again: ltui attach {clean_name(self.run_dir.id)}"
        return farewell(self.snapshot)

    def action_cancel(self) -> None:
        """Return to now, restore a maximised panel, hide how the run ended, or go back to home.

        Escape never quits the program.
        """
        if self.panels.ranks_panel.is_filtering and self.panels.ranks_panel.has_focus_within:
            self.panels.ranks_panel.clear_filter()
        elif self.in_past:
            self.return_to_now()
        elif self.panels.zoomed:
            self.action_zoom()
        elif self.query_one("#ending").display and self.snapshot is not None:
            self._hidden_ending = self.snapshot.attempt
            self.query_one("#ending").display = False
        elif self.alone:
            is_live = self.snapshot is not None and self.snapshot.state in LIVE
            self.notify(f"q quits ltui{'; training continues' * is_live}", timeout=2)
        else:
            self.action_back()

    def action_back(self) -> None:
        if self.alone:
            self.app.exit(message=self.farewell())
        else:
            if self.snapshot is not None and self.snapshot.state in LIVE:
                self.app.notify(still_live(self.snapshot), markup=False)
            self.dismiss()
