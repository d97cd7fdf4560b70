"""The log panel of a run screen: the log of all ranks, of one rank, or of the launcher."""

from __future__ import annotations

from textual import on
from textual.app import ComposeResult

from ltui.app.live.frame import Frame
from ltui.app.panels.panel import Panel
from ltui.widgets.log_rows import LogLevel
from ltui.widgets.log_view import LogLines, LogView
from ltui.widgets.view_models import LogLine

ALL_RANKS, LAUNCHER = -1, -2
"""Values of ``LogPanel.source`` that are not the number of a rank."""


class LogPanel(Panel):
    """A panel that shows the log lines of its ``source``."""

    def __init__(self, *, id: str) -> None:  # noqa: A002 - Textual's name for it
        super().__init__(5, "log", id=id)
        self.source = ALL_RANKS
        """The number of a rank, ``ALL_RANKS`` or ``LAUNCHER``."""
        self._shown: tuple[int, int, int] | None = None
        """Attempt, source and number of log lines that were shown last."""

    def compose(self) -> ComposeResult:
        yield LogView(id="log-view")

    def show(self, frame: Frame) -> None:
        """Add the new lines of ``frame``; replace all lines if the attempt or source changed."""
        lines = self.query_one(LogLines)
        shown, current = self._shown, (frame.snapshot.attempt, self.source, frame.log_count)
        if shown == current:
            return
        self._shown = current
        if shown is not None and shown[:2] == current[:2] and shown[2] <= frame.log_count:
            new = frame.log[max(0, len(frame.log) - (frame.log_count - shown[2])) :]
            lines.extend(line for line in new if is_from(line, self.source))
        else:
            lines.show_ranks = self.source == ALL_RANKS
            lines.set_lines(line for line in frame.log if is_from(line, self.source))
        self._update_titles()

    def next_source(self, frame: Frame | None) -> None:
        """Show the next source: all ranks, then each rank, then the launcher."""
        ranks = [r.rank for r in frame.snapshot.ranks] if frame is not None else []
        sources = [ALL_RANKS, *sorted(ranks), LAUNCHER]
        index = sources.index(self.source) if self.source in sources else -1
        self.source = sources[(index + 1) % len(sources)]
        if frame is not None:
            self.show(frame)

    def _update_titles(self) -> None:
        lines = self.query_one(LogLines)
        following = "live" if lines.follow else "f: jump to newest"
        level = "" if lines.level is LogLevel.ALL else f", {lines.level.value}"
        names = {ALL_RANKS: "all ranks", LAUNCHER: "launcher"}
        source = names.get(self.source, f"rank {self.source}")
        self.set_titles(f"log, {source}{level}", f"v: choose rank · L: level · {following}")

    @on(LogLines.ModeChanged)
    def _mode_changed(self, message: LogLines.ModeChanged) -> None:
        message.stop()
        self._update_titles()


def is_from(line: LogLine, source: int) -> bool:
    """Return True if a line belongs to ``source``."""
    if source == ALL_RANKS:
        return True
    return line.rank is None if source == LAUNCHER else line.rank == source
