"""The list of runs on the home screen, which is read once a second, filtered and sorted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from textual import work
from textual.app import ComposeResult
from textual.message import Message
from textual.widgets import Input

from ltui.app.panels.filtered_list_panel import FilterPanel
from ltui.app.panels.worker_results import call_screen, error_lines

if TYPE_CHECKING:
    from ltui.app.live.run_list import RunList, RunListEntry
    from ltui.app.panels.runs_table import RunsTable

TITLE = "runs"
REFRESH_S = 1.0
"""Seconds between two readings of the runs."""
NEWEST_FIRST = "newest first"


class RunsPanel(FilterPanel):
    """The panel of runs in ``home`` that match the filter."""

    LIST: ClassVar[str] = "#runs-table"

    class Opened(Message):
        """A run was opened with Enter or a click."""

        def __init__(self, line: RunListEntry) -> None:
            super().__init__()
            self.line = line

    def __init__(self, home: Path, *, id: str) -> None:  # noqa: A002 - Textual's name for it
        super().__init__(3, TITLE, id=id)
        self.home = home
        self.lines: dict[str, RunListEntry] = {}
        """All runs by id, including those that the filter hides."""
        self.order = NEWEST_FIRST
        self._list: RunList | None = None
        self._reading = False
        self._run_to_select: str | None = None
        """Id of a run to move the cursor to, as soon as it is listed."""

    def compose(self) -> ComposeResult:
        placeholder = "filter by name, preset or state"
        yield Input(placeholder=placeholder, id="runs-filter", compact=True, classes="filter")

    async def start(self) -> None:
        """Show the table, and refresh it regularly."""
        # Imported here: the first frame has no table.
        from ltui.app.panels.runs_table import RunsTable

        await self.mount(RunsTable(id="runs-table"))
        self.refresh_runs()
        self.set_interval(REFRESH_S, self.refresh_runs)

    @property
    def table(self) -> RunsTable:
        return cast("RunsTable", self.query_one("#runs-table"))

    @property
    def selected(self) -> RunListEntry | None:
        """The run under the cursor; None before the table is shown."""
        return self.lines.get(self.table.cursor_key or "") if self.query("#runs-table") else None

    @work(thread=True, exclusive=False, group="runs", exit_on_error=False)
    def refresh_runs(self) -> None:
        """Read the runs in a worker's thread, unless a worker is reading them already."""
        # Imported here, in the worker's thread: the first frame shows no run.
        from ltui.app.live.run_list import RunList
        from ltui.training.lifecycle.recover_runs import current_snapshot

        if self._reading:
            return
        self._reading = True
        try:
            if self._list is None:
                self._list = RunList(self.home, current_snapshot)
            lines = self._list.poll()
        except Exception as error:  # noqa: BLE001 - the thread's top: it becomes a message
            reason = "; ".join(error_lines(error))
            call_screen(self, self.set_titles, TITLE, f"can't be read: {reason}")
        else:
            call_screen(self, self._read, lines)
        finally:
            self._reading = False

    def _read(self, lines: Sequence[RunListEntry]) -> None:
        self.lines = {line.id: line for line in lines}
        self.fill_list()

    def fill_list(self) -> None:
        # Imported here: the first frame shows no run.
        from ltui.app.presentation.filter_and_sort_runs import matches, ordered
        from ltui.app.presentation.run_rows import run_row

        pattern = self.filter_text
        shown = [line for line in self.lines.values() if matches(line, pattern)]
        now = time.time()
        table = self.table
        table.note = "no match" if self.lines and not shown else None
        table.set_rows([run_row(line, now) for line in ordered(shown, self.order)])
        self.set_titles(TITLE, self._summary(len(shown)))
        self._select_run()

    def _summary(self, shown: int) -> str:
        count = len(self.lines)
        if not count:
            return ""
        live = sum(line.live for line in self.lines.values())
        runs = "1 run" if count == 1 else f"{count} runs"
        parts = [runs if shown == count else f"{shown} of {runs}", f"{live or 'none'} running"]
        if self.order != NEWEST_FIRST:
            parts.append(f"sorted by {self.order}")
        return ", ".join(parts)

    # -- the selected run --------------------------------------------------------------------------

    def focus_run(self, run_id: str) -> None:
        """Move the focus to the table, and the cursor to a run as soon as it is listed."""
        self._run_to_select = run_id
        self._select_run()
        self.table.focus()

    def _select_run(self) -> None:
        if self._run_to_select is None or self._run_to_select not in self.lines:
            return
        keys = [row.id for row in self.table.rows]
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

    # -- order -------------------------------------------------------------------------------------

    def next_order(self) -> None:
        """Sort the runs in the next order."""
        # Imported here: the first frame shows no run.
        from ltui.app.presentation.filter_and_sort_runs import next_order

        self.order = next_order(self.order)
        self.fill_list()
