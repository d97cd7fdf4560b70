"""The screen of one run: takes frames, hands view models to the panels, sends commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from textual import events, on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.message import Message
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Input, Static
from textual.worker import get_current_worker

from ltui.app.keys.footer import KeyFooter, KeyHint
from ltui.app.keys.key_table import bindings
from ltui.app.live.frame import Frame
from ltui.app.live.metric_history import LatestCurveRequest
from ltui.app.live.poller_thread import Poller, PollerThread
from ltui.app.live.run_poller import RunPoller
from ltui.app.panels.details_panel import DetailsView
from ltui.app.panels.gpu_panel import FINDINGS, HEAT_LINES, TABLE_LINES, GpuOverview
from ltui.app.panels.panel import Panel
from ltui.app.panels.run_charts import RunCharts
from ltui.app.panels.tab_bar import TabBar
from ltui.app.presentation import run_view
from ltui.app.presentation.gpu_view import HEAT_STRIP_MIN_GPUS, gpus_title
from ltui.app.presentation.notifications import CONTROLS, farewell, refusal, resume_hint, toasts_for
from ltui.app.presentation.panel_layout import (
    DETAILS,
    FRAME_LINES,
    PANELS,
    UPPER,
    LayoutMode,
    PanelLayout,
    TableLines,
)
from ltui.app.screens.confirm import ConfirmScreen, ProblemScreen
from ltui.app.screens.gpu import GpuScreen
from ltui.app.screens.schedule_stop import StopWhenScreen
from ltui.app.screens.stop_question import StopScreen, stop_question
from ltui.training.config.verdict_levels import BLOCKING_LEVELS
from ltui.training.problem import ProblemError
from ltui.training.state.good_checkpoints import last_good_checkpoint
from ltui.training.state.run_snapshot import LIVE, RunSnapshot, RunState
from ltui.training.store.run_directory import RunDir
from ltui.widgets import formats
from ltui.widgets.charts.chart import Chart
from ltui.widgets.gpu_table import GpuTable
from ltui.widgets.header import RunHeader
from ltui.widgets.log_rows import LogLevel
from ltui.widgets.log_view import LogLines, LogView
from ltui.widgets.rank_table import RankTable
from ltui.widgets.sanitise import clean_name
from ltui.widgets.view_models import LogLine

TITLES = {
    "loss": "metrics",
    "throughput": "throughput",
    "gpus": "GPUs",
    "ranks": "ranks",
    "log": "log",
    "details": "details",
}
EVERYONE, ENGINE = -1, -2
"""Whose log is shown, besides the number of a rank."""
MOST_ROWS = 9
"""Lines that GPUs and ranks get where panels stand above each other; the rest is scrolled to."""
MOST_GPU_LINES = 17
"""With the heat strip of many GPUs above their rows, and what is wrong below."""

KEYS = """
[Run]
s      | stop                | stop             | Stop after the current step, with a checkpoint
S      | stop_when           | schedule stop    | Stop at a step, epoch, metric value or time
p      | pause               | pause            | Pause, or continue a paused run
c      | checkpoint          | checkpoint       | Save a checkpoint and keep running
k      | kill                | kill             | Kill every process of the run, after a question
r      | resume              | resume           | Resume from a checkpoint, with changes if wanted
R      | rerun               | run again        | Start a new run with the settings of this one
d      | diagnose            | diagnose         | Show what is wrong and what each rank does
[Charts]
m      | choose_metrics      | choose metrics   | Choose the metrics that the first panel shows
x      | axis                | x axis           | Show steps, epochs or time on the x axis
y      | log_scale           | y scale          | Switch between a linear and a logarithmic y axis
o      | outliers            | outliers         | Show all values, or cut outliers off the y axis
+,=    | smooth(1)           | more smoothing   | Smooth the curves more
-      | smooth(-1)          | less smoothing   | Smooth the curves less
[Log]
v      | whose_log           | choose rank      | Show all ranks, one rank, or the launcher
/      | search              | find             | Find in the log
[Screen]
1      | panel('loss')       | metrics          | Go to the charts of metrics
2      | panel('throughput') | throughput       | Go to the throughput chart
3      | panel('gpus')       | GPUs             | Go to the GPUs
4      | panel('ranks')      | ranks            | Go to the ranks
5,l    | panel('log')        | log              | Go to the log
6      | panel('details')    | details          | Go to metrics, checkpoints, events and settings
z      | zoom                | maximise         | Maximise the panel with the focus, or restore all
]      | details             | details column   | Show or hide the details beside the panels
0      | reset               | reset layout     | Restore the layout, the zoom and the smoothing
escape | cancel              | cancel           | Restore a maximised panel; close an opened run
q      | back                | close            | Close this screen (training continues)
"""


class FrameArrived(Message):
    """A new picture of the run. The latest wins."""

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self.frame = frame

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, FrameArrived)


class RunScreen(Screen[None]):
    """``alone``: the app was opened at this run, so leaving the screen leaves the app."""

    SCOPE = "run"
    ABOUT = "Closing this screen never stops the run: training continues."
    BINDINGS: ClassVar[list[BindingType]] = bindings("run", KEYS)

    def __init__(
        self,
        run_dir: RunDir,
        *,
        readonly: bool = False,
        alone: bool = False,
        make_watch: Callable[[], Poller] | None = None,
    ) -> None:
        super().__init__()
        self.run_dir, self.readonly, self.alone = run_dir, readonly, alone
        self._requests = LatestCurveRequest()
        self._make_watch = make_watch or (lambda: RunPoller(run_dir, self._requests))
        self._feed: PollerThread | None = None
        self.frame: Frame | None = None
        self.arrangement = PanelLayout()
        self.log_of = EVERYONE
        self._drawn: dict[str, Any] = {}

    # -- building ----------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        yield RunHeader(id="header")
        yield Static(id="ending", markup=False)
        yield TabBar(id="tabs")
        with Horizontal(id="columns"):
            with Vertical(id="body"):
                yield RunCharts(self.run_dir.home, self._requests, id="charts")
                with Panel(3, TITLES["gpus"], id="gpus"):
                    yield GpuOverview(id="gpu-overview")
                    yield Static(id="gpu-note", markup=False)
                with Panel(4, TITLES["ranks"], id="ranks"):
                    yield RankTable(id="rank-table")
                with Panel(5, TITLES["log"], id="log"):
                    yield LogView(id="log-view")
            with Panel(6, TITLES["details"], id="details"):
                yield DetailsView(id="details-view")
        yield Static(
            "ltui needs a little more room: 60 columns and 12 lines.", id="tiny", markup=False
        )
        yield KeyFooter(id="keys")

    def on_mount(self) -> None:
        self._feed = PollerThread(self._make_watch, self._post_frame, run_id=self.run_dir.id)
        self._feed.start()
        width, height = self.app.size
        self._lay_out(replace(self.arrangement, width=width, height=height))

    def on_unmount(self) -> None:
        if self._feed is not None:
            self._feed.stop()

    def _post_frame(self, frame: Frame) -> None:
        # Called from the feed's thread: posting is all that is allowed there.
        self.post_message(FrameArrived(frame))

    def on_resize(self, event: events.Resize) -> None:
        self._rearrange(replace(self.arrangement, width=event.size.width, height=event.size.height))

    def _rearrange(self, arrangement: PanelLayout) -> None:
        """Take another size or other needs; the layout is made again only if it changes."""
        before, self.arrangement = self.arrangement, arrangement
        now = (arrangement.mode, arrangement.visible(), arrangement.fits_rows())
        if now != (before.mode, before.visible(), before.fits_rows()):
            self._lay_out(arrangement)

    def _lay_out(self, arrangement: PanelLayout) -> None:
        if not self.is_mounted:
            return
        self.arrangement = arrangement
        seen = arrangement.visible()
        for name in PANELS:
            self.query_one(f"#{name}").display = name in seen
        self.query_one("#charts").display = bool(seen & UPPER)
        self.query_one("#columns").display = bool(seen)
        self.query_one("#body").display = bool(seen - {DETAILS})
        self.set_class(DETAILS in seen and not arrangement.shows_side_details(), "-details-below")
        self.set_class(arrangement.fits_rows(), "-stacked")
        tabs = arrangement.tabs()
        self.query_one("#tabs").display = bool(tabs)
        numbered = [(PANELS.index(name) + 1, name, TITLES[name]) for name in tabs]
        lower = arrangement.mode is LayoutMode.HALF and not arrangement.zoomed
        self.query_one(TabBar).show(numbered, arrangement.lower if lower else arrangement.chosen)
        self.query_one("#tiny").display = not seen
        for room in LayoutMode:
            self.set_class(room is arrangement.mode, f"-{room.value}")
        self.set_class(arrangement.zoomed, "-zoomed")
        # A panel that was out of sight has missed frames; the log knows by itself how many lines.
        self._drawn = {k: v for k, v in self._drawn.items() if k == "log"}
        self.query_one(RunCharts).forget_drawn()
        if self.frame is not None:
            self._draw(self.frame)

    # -- drawing -----------------------------------------------------------------------------------

    @on(FrameArrived)
    def _take(self, message: FrameArrived) -> None:
        message.stop()
        if not self.query("#loss"):
            return  # The screen is being removed.
        before = self.frame.snapshot if self.frame is not None else None
        self.frame = message.frame
        needs = needs_of(self.frame.snapshot)
        if needs != self.arrangement.needs:
            self._rearrange(replace(self.arrangement, needs=needs))
        for sentence, severity in toasts_for(before, self.frame.snapshot):
            self.notify(sentence, severity=severity, markup=False)  # type: ignore[arg-type]
        # Below a dialog nothing moves: the whole screen would be drawn again for every change.
        if self.is_current:
            self._draw(self.frame)

    def on_screen_resume(self) -> None:
        if self.frame is not None:
            self._draw(self.frame)

    def _draw(self, frame: Frame) -> None:
        seen = self.arrangement.visible()
        self._draw_header(frame)
        self._draw_ending(frame)
        self._draw_keys(frame)
        self.query_one(RunCharts).show(frame, seen)
        if "gpus" in seen:
            self._draw_gpus(frame)
        if "ranks" in seen:
            self._draw_ranks(frame)
        if "log" in seen:
            self._draw_log(frame)
        if DETAILS in seen:
            self.query_one(DetailsView).show(frame)

    def _draw_header(self, frame: Frame) -> None:
        header = self.query_one(RunHeader)
        view_model = header.view_model = run_view.header(frame)
        below = (view_model.banner is None, len(view_model.notes))
        if self._drawn.get("below header") != below:
            self._drawn["below header"] = below
            # Again after the present layout: where two changes fall into one, Textual keeps the
            # widget's height, and the banner would stay hidden.
            self.call_after_refresh(header.refresh, layout=True)

    def _draw_gpus(self, frame: Frame) -> None:
        board = self.query_one(GpuOverview)
        has = bool(frame.snapshot.gpus)
        board.display = has
        self.query_one("#gpu-note").display = not has
        shared = self.arrangement.fits_rows()
        self.query_one("#gpus", Panel).set_titles(TITLES["gpus"], gpus_title(frame))
        if has:
            self._fit("gpus", board.show(frame, alone=not shared), MOST_GPU_LINES)
        else:
            text = run_view.processes_text(frame)
            self._say("#gpu-note", text)
            self._fit("gpus", text.plain.count("\n") + 1)

    @on(GpuTable.RowSelected)
    def _open_gpu(self, message: GpuTable.RowSelected) -> None:
        if isinstance(message.table, GpuTable):
            message.stop()
            self.app.push_screen(GpuScreen(lambda: self.frame, message.key))

    def _draw_ranks(self, frame: Frame) -> None:
        rows = run_view.rank_rows(frame)
        self.query_one(RankTable).set_rows(rows)
        self.query_one("#ranks", Panel).set_titles(TITLES["ranks"], run_view.ranks_title(frame))
        self._fit("ranks", len(rows) + 1)

    @on(RankTable.RowSelected)
    def _open_rank(self, message: RankTable.RowSelected) -> None:
        """Enter on a rank: its log."""
        if isinstance(message.table, RankTable):
            message.stop()
            self.log_of = int(message.key.removeprefix("r"))
            self.action_panel("log")
            if self.frame is not None:
                self._draw_log(self.frame)

    def _fit(self, name: str, lines: int, most: int = MOST_ROWS) -> None:
        """Make a panel as high as its rows if other panels are seen below the charts."""
        frame_lines = 0 if self.arrangement.mode is LayoutMode.TABS else FRAME_LINES
        fitted = min(max(lines, 2), most) + frame_lines
        height: int | str = fitted if self.arrangement.fits_rows() else "1fr"
        if self._drawn.get(f"{name} height") != height:
            self._drawn[f"{name} height"] = height
            self.query_one(f"#{name}").styles.height = height

    def _draw_log(self, frame: Frame) -> None:
        view = self.query_one(LogView)
        key = (frame.snapshot.attempt, self.log_of, frame.log_count)
        shown = self._drawn.get("log")
        if shown == key:
            return
        self._drawn["log"] = key
        if shown is not None and shown[:2] == key[:2] and shown[2] <= frame.log_count:
            new = frame.log[max(0, len(frame.log) - (frame.log_count - shown[2])) :]
            view.extend(line for line in new if of_rank(line, self.log_of))
        else:
            view.lines.show_ranks = self.log_of == EVERYONE
            view.set_lines(line for line in frame.log if of_rank(line, self.log_of))
        self._name_log()

    def _name_log(self) -> None:
        lines = self.query_one(LogView).lines
        following = "live" if lines.follow else "f: jump to newest"
        level = "" if lines.level is LogLevel.ALL else f", {lines.level.value}"
        whose = {EVERYONE: "all ranks", ENGINE: "launcher"}.get(self.log_of, f"rank {self.log_of}")
        self.query_one("#log", Panel).set_titles(
            f"log, {whose}{level}", f"v: choose rank · L: level · {following}"
        )

    @on(LogLines.FollowChanged)
    @on(LogLines.LevelChanged)
    def _following(self, message: Message) -> None:
        message.stop()
        self._name_log()

    def action_whose_log(self) -> None:
        """All, then each rank, then the engine."""
        ranks = [r.rank for r in self.frame.snapshot.ranks] if self.frame is not None else []
        order = [EVERYONE, *sorted(ranks), ENGINE]
        place = order.index(self.log_of) if self.log_of in order else -1
        self.log_of = order[(place + 1) % len(order)]
        if self.frame is not None:
            self._draw_log(self.frame)

    def _draw_ending(self, frame: Frame) -> None:
        lines = run_view.end_cells(frame)
        self.query_one("#ending").display = bool(lines)
        if lines:
            hint = resume_hint(frame.snapshot, readonly=self.readonly)
            self._say("#ending", run_view.cells_text(lines, hint))

    def _draw_keys(self, frame: Frame) -> None:
        self.query_one(KeyFooter).show(self._hints(frame.snapshot))

    def _hints(self, snapshot: RunSnapshot) -> list[KeyHint]:
        return key_hints(snapshot, readonly=self.readonly, focused=self.focused)

    def _say(self, selector: str, text: Any) -> None:
        before = self._drawn.get(selector)
        if before != text:
            self._drawn[selector] = text
            # Only another number of lines moves anything else.
            layout = before is None or str(before).count("\n") != str(text).count("\n")
            self.query_one(selector, Static).update(text, layout=layout)

    # -- panels ------------------------------------------------------------------------------------

    def action_panel(self, name: str) -> None:
        self._lay_out(self.arrangement.choose(name))
        for child in self.query_one(f"#{name}").query("*"):
            if child.focusable:
                child.focus()
                break

    @on(events.DescendantFocus)
    def _focus_moved(self, event: events.DescendantFocus) -> None:
        if self.frame is not None:
            self._draw_keys(self.frame)
        panels = [a for a in event.widget.ancestors_with_self if isinstance(a, Panel)]
        name = panels[0].id if panels else None
        if name in PANELS and name != self.arrangement.chosen and not self.arrangement.zoomed:
            self.arrangement = self.arrangement.choose(name)
        if self.frame is not None:
            self._draw_keys(self.frame)

    def action_zoom(self) -> None:
        self._lay_out(replace(self.arrangement, zoomed=not self.arrangement.zoomed))

    def action_reset(self) -> None:
        self.query_one(RunCharts).reset()
        now = self.arrangement
        self._lay_out(PanelLayout(width=now.width, height=now.height, needs=now.needs))

    def action_details(self) -> None:
        now = self.arrangement.toggle_details()
        if now.chosen == DETAILS:
            self.action_panel(DETAILS)
        else:
            self._lay_out(now)

    def action_axis(self) -> None:
        shown = self.query_one(RunCharts)
        shown.next_axis()
        self.notify(f"x axis: {shown.settings.axis}", timeout=2)

    def action_log_scale(self) -> None:
        self.query_one(RunCharts).toggle_log()

    def action_outliers(self) -> None:
        self.query_one(RunCharts).toggle_outliers()

    def action_choose_metrics(self) -> None:
        self.query_one(RunCharts).choose_metrics()

    def action_smooth(self, by: int) -> None:
        self.query_one(RunCharts).smooth(by)

    def action_follow_log(self) -> None:
        self.query_one(LogView).action_follow()

    def action_wrap_log(self) -> None:
        self.query_one(LogView).action_wrap()

    def action_log_level(self) -> None:
        self.query_one(LogView).action_level()

    def action_search(self) -> None:
        self.action_panel("log")
        self.query_one(LogView).action_find()

    # -- commands ----------------------------------------------------------------------------------

    @property
    def snapshot(self) -> RunSnapshot | None:
        return self.frame.snapshot if self.frame is not None else None

    def refusal_of(self, action: str) -> str | None:
        """Return why ``action`` can't be done now."""
        action = "stop" if action == "stop_when" else action
        return refusal(self.snapshot, action, readonly=self.readonly)

    def palette_entries(self) -> Iterator[tuple[str, str, Callable[[], object]]]:
        """Yield what the palette can show of this run: title, help, and what to do."""
        for name in self.frame.curve_names if self.frame is not None else ():
            show = partial(self._show_metric, name)
            yield f"Show metric {clean_name(name)}", "Add this metric to the charts", show

    def _show_metric(self, name: str) -> None:
        self.query_one(RunCharts).show_metric(name)
        self.action_panel("loss")

    def _refused(self, action: str) -> bool:
        """Says why ``action`` can't be done, if it can't."""
        why = self.refusal_of(action)
        if why is not None:
            self.notify(why, severity="warning", markup=False)
        return why is not None

    def action_stop(self) -> None:
        if self._refused("stop") or self.snapshot is None:
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self._ask({"cmd": "stop"}, "stopping after the current step, with a checkpoint")

        self.app.push_screen(StopScreen(stop_question(self.snapshot)), answered)

    def action_stop_when(self) -> None:
        if self._refused("stop") or self.snapshot is None:
            return

        def answered(request: dict[str, Any] | None) -> None:
            if request is not None:
                self._ask(request, None)

        self.app.push_screen(StopWhenScreen(self.snapshot.stops), answered)

    def action_pause(self) -> None:
        if self._refused("pause"):
            return
        if self.snapshot is not None and self.snapshot.state in (RunState.PAUSED, RunState.PAUSING):
            self._ask({"cmd": "continue"}, None)
        else:
            self._ask({"cmd": "pause"}, None)

    def action_checkpoint(self) -> None:
        if not self._refused("checkpoint"):
            self._ask({"cmd": "checkpoint"}, "saving a checkpoint after the current step")

    def action_kill(self) -> None:
        if self._refused("kill") or self.snapshot is None:
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self._ask({"cmd": "kill"}, "killing every process of the run")

        question = kill_question(self.snapshot)
        self.app.push_screen(ConfirmScreen(question, yes="kill it", no="keep it running"), answered)

    def action_resume(self) -> None:
        if not self._refused("resume"):
            self._rerun(new_run=False)

    def action_rerun(self) -> None:
        if not self._refused("rerun"):
            self._rerun(new_run=True)

    def _rerun(self, *, new_run: bool) -> None:
        # Imported here: what starts runs is not needed for the first picture.
        from ltui.app.screens.rerun import RerunScreen

        def started(run_dir: RunDir | None) -> None:
            if run_dir is not None and run_dir != self.run_dir:
                self.app.push_screen(RunScreen(run_dir, readonly=self.readonly))

        self.app.push_screen(RerunScreen(self.run_dir, new_run=new_run), started)

    @work(thread=True, exclusive=True, group="command", exit_on_error=False)
    def _ask(self, request: dict[str, Any], said: str | None) -> None:
        # Imported here: what starts supervisors is not needed for the first picture.
        from ltui.app.live.run_requests import send_request

        self._report(lambda: send_request(self.run_dir, request), said)

    def _report(self, do: Callable[[], object], said: str | None) -> None:
        """In a worker's thread: do it, and say what came of it."""
        worker = get_current_worker()
        try:
            do()
        except ProblemError as error:
            lines = [str(p) for p in error.problems]
        except Exception as error:  # noqa: BLE001 - the thread's top: it becomes a message
            lines = [f"{type(error).__name__}: {error}"]
        else:
            if said and not worker.is_cancelled:
                self.app.call_from_thread(self.notify, said, timeout=3, markup=False)
            return
        if not worker.is_cancelled:
            self.app.call_from_thread(self._show_problems, lines)

    def _show_problems(self, lines: list[str]) -> None:
        self.app.push_screen(ProblemScreen("The request failed", lines))

    def action_diagnose(self) -> None:
        # Imported here: what asks supervisors is not needed for the first picture.
        from ltui.app.screens.diagnosis import DiagnoseScreen

        self.app.push_screen(DiagnoseScreen(self.run_dir, lambda: self.frame))

    # -- leaving -----------------------------------------------------------------------------------

    def farewell(self) -> str:
        """What is said on leaving."""
        if self.snapshot is None:
            return f"To watch it again: ltui attach {clean_name(self.run_dir.id)}"
        return farewell(self.snapshot)

    def action_cancel(self) -> None:
        """Restore a maximised panel, or go back to home. Escape never quits the program."""
        if self.arrangement.zoomed:
            self.action_zoom()
        elif self.alone:
            self.notify("q quits ltui; training continues", timeout=2)
        else:
            self.action_back()

    def action_back(self) -> None:
        if self.alone:
            self.app.exit(message=self.farewell())
        else:
            if self.snapshot is not None and self.snapshot.state in LIVE:
                name = clean_name(self.snapshot.name)
                self.app.notify(f"{name} keeps running", markup=False)
            self.app.pop_screen()


