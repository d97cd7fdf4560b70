"""The list of runs on the home screen, which is read once a second, filtered and sorted."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from textual import work
from textual.app import ComposeResult
from textual.message import Message
from textual.widgets import Input, Static

from ltui.app.panels.panel import FilterPanel, SettingChosen
from ltui.app.screens.dialog import call_screen, error_lines
from ltui.app.settings import settings_of
from ltui.widgets.sanitise import clean_line

if TYPE_CHECKING:
    from ltui.app.panels.runs_table import RunsTable
    from ltui.app.runs.run_entry import RunEntry
    from ltui.app.runs.run_list import RunList
    from ltui.app.runs.run_rows import ListLayout
    from ltui.app.screens.choosers import ColumnChooser
    from ltui.widgets.table import Table

TITLE = "runs"
READING = "reading the runs …"
REFRESH_S = 1.0
"""Seconds between two readings of the runs."""
REST = 20
"""Times as long as a reading takes is waited until the next one, if there are many runs."""
FIRST_READING_S = 0.3
"""Seconds after which a reading shows what it has, if runs are missing in the index."""
SLOW_VALUES_S = 0.2
"""Seconds of one reading in which disk use and settings are read."""
NO_MATCH = "No run matches the filter. Esc clears it."
COLUMNS, SORT = "runs.columns", "runs.sort"
"""The settings of the columns and the order of the list."""


class RunsPanel(FilterPanel):
    """The panel of runs in ``home`` that match the filter."""

    LIST: ClassVar[str] = "#runs-table"

    @dataclass
    class Opened(Message):
        """A run was opened with Enter or a click."""

        line: RunEntry

    class Listed(Message):
        """The runs were read and are listed; also if that failed."""

    def __init__(self, home: Path, *, id: str) -> None:  # noqa: A002 - Textual's name for it
        super().__init__(3, TITLE, id=id)
        self.home = home
        self.lines: dict[str, RunEntry] = {}
        """All runs by id, including those that the filter hides."""
        self.list_layout: ListLayout
        """The columns and the order, from ``start`` on. Without an order, live runs are first, then
        the newest."""
        self.chooser: ColumnChooser | None = None
        """The open dialog for columns, which is told the names of all settings."""
        self.marked: dict[str, None] = {}
        """Ids of the runs that an action is for, including those that the filter hides, in the
        order in which they were marked."""
        self._valid_filter = ""
        """The last filter without an error."""
        self._list: RunList | None = None
        self._reading = False
        self._next_reading = 0.0
        """Time of the monotonic clock before which runs are not read again."""
        self._unread = 0
        """Number of runs that are still to be read."""
        self._incomplete = 0
        """Number of runs whose disk use or settings are still to be read."""
        self._needed: frozenset[str] = frozenset()
        """Names of fields and settings that the last reading was for."""
        self._run_to_select: str | None = None
        """Id of a run to move the cursor to, as soon as it is listed."""

    def compose(self) -> ComposeResult:
        placeholder = "words, tag:base*, state=failed, val/loss<0.2, started>3d ago, not, or"
        yield Input(placeholder=placeholder, id="runs-filter", compact=True, classes="filter")
        yield Static(id="runs-filter-error", markup=False)
        yield Static(READING, id="runs-waiting", markup=False)

    def on_mount(self) -> None:
        self.query_one("#runs-filter-error").display = False

    async def start(self) -> None:
        """Show the table, and refresh it regularly."""
        # Imported here: the first frame has no table.
        from ltui.app.panels.runs_table import RunsTable
        from ltui.app.runs.run_rows import layout_of

        settings = settings_of(self.app)
        self.list_layout = layout_of(settings.value(COLUMNS), settings.value(SORT))
        table = RunsTable(id="runs-table")
        table.note = READING
        await self.query_one("#runs-waiting").remove()
        await self.mount(table)
        self.refresh_runs()
        self.set_interval(REFRESH_S, partial(self.refresh_runs, now=False))

    @property
    def table(self) -> RunsTable:
        return cast("RunsTable", self.query_one("#runs-table"))

    @property
    def is_started(self) -> bool:
        """Whether the table is shown."""
        return bool(self.query("#runs-table"))

    @property
    def selected(self) -> RunEntry | None:
        """The run under the cursor; None before the table is shown."""
        return self.lines.get(self.table.cursor_key or "") if self.is_started else None

    def refresh_runs(self, *, now: bool = True) -> None:
        """Read the runs, unless that is being done. ``now``: do not wait for the next reading."""
        if self._reading:
            return
        needed = self._needed_names()
        if now or time.monotonic() >= self._next_reading or not needed <= self._needed:
            self._reading, self._needed = True, needed
            self._read_runs(needed)

    def _needed_names(self) -> frozenset[str]:
        """Return the names of what the list shows, sorts and filters by."""
        # Imported here: the first frame shows no run.
        from ltui.app.runs.filter_runs import fields_of
        from ltui.app.runs.run_fields import SETTING

        names = {"size", *self.list_layout.columns, self.list_layout.order.removeprefix("-")}
        if self.chooser is not None:
            names.add(SETTING)
        return frozenset(names | fields_of(self._valid_filter))

    @work(thread=True, exclusive=False, group="runs")
    def _read_runs(self, names: frozenset[str]) -> None:
        """Read the runs in a worker's thread."""
        # Imported here, in the worker's thread: the first frame shows no run.
        from ltui.app.runs.run_list import RunList
        from ltui.training.lifecycle.run_status import current_snapshot

        began = time.monotonic()
        try:
            if self._list is None:
                self._list = RunList(self.home, current_snapshot)
            lines = self._list.poll(FIRST_READING_S)
            took = time.monotonic() - began
            lines = self._list.complete(lines, names, SLOW_VALUES_S)
            unread, incomplete = self._list.unread, self._list.incomplete
        except Exception as error:  # noqa: BLE001 - the thread's top: it becomes a message
            reason = "; ".join(error_lines(error))
            call_screen(self, self._show_failure, reason)
        else:
            call_screen(self, self._show, lines, unread, incomplete)
            rest = 0.0 if unread or incomplete else REST * took - REFRESH_S
            self._next_reading = time.monotonic() + rest
        finally:
            self._reading = False

    def _show(self, lines: Sequence[RunEntry], unread: int, incomplete: int) -> None:
        self.lines = {line.id: line for line in lines}
        self._unread, self._incomplete = unread, incomplete
        self.marked = {key: None for key in self.marked if key in self.lines}
        self.fill_list()
        if self.chooser is not None:
            self.chooser.offer(self.logged_names())
        self.post_message(self.Listed())

    def _show_failure(self, reason: str) -> None:
        self.table.note = clean_line(f"The runs can't be read: {reason}")
        self.post_message(self.Listed())

    def logged_names(self) -> set[str]:
        """Return the names of all metrics, and of all settings that were read."""
        # Imported here: the first frame shows no run.
        from ltui.app.runs.run_fields import SETTING

        metrics = {line.metrics.names for line in self.lines.values()}
        settings = {tuple(line.settings) for line in self.lines.values()}
        return {
            *(name for names in metrics for name in names),
            *(f"{SETTING}{name}" for names in settings for name in names),
        }

    def fill_list(self) -> None:
        if not self.is_started:
            return
        # Imported here: the first frame shows no run.
        from ltui.app.runs.filter_runs import run_filter
        from ltui.app.runs.filter_syntax import FilterError
        from ltui.app.runs.run_rows import distinct_programs, is_empty, run_row
        from ltui.widgets.columns import LazyRows

        now = time.time()
        error_line = self.query_one("#runs-filter-error", Static)
        try:
            matches = run_filter(self.filter_text, now)
        except FilterError as error:
            # While a filter is typed, the one before it is used.
            error_line.update(clean_line(f"✗ {error.problems[0]}"))
            error_line.display = True
            matches = run_filter(self._valid_filter, now)
        else:
            error_line.display = False
            self._valid_filter = self.filter_text
        shown = self._ordered([line for line in self.lines.values() if matches(line)])
        marked = frozenset(self.marked)
        table, layout = self.table, self.list_layout
        columns = tuple(
            name for name in layout.columns if not all(is_empty(line, name) for line in shown)
        )
        table.columns, table.order = columns, layout.order
        table.note = NO_MATCH if self.lines and not shown else None
        used = frozenset(line.summary.short_program for line in shown if line.summary is not None)
        programs = distinct_programs(used)
        names = [programs[line.summary.short_program] if line.summary else "" for line in shown]
        # The longest texts decide the widths of columns.
        texts = ([line.name for line in shown], [line.state for line in shown], names)
        lengths = [[len(text) for text in column] for column in texts if column]
        longest = [column.index(max(column)) for column in lengths]
        table.set_rows(
            LazyRows(
                [line.id for line in shown],
                lambda i: run_row(
                    shown[i], now, columns, marked=shown[i].id in marked, programs=programs
                ),
                longest,
            )
        )
        self._show_summary()
        self._select_run()

    def _ordered(self, lines: list[RunEntry]) -> list[RunEntry]:
        # Imported here: the first frame shows no run.
        from ltui.app.runs.run_rows import sort_key, sorted_runs

        if not self.list_layout.order:
            return lines
        name, reverse = sort_key(self.list_layout.order)
        # Live runs stay on top in every order, so that a run that was just started is in view.
        ordered = sorted_runs(lines, name, reverse=reverse)
        return sorted(ordered, key=lambda line: not line.live)

    def on_table_columns_hidden(self, event: Message) -> None:
        event.stop()
        self._show_summary()

    def _show_summary(self) -> None:
        """Count the runs in the border, and the columns that are to be scrolled to."""
        table = self.table
        left, right = table.hidden
        parts = [self._summary(len(table.keys))]
        parts += [f"← +{_columns(left)}"] if left else []
        parts += [f"+{_columns(right)} →"] if right else []
        self.set_titles(TITLE, "  ".join(part for part in parts if part))

    def _summary(self, shown: int) -> str:
        # Imported here: the first frame shows no run.
        from ltui.app.runs.run_rows import order_text
        from ltui.widgets.formats import size

        count = len(self.lines)
        if not count:
            return ""
        runs = "1 run" if count == 1 else f"{count} runs"
        runs = runs if shown == count else f"{shown} of {runs}"
        parts = [runs, *_live_words(self.lines.values())]
        if total := sum(line.size_bytes or 0.0 for line in self.lines.values()):
            parts.append(size(total))
        if self.marked:
            parts.append(f"{len(self.marked)} marked")
        if unread := self._unread + self._incomplete:
            parts.append(f"reading {unread} more")
        if self.list_layout.order:
            parts.append(f"by {order_text(self.list_layout.order)}")
        return ", ".join(parts)

    def metrics_without_column(self) -> list[str]:
        """Return the metrics of all runs that no column shows, in alphabetical order."""
        metrics = {name for line in self.lines.values() for name in line.metrics.names}
        return sorted(metrics.difference(self.list_layout.columns)) if metrics else []

    def add_column(self, name: str) -> None:
        """Show one more column, and remember it."""
        self.use_layout(self.list_layout.with_column(name))

    # -- the selected run --------------------------------------------------------------------------

    def focus_run(self, run_id: str) -> None:
        """Move the focus to the table, and the cursor to a run as soon as it is listed."""
        self._run_to_select = run_id
        if self.is_started:
            self._select_run()
            self.table.focus()

    def _select_run(self) -> None:
        if self._run_to_select is None or self._run_to_select not in self.lines:
            return
        keys = self.table.keys
        if self._run_to_select in keys:
            self.table.cursor = keys.index(self._run_to_select)
            self._run_to_select = None
        elif self.filter_text:
            self.clear_filter()

    def on_table_row_selected(self, event: Message) -> None:
        event.stop()
        line = self.lines.get(getattr(event, "key", ""))
        if line is not None:
            self.post_message(self.Opened(line))

    # -- marks -------------------------------------------------------------------------------------

    def toggle_mark(self) -> None:
        """Mark the run under the cursor or remove its mark, and move to the next run."""
        key = self.table.cursor_key
        if key is not None:
            if key in self.marked:
                del self.marked[key]
            else:
                self.marked[key] = None
            self.fill_list()
            self.table.cursor += 1

    def toggle_all_marks(self) -> None:
        """Mark all runs that the filter shows, or remove their marks if all of them have one."""
        shown = self.table.keys
        if all(key in self.marked for key in shown):
            self.marked = {key: None for key in self.marked if key not in set(shown)}
        else:
            self.marked |= dict.fromkeys(shown)
        self.fill_list()

    def targets(self) -> list[RunEntry]:
        """Return the runs that an action is for: the listed marked ones, else the selected one."""
        if shown := self.shown_marks():
            return [self.lines[key] for key in shown]
        return [] if self.selected is None else [self.selected]

    def shown_marks(self) -> list[str]:
        """Return the marked runs that the filter does not hide, in the order of their marks."""
        if not self.marked or not self.is_started:
            return []
        listed = set(self.table.keys)
        return [key for key in self.marked if key in listed]

    # -- columns and order -------------------------------------------------------------------------

    def use_layout(self, layout: ListLayout) -> None:
        """Show these columns in this order, and remember both."""
        before, self.list_layout = self.list_layout, layout
        self.fill_list()
        if layout.columns != before.columns:
            self.post_message(SettingChosen(COLUMNS, list(layout.columns)))
        if layout.order != before.order:
            self.post_message(SettingChosen(SORT, layout.order))

    def on_table_title_clicked(self, event: Table.TitleClicked) -> None:
        """Sort the runs by the column; if they are, in the opposite order."""
        # Imported here: the first frame shows no run.
        from ltui.app.runs.run_rows import first_order

        event.stop()
        name = self.table.field_of(event.column)
        if name == self.list_layout.order.removeprefix("-"):
            self.reverse_order()
        else:
            self.use_layout(self.list_layout._replace(order=first_order(name)))

    def next_order(self) -> None:
        """Sort the runs by the next column."""
        # Imported here: the first frame shows no run.
        from ltui.app.runs.run_rows import next_order

        columns, order = self.list_layout
        self.use_layout(self.list_layout._replace(order=next_order(order, columns)))

    def reverse_order(self) -> None:
        """Sort the runs in the opposite order."""
        # Imported here: the first frame shows no run.
        from ltui.app.runs.run_rows import reversed_order

        order = reversed_order(self.list_layout.order)
        self.use_layout(self.list_layout._replace(order=order))


def count_queued(lines: Collection[RunEntry]) -> int:
    """Return how many runs wait in the run queue."""
    return sum(line.live and line.run_dir.queued_path.exists() for line in lines)


def _live_words(lines: Collection[RunEntry]) -> list[str]:
    queued = count_queued(lines)
    running = sum(line.live for line in lines) - queued
    return [f"{running or 'none'} running", *([f"{queued} queued"] if queued else [])]


def _columns(count: int) -> str:
    return f"{count} column{'s' if count > 1 else ''}"
