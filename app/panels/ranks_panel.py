"""The ranks panel of a run screen: the table of ranks, with a summary in the frame."""

from __future__ import annotations

from textual.app import ComposeResult

from ltui.app.live.frame import Frame
from ltui.app.panels.panel import Panel
from ltui.app.presentation import run_view
from ltui.widgets.rank_table import RankTable

TITLE = "ranks"


class RanksPanel(Panel):
    """A panel with one row for each rank."""

    def __init__(self, *, id: str) -> None:  # noqa: A002 - Textual's name for it
        super().__init__(4, TITLE, id=id)

    def compose(self) -> ComposeResult:
        yield RankTable(id="rank-table")

    def show(self, frame: Frame) -> int:
        """Draw the ranks of ``frame``; return the lines that the panel needs for all rows."""
        rows = run_view.rank_rows(frame)
        self.query_one(RankTable).set_rows(rows)
        self.set_titles(TITLE, run_view.ranks_title(frame))
        return len(rows) + 1
