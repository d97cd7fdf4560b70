"""The comparison of runs: their curves over one another, a table of runs, and what differs.

Runs that are still going on are read again every second, in a worker thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from msgspec.structs import replace
from textual import on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.worker import get_current_worker

from ltui.app.compare.alignment import AXES
from ltui.app.compare.compared_run import keep_colours
from ltui.app.compare.comparison import Comparison, Grouping
from ltui.app.compare.comparison_charts import (
    ViewSettings,
    charts_caption,
    chosen_metric,
    comparison_charts,
    group_key,
    parallel_view,
)
from ltui.app.compare.comparison_tables import EQUAL, parameters_table, runs_table, settings_table
from ltui.app.compare.read_run import ReadSnapshot, RunsRead, read_again, read_runs
from ltui.app.keys.footer import KeyFooter, KeyHint
from ltui.app.panels.comparison_widgets import ComparisonTable, ParallelChart, SettingsTable
from ltui.app.panels.linked_charts import (
    MetricGrid,
    link_crosshair,
    link_view,
    show_whole_axis,
    toggle_log,
    toggle_outliers,
)
from ltui.app.panels.panel import Panel, TabBar
from ltui.app.presentation.chart_axis import marks_legend
from ltui.app.presentation.metric_names import MetricChoice
from ltui.app.screens.choosers import MetricChooser
from ltui.app.screens.dialog import call_screen, error_lines
from ltui.app.screens.panel_screen import PanelScreen
from ltui.training.lifecycle.run_status import current_snapshot
from ltui.training.store.run_directory import RunDir
from ltui.widgets.charts.chart import Chart
from ltui.widgets.charts.parallel_plot import ParallelViewModel
from ltui.widgets.make_bindings import bindings
from ltui.widgets.sanitise import clean_line, clean_name
from ltui.widgets.table import Table
from ltui.widgets.view_models import ChartViewModel

MAX_TAB_METRIC = 24
"""Maximum cells of a metric's name in a tab."""
REFRESH_S = 1.0
"""Seconds between two readings of runs that are still going on."""
HINTS = (
    KeyHint("space", "hide", "screen.hide", keep=True),
    KeyHint("p", "pin", "screen.pin", keep=True),
    KeyHint("G", "groups", "screen.group", keep=True),
    KeyHint("q", "back", "screen.leave_comparison", keep=True),
    KeyHint("n", "next metric", "screen.next_metric"),
    KeyHint("x", "axis", "screen.axis"),
    KeyHint("s", "sort", "screen.sort"),
    KeyHint("4", "parameters", "screen.panel('parameters')"),
    KeyHint("m", "metrics", "screen.choose"),
    KeyHint("z", "maximise", "screen.zoom"),
    KeyHint("?", "help", "app.help", keep=True),
)

KEYS = [
    *bindings(
        "compare",
        """
        [Runs]
        space  | hide          | hide or show  | Hide or show the curve of the row under the cursor
        p      | pin           | pin           | Pin the run under the cursor as the reference
        enter  | open          | open          | Open the run; unfold or fold a group
        s      | sort          | sort          | Sort the runs by the next column
        S      | reverse       | reverse       | Reverse the order
        G      | group         | groups        | Runs that differ only in the seed as one curve
        B      | band          | band          | Band of groups: range, deviation, error, 95 %
        [Curves]
        n      | next_metric   | next metric   | The next metric first, and in the table
        m      | choose        | metrics       | Choose the metrics that are compared
        x      | axis          | x axis        | Align the curves by step, epoch or training time
        plus,equals_sign | smooth(1) | smoother | More smoothing
        minus  | smooth(-1)    | rougher       | Less smoothing
        [Parameters]
        left   | axes(-1)      | axes left     | Show the axes further left
        right  | axes(1)       | axes right    | Show the axes further right
        v      | value         | best or final | The best or the final value as the last axis
        Y      | export('text') | copy as text | Copy these axes, or the first chart
        w      | export('svg') | save as SVG   | Save them as a picture
        W      | export('png') | save as PNG   | Save them as PNG
        [Screen]
        1      | panel('curves')   | curves    | Go to the curves
        2      | panel('runs')     | runs      | Go to the table of runs
        3      | panel('settings') | settings  | Go to the settings that differ
        4      | panel('parameters') | parameters | Go to the settings beside the metric
        z      | zoom          | maximise      | Maximise the panel in focus, or restore all
        escape | cancel        | cancel        | Restore a maximised panel, or go back
        q      | leave_comparison | close      | Go back, or quit if this is the only screen
        """,
    ),
    # With priority, because a chart in focus has keys for its own scale.
    *bindings(
        "compare",
        """
        [Curves]
        y | log_scale | y scale  | Linear or logarithmic y axis of all charts
        o | outliers  | outliers | Show all values, or cut outliers off, in all charts
        """,
        priority=True,
    ),
]


