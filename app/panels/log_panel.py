"""The log panel of a run screen: the log of all ranks, of one rank, or of the launcher."""

from __future__ import annotations

from collections.abc import Mapping

from textual import on
from textual.app import ComposeResult

from ltui.app.live.frame import NOT_RECORDED, Frame
from ltui.app.panels.panel import Panel
from ltui.app.presentation.machines import log_labels
from ltui.training.state.run_snapshot import LIVE, RunSnapshot
from ltui.widgets.log_rows import LogLevel
from ltui.widgets.log_view import LogLines, LogView
from ltui.widgets.view_models import LAUNCHER, LogLine

ALL_RANKS = -1
"""Value of ``LogPanel.source`` for the lines of all ranks and launchers."""


class LogPanel(Panel):
    """A panel that shows the log lines of its ``source``."""

    def __init__(self, *, id: str) -> None:  # noqa: A002 - Textual's name for it
        super().__init__(5, "log", id=id)
        self.source = ALL_RANKS
        """``ALL_RANKS``, or the ``LogLine.source`` of the lines that are shown."""
        self._shown: tuple[tuple[int, int, int], int] | None = None
        """What was shown last: attempt, series of a past moment and source; number of lines."""
        self._newest = ""
        """What the newest line is, for the title; empty until it is known."""
        self._labels: Mapping[int, str] = {}
        """Labels of ranks on several machines."""
        self._labelled: object = None
        """The machines and ranks for which the labels are."""

    def compose(self) -> ComposeResult:
        yield LogView(id="log-view")

    def show(self, frame: Frame) -> None:
        """Add the new lines of ``frame``; replace all lines if the attempt or source changed."""
        lines = self.query_one(LogLines)
        self._update_labels(frame.snapshot)
        ended = frame.snapshot.state not in LIVE
        lines.note = "nothing was written" if ended else "nothing written yet"
        if frame.is_unknown:
            lines.note = NOT_RECORDED
        newest = "past" if frame.moment is not None else "ended" if ended else "live"
        if newest != self._newest:
            self._newest = newest
            self._update_titles()
        series = 0 if frame.moment is None else frame.moment.series
        shown, current = self._shown, (frame.snapshot.attempt, series, self.source)
        if shown == (current, frame.log_count):
            return
        self._shown = current, frame.log_count
        if shown is not None and shown[0] == current and shown[1] <= frame.log_count:
            new = frame.log[max(0, len(frame.log) - (frame.log_count - shown[1])) :]
            lines.extend(line for line in new if is_from(line, self.source))
        else:
            lines.show_ranks = self.source == ALL_RANKS
            lines.set_lines(line for line in frame.log if is_from(line, self.source))
        self._update_titles()

    def _update_labels(self, run: RunSnapshot) -> None:
        """Name the machines of the ranks. Machines may join after the first lines were shown."""
        labelled = tuple((node.name, node.ranks) for node in run.nodes), len(run.ranks)
        if labelled != self._labelled:
            self._labelled = labelled
            self.query_one(LogLines).rank_labels = self._labels = log_labels(run)

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
        following = self._newest if lines.follow else "f: jump to newest"
        level = "" if lines.level is LogLevel.ALL else f", {lines.level.value}"
        source = source_name(self.source, self._labels)
        parts = ("v: choose rank", "L: level", following)
        self.set_titles(f"log, {source}{level}", " · ".join(part for part in parts if part))

    @on(LogLines.ModeChanged)
    def _mode_changed(self, message: LogLines.ModeChanged) -> None:
        message.stop()
        self._update_titles()


def source_name(source: int, labels: Mapping[int, str]) -> str:
    """Return ``all ranks``, ``launcher``, ``rank 2``; ``gpu-b:12`` and ``gpu-b launcher``."""
    if source == ALL_RANKS:
        return "all ranks"
    label = labels.get(source)
    if source <= LAUNCHER:
        return "launcher" if label is None else f"{label} launcher"
    return f"rank {source}" if label is None else label


def log_sources(frame: Frame | None) -> list[tuple[int, str]]:
    """Return all sources with their names: all ranks, each rank, the launchers."""
    if frame is None:
        return [(source, source_name(source, {})) for source in (ALL_RANKS, LAUNCHER)]
    labels = log_labels(frame.snapshot)
    ranks = {rank.rank for rank in frame.snapshot.ranks} | {s for s in labels if s > ALL_RANKS}
    launchers = sorted((source for source in labels if source <= LAUNCHER), reverse=True)
    sources = [ALL_RANKS, *sorted(ranks), *(launchers or [LAUNCHER])]
    return [(source, source_name(source, labels)) for source in sources]


def is_from(line: LogLine, source: int) -> bool:
    """Return True if a line belongs to ``source``."""
    return source in (ALL_RANKS, line.source)
