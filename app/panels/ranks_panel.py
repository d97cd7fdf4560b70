"""The panel of a run's ranks. On several machines they are grouped by machine, and can be filtered.

The table, the filter and the grid of cells for several machines are mounted when a run has them, so
that nothing changes on one machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from msgspec.structs import replace
from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.message import Message
from textual.widgets import Input

from ltui.app.live.frame import NOT_RECORDED, Frame
from ltui.app.panels.panel import FilterPanel
from ltui.app.presentation import run_view
from ltui.app.presentation.machine_rows import MACHINE_KEY, UNFOLDED, MachineRows, RowSelection
from ltui.app.presentation.machines import missing_machines, rank_summary
from ltui.app.presentation.rank_grid import MIN_RANKS, grid_lines, has_grid, rank_grid
from ltui.app.state_words import waiting_reason
from ltui.training.state.run_snapshot import LIVE, RunSnapshot
from ltui.widgets.charts.chart import takes_key
from ltui.widgets.line_sheet import LiveLines
from ltui.widgets.make_bindings import bindings
from ltui.widgets.run_tables import RankTable
from ltui.widgets.view_models import RankRow

TITLE = "ranks"
MAX_LINES = 9
"""Maximum lines of the table if other panels are visible; the user scrolls to the other rows."""
MAX_LINES_BELOW_GRID = 6
"""The same for a table below a grid of cells."""
MAX_GRID_LINES = 9
"""Maximum lines of the grid with its legend if other panels are visible."""
MIN_TABLE_LINES = 3
"""Lines of the table that a grid leaves free if no other panel is visible."""


def lines_for(run: RunSnapshot, ranks: int) -> int:
    """Return the lines that the panel takes for a number of ranks if other panels are visible."""
    if not run.nodes:
        return min(ranks + 1, MAX_LINES)
    if ranks >= MIN_RANKS:
        return MAX_GRID_LINES + MAX_LINES_BELOW_GRID
    return MAX_LINES


class MachineTable(RankTable):
    """The table of a run on several machines: a row for each machine, and for ranks of some."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "machines",
        """
        space | fold     | fold   | Unfold or fold the machine under the cursor
        u     | fold_all | unfold | Unfold all machines, or fold them again
        slash | filter   | filter | Filter by machine, rank or state
        """,
    )

    @dataclass
    class FoldPressed(Message):
        """The user folds or unfolds the machine of a row, or all machines if ``key`` is None."""

        key: str | None

    class FilterPressed(Message):
        """The user opens the filter."""

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        # The key plays the past of the run.
        return not takes_key(self.screen, action) and super().check_action(action, parameters)

    def action_fold(self) -> None:
        if self.cursor_key is not None:
            self.post_message(self.FoldPressed(self.cursor_key))

    def action_fold_all(self) -> None:
        self.post_message(self.FoldPressed(None))

    def action_filter(self) -> None:
        self.post_message(self.FilterPressed())


