"""The log panel of a run screen: the log of all ranks, of one rank, or of the launcher."""

from __future__ import annotations

from collections.abc import Mapping

from textual import on
from textual.app import ComposeResult

from ltui.app.live.frame import Frame
from ltui.app.panels.panel import Panel
from ltui.app.presentation.machines import rank_labels
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
        self._labels: Mapping[int, str] = {}
        """Labels of ranks on several machines."""

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
            lines.rank_labels = self._labels = rank_labels(frame.snapshot)
            lines.show_ranks = self.source == ALL_RANKS
            lines.set_lines(line for line in frame.log if is_from(line, self.source))
        self._update_titles()

    def next_source(self, frame: Frame | None) -> None:
        """Show the next source: all ranks, then each rank, then the launcher."""
        sources = [source for source, _ in log_sources(frame)]
        index = sources.index(self.source) if self.source in sources else -1
        self.choose(sources[(index + 1) % len(sources)], frame)

    def choose(self, source: int, frame: Frame | None) -> None:
        """Show the lines of a rank, of all ranks, or of the launcher."""
        self.source = source
        if frame is not None:
            self.show(frame)

    def _update_titles(self) -> None:
        lines = self.query_one(LogLines)
        following = "live" if lines.follow else "f: jump to newest"
        level = "" if lines.level is LogLevel.ALL else f", {lines.level.value}"
        source = source_name(self.source, self._labels)
        self.set_titles(f"log, {source}{level}", f"v: choose rank · L: level · {following}")

    @on(LogLines.ModeChanged)
    def _mode_changed(self, message: LogLines.ModeChanged) -> None:
        message.stop()
        self._update_titles()


def source_name(source: int, labels: Mapping[int, str]) -> str:
    """Return ``all ranks``, ``launcher``, ``rank 2``, or ``gpu-b:12`` on several machines."""
    names = {ALL_RANKS: "all ranks", LAUNCHER: "launcher"}
    return names.get(source) or labels.get(source) or f"rank {source}"


def log_sources(frame: Frame | None) -> list[tuple[int, str]]:
    """Return all sources with their names: all ranks, each rank, the launcher."""
    run = frame.snapshot if frame is not None else None
    labels = {} if run is None else rank_labels(run)
    ranks = set() if run is None else {rank.rank for rank in run.ranks} | set(labels)
    sources = [ALL_RANKS, *sorted(ranks), LAUNCHER]
    return [(source, source_name(source, labels)) for source in sources]


def is_from(line: LogLine, source: int) -> bool:
    """Return True if a line belongs to ``source``."""
    if source == ALL_RANKS:
        return True
    return line.rank is None if source == LAUNCHER else line.rank == source