def needs_of(snapshot: RunSnapshot) -> TableLines:
    """The lines that the GPUs and ranks of a run take, whatever is wrong with them."""
    ranks = max(len(snapshot.ranks), snapshot.world_size or 1)
    gpus = len(snapshot.gpus)
    lines = 0
    if gpus:
        heat = HEAT_LINES + 1 if gpus >= HEAT_STRIP_MIN_GPUS else 0
        lines = heat + min(gpus + 1, TABLE_LINES) + FINDINGS
    elif any((rank.device or "").startswith("cuda") for rank in snapshot.ranks):
        # GPUs that can't be read: why is said in their place, above the ranks' processes.
        lines = ranks + 1
    return TableLines(gpus=min(lines, MOST_GPU_LINES), ranks=min(ranks + 1, MOST_ROWS))


def of_rank(line: LogLine, whose: int) -> bool:
    if whose == EVERYONE:
        return True
    return line.rank is None if whose == ENGINE else line.rank == whose


def kill_question(snapshot: RunSnapshot) -> str:
    """Names what a kill loses."""
    name = clean_name(snapshot.name)
    saved = last_good_checkpoint(snapshot.checkpoints)
    if saved is None:
        lost = "It has no checkpoint. All its progress will be lost."
    else:
        done = max(0, (snapshot.global_step or saved.global_step) - saved.global_step)
        steps = "step" if done == 1 else "steps"
        lost = (
            f"Its last checkpoint is from step {formats.step(saved.global_step)}: "
            f"{formats.count(done)} {steps} will be lost."
        )
    instead = "To stop it with a checkpoint instead, press s on the run's screen."
    return f"Kill {name}? All its processes end at once.\n{lost}\n{instead}"