class RanksPanel(FilterPanel):
    """The ranks of a run, drawn from frames."""

    LIST: ClassVar[str] = "#machine-table"

    def __init__(self, *, id: str) -> None:  # noqa: A002 - Textual's name for it
        super().__init__(4, TITLE, id=id)
        self._frame: Frame | None = None
        self._selection = RowSelection()
        self._alone = False

    def compose(self) -> ComposeResult:
        yield RankTable(id="rank-table")

    def show(self, frame: Frame, *, alone: bool) -> int:
        """Draw ``frame``; return the lines that the panel takes if other panels are visible.

        With ``alone`` the panel has the whole height of the screen.
        """
        self._frame, self._alone = frame, alone
        if not (frame.snapshot.nodes or self.query(MachineTable)):
            rows = run_view.rank_rows(frame)
            table = self.query_one(RankTable)
            table.note = None if frame.snapshot.state in LIVE else "no rank reported"
            if frame.is_unknown:
                table.note = NOT_RECORDED
            table.set_rows(rows)
            self.set_titles(TITLE, run_view.ranks_title(frame))
            return min(len(rows) + 1, MAX_LINES)
        self._mount_machines()
        grid = self._show_grid(frame)
        lines = max(1, self._show_rows(frame)) + 1 + self.is_filtering
        return grid + min(lines, MAX_LINES_BELOW_GRID if grid else MAX_LINES)

    # -- several machines --------------------------------------------------------------------------

    @property
    def table(self) -> MachineTable:
        return self.query_one(MachineTable)

    @property
    def is_filtering(self) -> bool:
        """True if the filter is open."""
        return self.has_class("-filtering")

    def _mount_machines(self) -> None:
        if self.query(MachineTable):
            return
        ranks = self.query_one(RankTable)
        ranks.display = False
        table = MachineTable(id="machine-table")
        placeholder = "filter: gpu-b, 12, 0-15, gpu-b:12, stalled"
        self.mount(
            Input(placeholder=placeholder, id="rank-filter", compact=True, classes="filter"),
            LiveLines(id="rank-grid"),
            table,
            before=ranks,
        )
        if ranks.has_focus:
            table.focus()

    def _show_grid(self, frame: Frame) -> int:
        """Draw the grid of cells, and return its lines."""
        widget = self.query_one("#rank-grid", LiveLines)
        available = MAX_GRID_LINES
        if self._alone:
            available = self.size.height - MIN_TABLE_LINES - self.is_filtering
        widget.display = has_grid(frame) and available > 0
        if not widget.display:
            return 0
        widget.show(partial(grid_lines, rank_grid(frame), available))
        return len(widget.lines_for(max(1, widget.size.width or self.size.width)))

    def _show_rows(self, frame: Frame) -> int:
        """Show the rows of machines and ranks, and return their number."""
        machines = MachineRows(frame, self._selection)
        rows = machines.rows()
        filtered = bool(self._selection.query)
        table = self.table
        table.note = "no match" if filtered and not rows else None
        if frame.is_unknown:
            table.note = NOT_RECORDED
        table.set_rows(rows)
        parts = [missing_machines(frame.snapshot), rank_summary(frame.snapshot)]
        summary = ", ".join(part for part in parts if part) or waiting_reason(frame.snapshot)
        if filtered:
            total = len(frame.snapshot.ranks)
            summary = f"{machines.listed_ranks} of {total} ranks match"
        self.set_titles(TITLE, summary)
        return len(rows)

    def fill_list(self) -> None:
        # Another filter lists other ranks, so machines are folded and unfolded anew.
        self._selection = RowSelection(query=self.filter_text)
        self._redraw()

    def _redraw(self) -> None:
        if self._frame is not None:
            self.show(self._frame, alone=self._alone)

    # -- folding -----------------------------------------------------------------------------------

    @on(RankTable.RowSelected)
    def _row_opened(self, message: RankTable.RowSelected) -> None:
        """Fold or unfold the machine that was opened; the run screen opens the log of a rank."""
        if message.key.startswith(MACHINE_KEY):
            message.stop()
            self._fold(message.key)

    @on(MachineTable.FoldPressed)
    def _fold_pressed(self, message: MachineTable.FoldPressed) -> None:
        message.stop()
        if message.key is None:
            self._fold_all()
        else:
            self._fold(message.key)

    @on(MachineTable.FilterPressed)
    def _filter_pressed(self, message: MachineTable.FilterPressed) -> None:
        message.stop()
        self.open_filter()

    def _fold(self, key: str) -> None:
        """Fold or unfold the machine of a row. The cursor moves to the row of the machine."""
        keys = self.table.keys
        index = keys.index(key) if key in keys else 0
        while index and not keys[index].startswith(MACHINE_KEY):
            index -= 1
        if not keys:
            return
        self.table.cursor = index
        node = int(keys[index].removeprefix(MACHINE_KEY))
        unfolded = not _is_unfolded(self.table.rows[index])
        folds = {**self._selection.unfolded, node: unfolded}
        self._selection = replace(self._selection, unfolded=folds)
        self._redraw()

    def _fold_all(self) -> None:
        """Unfold all machines, or fold all if one is unfolded."""
        machines = {
            int(key.removeprefix(MACHINE_KEY)): row
            for key, row in zip(self.table.keys, self.table.rows, strict=True)
            if key.startswith(MACHINE_KEY)
        }
        unfold = not any(map(_is_unfolded, machines.values()))
        self._selection = replace(self._selection, unfolded=dict.fromkeys(machines, unfold))
        self._redraw()


def _is_unfolded(row: RankRow) -> bool:
    return row.rank.startswith(UNFOLDED)