class CompareScreen(PanelScreen):
    """Several runs compared. The first one is the reference until another one is pinned."""

    PANELS: ClassVar[Mapping[str, str]] = {
        name: name for name in ("curves", "runs", "settings", "parameters")
    }
    ABOUT = "Each run keeps its colour, and its sign unless another run here has it."
    BINDINGS: ClassVar[list[BindingType]] = list(KEYS)

    def __init__(
        self,
        run_dirs: Sequence[RunDir],
        *,
        globs: Sequence[str] = (),
        settings: ViewSettings | None = None,
        grouping: Grouping | None = None,
        snapshot_of: ReadSnapshot = current_snapshot,
    ) -> None:
        super().__init__()
        self.settings = settings or ViewSettings()
        self._run_dirs, self._globs = tuple(run_dirs), tuple(globs)
        self._grouping, self._snapshot_of = grouping or Grouping(), snapshot_of
        self._read: RunsRead | None = None
        self._reading = False
        self._charts: list[ChartViewModel] = []
        """The charts without marks, the one of the table first."""
        self._parallel = ParallelViewModel()
        self._failure = ""
        """Why the last reading failed."""
        self.comparison: Comparison | None = None
        self._left = "curves"
        """The panel on the left side of a large terminal."""

    def compose(self) -> ComposeResult:
        yield TabBar(id="tabs")
        with Horizontal(id="body"):
            with Panel(1, "curves", id="curves"):
                yield MetricGrid(id="metric-grid")
            with Panel(4, "parameters", id="parameters"):
                yield ParallelChart(id="parallel-chart")
                yield ComparisonTable(id="parameters-table")
            with Vertical(id="tables", classes="panels"):
                with Panel(2, "runs", id="runs"):
                    yield ComparisonTable(id="runs-table")
                with Panel(3, "settings that differ", id="settings"):
                    yield SettingsTable(id="settings-table")
        yield KeyFooter(HINTS, id="keys")

    def on_mount(self) -> None:
        self.lay_out()
        self.query_one("#runs-table").focus()
        self._start_reading()
        self.set_interval(REFRESH_S, self._refresh_live)

    def panels_together(self) -> Collection[str]:
        if self.chosen in ("curves", "parameters"):
            self._left = self.chosen
        return self._left, "runs", "settings"

    def tab_title(self, name: str) -> str:
        # A tab has no frame, which has the metric of the table otherwise.
        if name == "runs" and self.comparison is not None:
            metric = chosen_metric(self.comparison, self.settings)
            return "runs" if metric is None else f"runs by {clean_name(metric, MAX_TAB_METRIC)}"
        if name == "settings" and (hidden := self._table("settings").hidden[1]):
            return f"settings +{hidden} →"
        return super().tab_title(name)

    # -- reading -----------------------------------------------------------------------------------

    @property
    def _readonly(self) -> bool:
        return bool(getattr(self.app, "readonly", False))

    def _refresh_live(self) -> None:
        if self._read is not None and any(run.live for run in self._read.runs):
            self._start_reading()

    def _start_reading(self) -> None:
        if not self._reading:
            self._reading = True
            self._read_runs(self._read)

    @work(thread=True, exclusive=True, group="compare")
    def _read_runs(self, before: RunsRead | None) -> None:
        try:
            if before is None:
                read = read_runs(self._run_dirs, self._globs, self._snapshot_of)
            else:
                read = read_again(before, self._run_dirs, self._globs, self._snapshot_of)
        except Exception as error:  # noqa: BLE001 - the thread's top: it becomes a message
            if not get_current_worker().is_cancelled:
                call_screen(self, self._failed, "; ".join(error_lines(error)))
        else:
            if not self._readonly:
                read = replace(read, runs=keep_colours(read.runs, self._run_dirs))
            call_screen(self, self._use, read)

    def _failed(self, reason: str) -> None:
        self._reading = False
        text = clean_line(reason, 300)
        if self.comparison is not None and text != self._failure:
            self.notify(text, severity="error", markup=False)
        self._failure = text
        for table in self.query(ComparisonTable):
            table.note = text

    def _use(self, read: RunsRead) -> None:
        self._reading, self._failure = False, ""
        known = () if self._read is None else self._read.problems
        for problem in read.problems:
            if problem not in known:
                self.notify(clean_line(str(problem), 300), severity="warning", markup=False)
        before, self._read = self._read, read
        # A run that is not read again is the same object.
        if before is None or (read.runs, read.metrics) != (before.runs, before.metrics):
            self._draw()

    # -- drawing -----------------------------------------------------------------------------------

    def _draw(self) -> None:
        if self._read is None:
            return
        comparison = self.comparison = Comparison(
            runs=self._read.runs,
            metrics=self._read.metrics,
            axis=self.settings.chart.axis,
            band=self.settings.band,
            grouping=self._grouping,
        )
        self._charts = comparison_charts(comparison, self.settings)
        self._parallel = parallel_view(comparison, self.settings)
        metric = chosen_metric(comparison, self.settings)
        title = "" if metric is None else clean_name(metric)
        self._table("runs").show(runs_table(comparison, self.settings))
        self._table("parameters").show(parameters_table(comparison, self.settings))
        self.query_one("#runs", Panel).set_titles("runs", title)
        self.show_tabs()
        self._draw_row()
        self._table("settings").note = "no setting is known"
        self._table("settings").show(settings_table(comparison, self.settings))
        self._count_settings()

    @on(Table.ColumnsHidden)
    def _count_settings(self) -> None:
        """Count in the border which settings differ, and the runs that are to be scrolled to."""
        if self.comparison is None:
            return
        differ, same = len(self.comparison.differing_settings), len(self.comparison.equal_settings)
        left, right = self._table("settings").hidden
        parts = [f"{differ} differ, {same} same"]
        parts += [f"← +{left}"] if left else []
        parts += [f"+{right} run{'s' * (right > 1)} →"] if right else []
        self.query_one("#settings", Panel).set_titles("settings", " · ".join(parts))
        self.show_tabs()

    def _draw_row(self) -> None:
        """Draw what depends on the row under the cursor: marks of its run, and its lines."""
        comparison, key = self.comparison, self._row_key() or ""
        if comparison is None:
            return
        run, axis = comparison.by_id.get(key), comparison.axis
        marks = () if run is None else run.chart_marks(axis)
        grid = self.query_one(MetricGrid)
        grid.show([replace(chart, marks=marks) for chart in self._charts])
        parts = [charts_caption(comparison, self.settings)]
        if marks:
            parts.append(f"{marks_legend(marks)} of {clean_name(comparison.names[key])}")
        if grid.hidden_charts > 0:
            parts.append(f"{grid.hidden_charts} more: n")
        self.query_one("#curves", Panel).set_titles(self._charts[0].title, " · ".join(parts))
        groups = {group_key(group): group.runs for group in comparison.groups}
        self.query_one(ParallelChart).show(self._parallel, groups.get(key, (key,)))

    def _change(self, settings: ViewSettings) -> None:
        self.settings = settings
        self._draw()

    def action_leave_comparison(self) -> None:
        self.leave()

    def leave(self) -> None:
        if len(self.app.screen_stack) > 1:
            self.dismiss(None)
        else:
            self.app.exit()

    # -- charts ------------------------------------------------------------------------------------

    @on(Chart.CrosshairMoved)
    def _crosshair_moved(self, event: Chart.CrosshairMoved) -> None:
        link_crosshair(self.query(Chart), event)

    @on(Chart.ViewChanged)
    def _view_changed(self, event: Chart.ViewChanged) -> None:
        link_view(self.query(Chart), event)

    def action_log_scale(self) -> None:
        toggle_log(self.query_one(MetricGrid).charts)

    def action_outliers(self) -> None:
        toggle_outliers(self.query_one(MetricGrid).charts)

    def action_axis(self) -> None:
        # The zoomed part was a part of the previous axis.
        show_whole_axis(self.query(Chart))
        now = self.settings.chart
        following = AXES[(AXES.index(now.axis) + 1) % len(AXES)]
        self._change(replace(self.settings, chart=replace(now, axis=following)))

    def action_smooth(self, by: int) -> None:
        chart = self.settings.chart
        smoothing = chart.next_smoothing(by)
        self._change(replace(self.settings, chart=replace(chart, smoothing=smoothing)))

    def action_next_metric(self) -> None:
        if self.comparison is None or not self.comparison.metrics:
            return
        names = self.comparison.metrics
        now = chosen_metric(self.comparison, self.settings)
        following = names[(names.index(now) + 1) % len(names)] if now in names else names[0]
        self._change(replace(self.settings, metric=following))

    def action_choose(self) -> None:
        if self._read is None:
            return
        names = sorted({name for run in self._read.runs for name in run.metric_names})
        values = {
            name: value.last
            for run in reversed(self._read.runs)
            for name, value in run.snapshot.metrics.items()
        }

        def chosen(answer: MetricChoice | None) -> None:
            if answer is not None:
                self._globs, self._read = answer.names, None
                # A reading that has begun is of the previous metrics, and is cancelled.
                self._reading = False
                self._start_reading()

        self.app.push_screen(MetricChooser(names, values, self._read.metrics, panel=None), chosen)

    # -- runs and groups ---------------------------------------------------------------------------

    def _table(self, panel: str) -> ComparisonTable:
        return self.query_one(f"#{panel}-table", ComparisonTable)

    def _row_key(self) -> str | None:
        return self._table("runs").cursor_key

    @on(Table.RowHighlighted)
    def _cursor_moved(self, event: Table.RowHighlighted) -> None:
        """Keep the cursors of both tables of runs on the same row."""
        event.stop()
        runs, parameters = self._table("runs"), self._table("parameters")
        if event.table is runs:
            parameters.cursor = runs.cursor
            self._draw_row()
        elif event.table is parameters:
            # If that moves the cursor of the other table, its message follows.
            runs.cursor = parameters.cursor

    @on(ParallelChart.LineClicked)
    def _line_clicked(self, event: ParallelChart.LineClicked) -> None:
        table = self._table("parameters")
        if event.key in table.keys:
            table.cursor = table.keys.index(event.key)

    def action_axes(self, by: int) -> None:
        self.query_one(ParallelChart).move(by)

    def action_export(self, form: str) -> None:
        """Copy or save what the left side shows; a chart in focus does that by itself."""
        if self.query_one("#parameters").display:
            self.query_one(ParallelChart).action_export(form)
        elif charts := self.query_one(MetricGrid).charts:
            charts[0].action_export(form)
        else:
            self.notify("No chart is shown.", severity="warning")

    def action_value(self) -> None:
        value = "final" if self.settings.value == "best" else "best"
        self._change(replace(self.settings, value=value))

    def action_hide(self) -> None:
        key = self._row_key()
        if key is not None:
            self._change(replace(self.settings, hidden=self.settings.hidden ^ {key}))

    def action_pin(self) -> None:
        key = self._row_key()
        if self.comparison is not None and key in self.comparison.by_id:
            self._change(replace(self.settings, reference=key))
        else:
            self.notify("A group cannot be the reference: unfold it with Enter, and pin a run.")

    @on(Table.RowSelected)
    def _row_selected(self, event: Table.RowSelected) -> None:
        event.stop()
        if event.table.id != "settings-table":
            self.action_open()
        elif event.key == EQUAL:
            self._change(replace(self.settings, equal=not self.settings.equal))

    def action_open(self) -> None:
        key = self._row_key()
        run_dir = next((run for run in self._run_dirs if run.id == key), None)
        if run_dir is not None:
            # Imported here: a comparison needs no run's screen until one is opened.
            from ltui.app.screens.run import RunScreen

            self.app.push_screen(RunScreen(run_dir, readonly=self._readonly))
        elif key is not None:
            self._change(replace(self.settings, opened=self.settings.opened ^ {key}))

    @property
    def _sort_keys(self) -> list[str]:
        return self._table("parameters" if self.chosen == "parameters" else "runs").sort_keys

    def action_sort(self) -> None:
        """Sort by the next column of the table in the chosen panel."""
        keys = [None, *self._sort_keys]
        now = keys.index(self.settings.order) if self.settings.order in keys else 0
        self._change(replace(self.settings, order=keys[(now + 1) % len(keys)], reversed=False))

    def on_table_title_clicked(self, event: Table.TitleClicked) -> None:
        """Sort by the column; if the rows are sorted by it, in the opposite order."""
        event.stop()
        if event.column == self.settings.order:
            self.action_reverse()
        elif event.column in self._sort_keys:
            self._change(replace(self.settings, order=event.column, reversed=False))

    def action_reverse(self) -> None:
        self._change(replace(self.settings, reversed=not self.settings.reversed))

    def action_group(self) -> None:
        if self.comparison is not None and not self.comparison.groups:
            self.notify("No two runs differ only in the seed. `ltui compare --ignore KEY` helps.")
            return
        self._change(replace(self.settings, grouped=not self.settings.grouped))

    def action_band(self) -> None:
        self._change(replace(self.settings, band=self.settings.next_band(), grouped=True))