CHART_HINTS = (
    KeyHint("↑↓", "zoom", "focused.zoom(1)"),
    KeyHint("←→", "crosshair", "focused.move(1)"),
    KeyHint("shift+←→", "pan", "focused.pan(1)"),
    KeyHint("home", "show all", "focused.show_all"),
)
"""While a chart has the focus."""
SCALE_HINTS = (
    KeyHint("m", "metrics", "screen.choose_metrics"),
    KeyHint("x", "x axis", "screen.axis"),
    KeyHint("y", "y scale", "screen.log_scale"),
    KeyHint("+-", "smoothing", "screen.smooth(1)"),
)
LOG_HINTS = (
    KeyHint("/", "find", "screen.search"),
    KeyHint("v", "choose rank", "screen.whose_log"),
    KeyHint("f", "follow", "screen.follow_log"),
    KeyHint("L", "level", "screen.log_level"),
    KeyHint("w", "wrap", "screen.wrap_log"),
)
"""While the log has the focus."""
TYPING_HINTS = (
    KeyHint("⏎", "find", "screen.search", keep=True),
    KeyHint("esc", "close search", "screen.search", keep=True),
)
"""While a text field has the focus, every letter is typed into it."""


def key_hints(
    snapshot: RunSnapshot, *, readonly: bool, focused: Widget | None = None
) -> list[KeyHint]:
    """The footer: what can be done now, with the keys of the panel that has the focus."""
    if isinstance(focused, Input):
        return list(TYPING_HINTS)
    paused = snapshot.state in (RunState.PAUSED, RunState.PAUSING)
    leave = "close (training continues)" if snapshot.state in LIVE else "close"
    grave = any(v.level in BLOCKING_LEVELS and v.ended is None for v in snapshot.verdicts)
    stuck = grave and snapshot.state in LIVE
    diagnose = KeyHint("d", "diagnose", "screen.diagnose", keep=stuck)
    kill = KeyHint("k", "kill", "screen.kill", keep=stuck)
    in_log = focused is not None and any(isinstance(a, LogView) for a in focused.ancestors)
    panel = CHART_HINTS if isinstance(focused, Chart) else LOG_HINTS if in_log else ()
    wanted = [
        # What helps a run that is stuck comes first then.
        *([diagnose, kill] if stuck else []),
        KeyHint("s", "stop", "screen.stop"),
        KeyHint("p", "continue" if paused else "pause", "screen.pause"),
        KeyHint("c", "checkpoint", "screen.checkpoint"),
        *([] if stuck else [kill]),
        KeyHint("r", "resume", "screen.resume", keep=True),
        *([] if stuck else [diagnose]),
        *panel,
        KeyHint("1-6", "panel", "screen.panel('loss')"),
        KeyHint("z", "maximise", "screen.zoom"),
        *([] if in_log else SCALE_HINTS),
        KeyHint("t", "theme", "app.choose_theme"),
        KeyHint("?", "help", "app.help", keep=True),
        KeyHint("q", leave, "screen.back", keep=True),
        KeyHint("R", "run again", "screen.rerun"),
    ]
    refused = {c for c in CONTROLS if refusal(snapshot, c, readonly=readonly)}
    return [h for h in wanted if h.action.removeprefix("screen.") not in refused]
